"""Runtimes, one a folder: load a bundle, run it, say what was used."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit import limits
from quantkit.errors import InputError
from quantkit.plugins import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from quantkit.bundle import Bundle
    from quantkit.runtimes.generate import Scores, TextTokens


class Scored(Protocol):
    """A model that is open in a runtime, as accuracy is measured on it."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the runtime, for rows."""

    @property
    def where(self) -> Mapping[str, str]:
        """The device that it runs on, for rows."""

    @property
    def ways(self) -> Mapping[str, float]:
        """Bytes of weights that each way of multiplying reads; empty of a model with one."""

    @property
    def prompt_rows(self) -> int:
        """Rows from which on a model with several ways goes that of prompts; 0 of others."""

    @property
    def together(self) -> int | None:
        """Texts of one length that are encoded at once; None: all."""

    @property
    def headed(self) -> bool:
        """Whether it is an encoder that gives logits besides its last hidden states."""

    def scores(self, ids: Tensor, at_once: int | None = None) -> Scores:
        """Logits of a decoder for ids [n, T]; it is asked for the positions of a sequence in their order.

        Args:
            at_once: tokens that are fed at a time, at most; None: as many as fit.
        """

    def encode(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Last hidden states [B, S, width] of an encoder for ids [B, S]."""

    def logits(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Logits of a headed encoder for ids [B, S]: of texts [B, N], of tokens [B, S, N], of spans [B, S, 2]."""


class Session(Scored, Protocol):
    """The same of a model that is timed, too. What does not fit is an InputError: `out-of-memory` for this machine,
    `prompt-too-long` for this model, `shape-unsupported` for this engine."""

    @property
    def decoder(self) -> bool:
        """Whether it has a cache and gives logits."""

    @property
    def context(self) -> int:
        """The most tokens that a sequence can have."""

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """One prepared decode step with `context` tokens in the cache; each call repeats the same step."""

    def prefill(self, batch: int, tokens: int) -> Callable[[], object]:
        """One prepared prefill of `tokens` tokens a sequence; each call repeats it."""

    def work(self) -> Mapping[str, Any]:
        """What a step moves and computes, under the names of `StepCost`; `weight_bytes` at least."""


class Graph(Protocol):
    """A graph that is no transformer, open in a runtime."""

    batch: int | None

    def __call__(self, feed: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The outputs by their names. Raises InputError `shape-unsupported`."""


class Runtime(Protocol):
    """One runtime; it inherits what it does not declare.

    Attributes:
        name: as in targets and on the command line; the folder's name.
        engines: whether it runs engines, each built for one kind of GPU.
        floats: the runtime that runs the float model which its times are set against; None: `measure` does not time it
            on a processor.
        packages: what pip calls the libraries that it needs on a device, beside what all that runs there needs.
        installed: what pip calls those that have to be there already, because gigabytes are not carried.
        imports: what Python calls the libraries that it needs.
        extra: of quantkit, that brings them.
        graph: the file of a graph that is no transformer, in the folder that it reads; "" of one that runs none.
        cache: the format of keys and values on a processor.
        order: of the runtimes that a verdict may rest on, the lowest one's times come first.
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
    order: int = 9

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Why nothing can be run in it on this machine; None where it can.

        Args:
            folder: of a bundle, or of one that is being built: then of what this bundle has for it.
        """
        return None

    def demand(self, folder: Path | None = None) -> None:
        """Raises InputError `runtime-not-here`, with what `why_not_here` says."""
        if why := self.why_not_here(folder):
            rule, remedy = "it runs on this machine", "install what it needs, or use another machine"
            if self.floats not in (None, self.name):
                remedy = f"use the runtime `{self.floats}`, which reads the same file"
            raise InputError("runtime-not-here", self.name, why, rule, remedy)

    def folder(self, bundle: Bundle) -> Path:
        """The folder of a bundle that it reads. Raises InputError, `bundle-without-...`."""
        ...

    def checked(self, bundle: Bundle) -> Path:
        """The same, once its files are found to be what the manifest says. Raises InputError, `hash-mismatch` too."""
        folder = self.folder(bundle)
        bundle.demand_intact(f"{folder.name}/")
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> Scored:
        """What scores a bundle, or the folder of one that is being built.

        Args:
            path: of it.
            threads: to compute with, where the runtime takes a number.
            built: of one that is being built, the hashes of what may be executed, by their paths in it; None: the
                manifest says.

        Raises:
            InputError: as `load`; `not-a-bundle`.
        """
        ...

    def opens(self, folder: Path, threads: int | None = None) -> Session:
        """What is timed: the model of the folder that it reads. Raises InputError, of a runtime that times nothing."""
        raise self._not_timed(folder)

    def opens_graph(self, file: Path, threads: int | None = None) -> Graph:
        """The graph of a file, which is no transformer. Raises InputError, of a runtime that runs none."""
        raise self._not_timed(file)

    def _not_timed(self, path: Path) -> InputError:
        rule, remedy = "it runs none of this kind by itself", "use another runtime: quantkit list runtimes"
        return InputError("runtime-unsupported", str(path), self.name, rule, remedy)

    def context(self, folder: Path) -> int:
        """Count the tokens of the longest sequence, for the model in a folder; by default as `config.json` says."""
        from quantkit.model.structure.kinds import positions

        return positions(json.loads(limits.read(folder / "config.json"))) or 4096

    def load(self, bundle: Bundle) -> Any:
        """The model of a bundle as the runtime's library runs it; settings are each runtime's own."""
        ...

    def tokenizer(self, bundle: Bundle) -> TextTokens:
        """Text to token ids and back; by default by the files in the folder that it reads.

        Raises:
            MissingDependency: tokenizers. InputError: `no-tokenizer`, and of `folder`.
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
    ) -> dict[str, Any]:
        """Continue a prompt.

        Args:
            bundle: a decoder's.
            prompt: text.
            new_tokens: at most.
            sample: draw from the distribution instead of taking the most likely token.
            seed: of the drawing.
            chat: wrap the prompt in the model's chat template.

        Returns:
            `text`, `tokens` (how many), `seconds`; of runtimes with a step of their own `first_token_s` and
            `tokens_per_s` of the steps after it, and `notes`, where a user has to know something of the runtime.

        Raises:
            InputError: of `load`; `not-a-decoder`, `no-tokenizer`, `prompt-empty`, `prompt-too-long`.
        """
        from quantkit.runtimes.generate import generated

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
    """A runtime that reads one file of a bundle, beside which its tokenizer lies.

    Attributes:
        file: `onnx/model.onnx`.
        absent: the code and the rule of the error where a bundle has none.
        model: the class of what it runs.
    """

    file: str
    absent: tuple[str, str]
    model: Callable[..., Any]

    def folder(self, bundle: Bundle) -> Path:
        """Find the folder with the file. Raises InputError `bundle-without-...`."""
        path = bundle.path / self.file
        if not path.is_file():
            (code, rule), remedy = self.absent, f"quantkit export BUNDLE --to {path.parent.name}"
            raise InputError(code, str(bundle.path), f"no {self.file}", rule, remedy)
        return path.parent

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> Any:
        """See `Runtime`; `built` is for what is executable."""
        return self.opens((path / self.file).parent, threads)

    def opens(self, folder: Path, threads: int | None = None) -> Any:
        """See `Runtime`. Raises as `load`, but for what a manifest says."""
        return type(self).model(folder, threads=threads)

    def load(self, bundle: Bundle, **settings: Any) -> Any:
        """Load the model; its files are checked against the manifest first.

        Raises:
            MissingDependency: the library.
            InputError: `bundle-without-...`, `hash-mismatch`, `...-unreadable`.
        """
        return type(self).model(self.checked(bundle), **settings)


_RUNTIMES = Kind[Runtime]("runtimes")
load_runtime = _RUNTIMES.load


def timed(besides: Collection[str] = ()) -> list[str]:
    """The runtimes that a verdict may rest on, in their order.

    Args:
        besides: names that rows have: those of them that installed packages offer count too.
    """
    names = {*_RUNTIMES.shipped(), *(name for name in besides if name in _RUNTIMES)}
    loaded = [load_runtime(name) for name in sorted(names)]
    return [runtime.name for runtime in sorted(loaded, key=lambda one: one.order) if runtime.floats is not None]


def of_graphs() -> list[str]:
    """Name the runtimes for graphs other than transformers, in their order."""
    return [name for name in timed() if load_runtime(name).graph]


def of_one_file(name: str) -> list[str]:
    """The runtimes that read the same file as one of them, which comes first."""
    return [other for other in timed() if load_runtime(other).floats == name]
