"""TensorRT: runs an engine that was built on this kind of GPU, by this version, from a verified bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes._tensorrt_library import Name, load

FOLDER = "engine"


class Tensorrt:
    """One of the two libraries; see `_tensorrt_library`."""

    def __init__(self, name: Name) -> None:
        self.name = name

    def why_not_here(self) -> str | None:
        """Why no engine can be run on this machine; None where one can."""
        from quantkit.plan import machine

        gpus, why = machine.gpus()
        if not gpus:
            return f"no NVIDIA GPU: {why}"
        try:
            load(self.name)
        except MissingDependency as problem:
            return problem.line()
        return None

    def folder(self, bundle: Bundle) -> Path:
        """The folder with the engine.

        Raises:
            InputError: `bundle-without-engine`.
        """
        folder = bundle.path / FOLDER
        if not any(folder.glob("*.engine")):
            raise InputError(
                "bundle-without-engine",
                where=str(bundle.path),
                value=f"no {FOLDER}/*.engine",
                rule="this runtime runs a TensorRT engine",
                remedy="quantkit export BUNDLE --to tensorrt",
            )
        return folder

    def open(self, path: Path, threads: int | None = None) -> Any:
        """What scores a bundle that is being built. Raises InputError `gpu-absent`."""
        raise self._absent()

    def load(self, bundle: Bundle, **settings: Any) -> Any:
        """An engine; its files are checked against the manifest first. Raises InputError `gpu-absent`."""
        self.folder(bundle)
        raise self._absent()

    def _absent(self) -> InputError:
        return InputError(
            "gpu-absent",
            where=self.name,
            value=self.why_not_here() or "not yet",
            rule="an engine runs on the GPU that it was built for",
            remedy="run it there; the checkpoint runs here: --runtime torch",
        )


RUNTIME = Tensorrt("tensorrt")
