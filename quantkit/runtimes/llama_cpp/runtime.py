"""llama.cpp on the CPU: runs a bundle's `gguf/model.gguf` as its own programs do. Needs llama-cpp-python; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import Runtime
from quantkit.runtimes.llama_cpp.library import Vocabulary
from quantkit.runtimes.llama_cpp.session import FOLDER, MODEL, LlamaModel

if TYPE_CHECKING:
    from quantkit.runtimes.generate import TextTokens

__all__ = ["RUNTIME", "LlamaCpp"]


class LlamaCpp(Runtime):
    """See the module."""

    name = floats = "llama_cpp"
    imports, extra, order, cache = ("llama_cpp",), "gguf", 2, "float16"
    packages = ("llama-cpp-python", "gguf")

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """See `Runtime`."""
        if machine.has("llama_cpp"):
            return None
        return "llama-cpp-python is not installed: pip install 'quantkit[gguf]' (it compiles for minutes)"

    def folder(self, bundle: Bundle) -> Path:
        """The folder with the file.

        Raises:
            InputError: `bundle-without-gguf`.
        """
        folder = bundle.path / FOLDER
        if not (folder / MODEL).is_file():
            raise InputError(
                "bundle-without-gguf",
                where=str(bundle.path),
                value=f"no {FOLDER}/{MODEL}",
                rule="this runtime runs the GGUF export",
                remedy="quantkit export BUNDLE --to gguf",
            )
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> LlamaModel:
        """What scores a bundle, or the folder of one that is being built; `built` is for what is executable."""
        return self.opens(path / FOLDER, threads)

    def opens(self, folder: Path, threads: int | None = None) -> LlamaModel:
        """See `Runtime`. Raises as `load`, but for what a manifest says."""
        return LlamaModel(folder, threads=threads)

    def context(self, folder: Path) -> int:
        """Read it from the file; llama.cpp need not be here: a device may have it.

        Raises:
            InputError: `gguf-damaged`. MissingDependency: the `gguf` package.
        """
        from quantkit.model.source.gguf.file import fields

        stated = fields(folder / MODEL)
        return int(stated.get(f"{stated.get('general.architecture')}.context_length", 4096))

    def load(self, bundle: Bundle, **settings: Any) -> LlamaModel:
        """The model; its file is checked against the manifest first.

        Raises:
            MissingDependency: llama-cpp-python.
            InputError: `bundle-without-gguf`, `hash-mismatch`, `gguf-unreadable`.
        """
        return LlamaModel(self.checked(bundle), **settings)

    def tokenizer(self, bundle: Bundle) -> TextTokens:
        """Of the file itself, as llama.cpp reads it, or as we do where it is a device that has llama.cpp."""
        from quantkit.runtimes.llama_cpp.words import words_of

        path = self.folder(bundle) / MODEL
        return words_of(path) if self.why_not_here() else Vocabulary(path)


RUNTIME = LlamaCpp()
