"""TensorRT: runs an engine that was built on this kind of GPU, by this version, from a verified bundle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes import Runtime
from quantkit.runtimes.tensorrt import library as tensorrt_library
from quantkit.runtimes.tensorrt.file import FOLDER, choose, descriptions, matching, verified
from quantkit.runtimes.tensorrt.library import Library, Name
from quantkit.runtimes.torch import RUNTIME as TORCH

if TYPE_CHECKING:
    from quantkit.runtimes.tensorrt.decode import EngineModel, LoadedGraph
    from quantkit.runtimes.tensorrt.engine import Engine

Gpus = Callable[[], tuple[Sequence[Mapping[str, Any]], str]]


class TensorrtRuntime(Runtime):
    """Runtime for one of the two libraries; see `library.py`.

    Args:
        name: name of the library.
        library: library that runs engines, for tests; None: the installed one.
        gpus: function that lists GPUs, for tests; None: this machine's.
        device: torch device.
    """

    engines = True

    def __init__(
        self, name: Name, *, library: Library | None = None, gpus: Gpus | None = None, device: str = "cuda"
    ) -> None:
        self.name = name
        # torch runs the float model for comparison, and names the GPU
        self.packages = (*TORCH.packages, "nvidia-ml-py", "polygraphy")
        self.installed = (*TORCH.installed, name.replace("_", "-"))
        self._library, self._gpus, self._device = library, gpus, device

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason as `Runtime.why_not_here` does; with a folder, also if none of its engines runs here."""
        gpus, why = self._here()
        if not gpus:
            return f"no NVIDIA GPU: {why}"
        try:
            library = self._loaded()
        except MissingDependency as problem:
            return problem.line()
        known = library.capabilities()
        if known and str(gpus[0]["sm"]) not in known:
            return f"{library.name} {library.version} runs on SM {', '.join(known)}; this is SM {gpus[0]['sm']}"
        if blind := self._torch_blind():
            return blind
        if folder is not None:
            try:
                choose(folder, descriptions(folder), library, gpus[0])
            except InputError as problem:
                return problem.line()
        return None

    def _torch_blind(self) -> str | None:
        """Return the reason why torch, whose memory an engine uses, cannot reach the GPU."""
        if self._device != "cuda":
            return None
        try:
            import torch
        except ImportError:
            return "torch is not installed: an engine's inputs and cache are its tensors"
        if torch.cuda.is_available():
            return None
        return f"torch {torch.__version__} sees no GPU: an engine's inputs and cache are its tensors"

    def folder(self, bundle: Bundle) -> Path:
        """Return the folder of the engines.

        Raises:
            InputError: `bundle-without-engine`.
        """
        folder = bundle.path / FOLDER
        if not any(folder.glob("*.engine")):
            verified(bundle)
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> EngineModel:
        """Open a bundle, finished or being built, to measure its accuracy.

        Raises:
            InputError: those of `load`; `not-a-bundle`.
        """
        if built is None:
            return self.load(Bundle.load(path))
        return self._run(path, {path / name: sha256 for name, sha256 in built.items()})

    def open_graph(self, path: Path, *, built: Mapping[str, str]) -> LoadedGraph:
        """Open the engine of a graph in a bundle being built; see `open`."""
        from quantkit.runtimes.tensorrt.decode import LoadedGraph

        return LoadedGraph(self._engine(path, {path / name: sha256 for name, sha256 in built.items()}))

    def load(self, bundle: Bundle) -> EngineModel:
        """Load the model's engine after comparing every file with the manifest.

        Raises:
            InputError: `bundle-without-engine`, `hash-mismatch`, `gpu-absent`, `engine-foreign`, `engine-unreadable`.
            MissingDependency: the library.
        """
        return self._run(bundle.path, verified(bundle))

    def _run(self, bundle: Path, files: Mapping[Path, str]) -> EngineModel:
        from quantkit.runtimes.tensorrt.decode import EngineModel

        loaded = EngineModel(self._engine(bundle, files))
        for note in loaded.notes:
            warnings.warn(note, stacklevel=3)
        return loaded

    def _engine(self, bundle: Path, files: Mapping[Path, str]) -> Engine:
        from quantkit.runtimes.tensorrt.engine import Engine

        gpus, why = self._here()
        if not gpus:
            raise self._absent(f"no NVIDIA GPU: {why}")
        library = self._loaded()
        file = matching(bundle, files, library, gpus[0])
        if blind := self._torch_blind():
            raise self._absent(blind)
        return Engine(file, library, device=self._device)

    def _here(self) -> tuple[Sequence[Mapping[str, Any]], str]:
        from quantkit import machine

        return (self._gpus or machine.gpus)()

    def _loaded(self) -> Library:
        return self._library or tensorrt_library.load(self.name)

    def _absent(self, why: str) -> InputError:
        rule = "an engine runs on the GPU that it was built for"
        remedy = "run it there, or run the checkpoint here with --runtime torch"
        return InputError("gpu-absent", self.name, why, rule, remedy)


RUNTIME = TensorrtRuntime("tensorrt")
