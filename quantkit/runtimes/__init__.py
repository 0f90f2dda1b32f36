"""Runtimes, one a folder: load a bundle, run it, say what was used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quantkit.errors import InputError
from quantkit.plugins import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quantkit.bundle import Bundle
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.generate import TextTokens
    from quantkit.runtimes.llama_cpp.session import LlamaModel
    from quantkit.runtimes.onnxruntime.session import OnnxModel
    from quantkit.runtimes.openvino.session import OpenvinoModel
    from quantkit.runtimes.tensorrt import decode

    # a model in a runtime: torch runs it block by block, a session or an engine runs it whole
    Candidate = StreamedModel | OnnxModel | LlamaModel | OpenvinoModel | decode.EngineModel


@runtime_checkable
class Headed(Protocol):
    """An encoder in a session whose file may hold the head of its class."""

    @property
    def headed(self) -> bool:
        """Tell whether it does, so that there are logits besides the last hidden states."""

    def logits(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return what it gives for ids [B, S]: of texts [B, N], of tokens [B, S, N], of spans [B, S, 2]."""


class Runtime(Protocol):
    """One runtime; it inherits what it does not declare.

    Attributes:
        name: as in targets and on the command line; the folder's name.
        engines: whether it runs engines, each built for one kind of GPU.
        floats: the runtime that runs the float model which its times are set against; None: `measure` does not time it
            on a processor.
        packages: what pip calls the libraries that it needs on a device, beside what all that runs there needs.
        installed: what pip calls those that have to be there already, because gigabytes are not carried.
    """

    name: str
    engines: bool = False
    floats: str | None = None
    packages: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Why nothing can be run in it on this machine; None where it can.

        Args:
            folder: of a bundle, or of one that is being built: then of what this bundle has for it.
        """
        return None

    def demand(self, folder: Path | None = None) -> None:
        """Raises InputError `runtime-not-here`, with what `why_not_here` says."""
        if why := self.why_not_here(folder):
            other = self.floats not in (None, self.name)
            raise InputError(
                "runtime-not-here",
                where=self.name,
                value=why,
                rule="it runs on this machine",
                remedy=f"use the runtime `{self.floats}`, which reads the same file"
                if other
                else "use another machine",
            )

    def folder(self, bundle: Bundle) -> Path:
        """The folder of a bundle that it reads. Raises InputError, `bundle-without-...`."""
        ...

    def checked(self, bundle: Bundle) -> Path:
        """The same, once its files are found to be what the manifest says. Raises InputError, `hash-mismatch` too."""
        folder = self.folder(bundle)
        bundle.demand_intact(f"{folder.name}/")
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> Candidate:
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


load_runtime = Kind[Runtime]("runtimes").load
