"""Runtimes: each loads a bundle, runs it, and reports its settings. One folder for one runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit import limits
from quantkit.errors import InputError
from quantkit.plugins import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from quantkit.bundle import Bundle
    from quantkit.runtimes.child import Report
    from quantkit.runtimes.generate import Decoder, Scores, TextTokens


@dataclass(frozen=True)
class OwnRuntime:
    """A runtime that needs a Python of its own.

    Args:
        name: name of the runtime.
        program: file that runs in that Python, and imports nothing of quantkit.
        package: distribution that is installed where a CUDA GPU is.
        cpu_package: distribution that is installed elsewhere; its requirements of torch are met by the torch that the
            package index offers.
        oldest: oldest version that the program was written for.
    """

    name: str
    program: Path
    package: str
    cpu_package: str
    oldest: tuple[int, ...]


class Scored(Protocol):
    """Interface of an open model whose accuracy is measured."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the runtime, for rows of measurements."""

    @property
    def where(self) -> Mapping[str, str]:
        """Device of the model, for rows of measurements."""

    @property
    def ways(self) -> Mapping[str, float]:
        """Way of multiplying -> bytes of weights that it reads; empty for a model with one way."""

    @property
    def prompt_rows(self) -> int:
        """Smallest number of rows for which a model with two ways takes that of prompts; 0 for other models."""

    @property
    def together(self) -> int | None:
        """Number of texts of one length that are encoded at once; None: all."""

    @property
    def headed(self) -> bool:
        """True for an encoder with logits besides its last hidden states."""

    def scores(self, ids: Tensor, at_once: int | None = None) -> Scores:
        """Return a function for a decoder's logits of ids [n, T]; positions of a sequence must be requested in order.

        Args:
            at_once: largest number of tokens in one run; None: as many as fit.
        """

    def encode(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the last hidden states [B, S, width] of an encoder for ids [B, S]."""

    def logits(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the logits of an encoder's head for ids [B, S]: of texts [B, N], tokens [B, S, N], spans [B, S, 2]."""


class Session(Scored, Protocol):
    """Interface of an open model that is also timed.

    Shapes that do not fit raise InputError: `out-of-memory` on this machine, `prompt-too-long` for this model,
    `shape-unsupported` for this engine.
    """

    @property
    def decoder(self) -> bool:
        """True if it has a cache and returns logits."""

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """Prepare one decode step with `context` tokens in the cache; every call repeats this step."""

    def prefill(self, batch: int, tokens: int) -> Callable[[], object]:
        """Prepare one prefill of `tokens` tokens a sequence; every call repeats it."""

    def work(self) -> Mapping[str, Any]:
        """Return the bytes and operations of a step, under the names of `StepCost`; at least `weight_bytes`."""


class Graph(Protocol):
    """Interface of an open graph that is no transformer."""

    batch: int | None

    def __call__(self, feed: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Run the graph and return its outputs by name. Raises InputError `shape-unsupported`."""


class Runtime(Protocol):
    """Interface of one runtime, with defaults.

    Attributes:
        name: name in targets and on the command line; the name of the folder.
        engines: whether it runs engines, which are built for one kind of GPU.
        floats: runtime that runs the float model for the comparison of times; None: it is not timed on a CPU.
        packages: pip names of the libraries that it needs on a device, besides those that every runtime needs there.
        installed: pip names of libraries that must be on the device already, because they take gigabytes.
        imports: import names of the libraries that it needs.
        extra: extra of quantkit that installs them.
        graph: file name of a graph that is no transformer, in the runtime's folder; "" if it runs none.
        cache: format of keys and values on a CPU.
        images: whether `generate` takes images.
        own: what it needs of a Python of its own (`apart`); None: it runs in quantkit's.
        order: rank among the runtimes of a verdict; times of the lowest come first.
    """

    name: str
    engines: bool = False
    floats: str | None = None
    packages: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    extra: str = "compile"
    graph: str = ""
    cache: str = "float32"
    images: bool = False
    order: int = 9
    own: OwnRuntime | None = None

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason why it cannot run on this machine; None if it can.

        Args:
            folder: folder of a bundle, finished or being built; the answer is then for this bundle.
        """
        return None

    def demand(self, folder: Path | None = None) -> None:
        """Raise InputError `runtime-not-here` with the reason from `why_not_here`."""
        if why := self.why_not_here(folder):
            rule, remedy = "the runtime works on this machine", "install the missing library, or use another machine"
            if self.floats not in (None, self.name):
                remedy = f"use the runtime `{self.floats}`, which reads the same file"
            raise InputError("runtime-not-here", self.name, why, rule, remedy)

    def folder(self, bundle: Bundle) -> Path:
        """Return the folder of a bundle for this runtime. Raises InputError `bundle-without-...`."""
        ...

    def checked(self, bundle: Bundle) -> Path:
        """Return `folder` after comparing its files with the manifest. Raises InputError, also `hash-mismatch`."""
        folder = self.folder(bundle)
        bundle.demand_intact(f"{folder.name}/")
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> Scored:
        """Open a bundle, finished or being built, to measure its accuracy.

        Args:
            path: folder of the bundle.
            threads: threads for computing, if the runtime takes a number.
            built: path in a bundle being built -> hash of a file that may be executed; None: the manifest lists them.

        Raises:
            InputError: those of `load`; `not-a-bundle`.
        """
        ...

    def opens(self, folder: Path, threads: int | None = None) -> Session:
        """Open the model in its folder for timing. Raises InputError if the runtime is not timed."""
        raise self._not_timed(folder)

    def opens_apart(self, folder: Path, progress: Report | None = None) -> Any:
        """Open a folder in the runtime's own Python, to score it. Raises InputError if it has none."""
        raise self._not_timed(folder)

    def opens_graph(self, file: Path, threads: int | None = None) -> Graph:
        """Open a graph other than a transformer. Raises InputError if the runtime runs none."""
        raise self._not_timed(file)

    def _not_timed(self, path: Path) -> InputError:
        rule, remedy = "it cannot run this kind of file by itself", "use another runtime: quantkit list runtimes"
        return InputError("runtime-unsupported", str(path), self.name, rule, remedy)

    def context(self, folder: Path) -> int:
        """Return the longest sequence in tokens of the model in a folder; by default from `config.json`."""
        from quantkit.model.structure.kinds import positions

        return positions(json.loads(limits.read(folder / "config.json"))) or 4096

    def load(self, bundle: Bundle) -> Any:
        """Load the model of a bundle as an object of the runtime's library; settings depend on the runtime."""
        ...

    def writer(self, folder: Path) -> Decoder:
        """Open the model in its folder to write text, in float32 where the runtime takes a type."""
        session: Any = self.opens(folder)
        return session  # type: ignore[no-any-return]

    def tokenizer(self, bundle: Bundle) -> TextTokens:
        """Return the tokenizer of a bundle; by default from the files in the runtime's folder.

        Raises:
            MissingDependency: tokenizers. InputError: `no-tokenizer`, and those of `folder`.
        """
        from quantkit.runtimes.text import Tokenizer

        return Tokenizer(self.folder(bundle))

    def generate(
        self,
        bundle: Bundle,
        prompt: str,
        *,
        new_tokens: int = 64,
        sample: bool = False,
        seed: int = 0,
        chat: bool = False,
        images: Sequence[Path] = (),
    ) -> dict[str, Any]:
        """Continue a prompt.

        Args:
            bundle: bundle of a decoder.
            prompt: text to continue.
            new_tokens: largest number of new tokens.
            sample: whether to draw from the distribution instead of taking the most likely token.
            seed: seed for drawing.
            chat: whether to put the prompt into the model's chat template.
            images: image files before the prompt.

        Returns:
            `text`, `tokens` (their number), `seconds`. Runtimes with a decode step also return `first_token_s`,
            `tokens_per_s` of the later steps, and `notes`: facts about the runtime that the user should know.

        Raises:
            InputError: those of `load`; `not-a-decoder`, `no-tokenizer`, `prompt-empty`, `prompt-too-long`;
                `generate-images`.
        """
        from quantkit.runtimes.generate import demand_images, generated

        if images:
            demand_images(bundle, self, images)
        return generated(
            bundle,
            lambda: self.tokenizer(bundle),
            lambda: self.load(bundle),
            prompt,
            new_tokens=new_tokens,
            sample=sample,
            seed=seed,
            chat=chat,
        )


class FileRuntime(Runtime):
    """A runtime that reads one file of a bundle, with the tokenizer in the same folder.

    Attributes:
        file: path of the file: `onnx/model.onnx`.
        absent: code and rule of the error for a bundle without the file.
        model: class of the open model.
    """

    file: str
    absent: tuple[str, str]
    model: Callable[..., Any]

    def folder(self, bundle: Bundle) -> Path:
        """Find the folder with the file. Raises InputError `bundle-without-...`."""
        path = bundle.path / self.file
        if not path.is_file():
            (code, rule), remedy = self.absent, f"quantkit export {bundle.path} --to {path.parent.name}"
            if bundle.manifest.sees:
                remedy = "a model that takes images runs from its checkpoint: --runtime torch"
            raise InputError(code, str(bundle.path), f"no {self.file}", rule, remedy)
        return path.parent

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> Any:
        """Open as `Runtime.open` does; `built` is not needed, because nothing is executed."""
        return self.opens((path / self.file).parent, threads)

    def opens(self, folder: Path, threads: int | None = None) -> Any:
        """Open as `Runtime.opens` does. Raises as `load`, except for errors of the manifest."""
        return type(self).model(folder, threads=threads)

    def load(self, bundle: Bundle, **settings: Any) -> Any:
        """Load the model after comparing its files with the manifest.

        Raises:
            MissingDependency: the library.
            InputError: `bundle-without-...`, `hash-mismatch`, `...-unreadable`.
        """
        return type(self).model(self.checked(bundle), **settings)


_RUNTIMES = Kind[Runtime]("runtimes")
load_runtime = _RUNTIMES.load
runtimes = _RUNTIMES.shipped


def timed(besides: Collection[str] = ()) -> list[str]:
    """List the runtimes for verdicts, in their order.

    Args:
        besides: names in rows of measurements; plug-ins among them are added.
    """
    names = {*_RUNTIMES.shipped(), *(name for name in besides if name in _RUNTIMES)}
    loaded = [load_runtime(name) for name in sorted(names)]
    return [runtime.name for runtime in sorted(loaded, key=lambda one: one.order) if runtime.floats is not None]


def of_graphs() -> list[str]:
    """List the runtimes for graphs other than transformers, in their order."""
    return [name for name in timed() if load_runtime(name).graph]


def of_one_file(name: str) -> list[str]:
    """List the runtimes of the same file as this one, which comes first."""
    return [other for other in timed() if load_runtime(other).floats == name]
