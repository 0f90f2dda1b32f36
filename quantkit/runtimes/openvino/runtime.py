"""OpenVINO on Intel's CPUs, GPUs and NPUs: runs a bundle's `openvino/model.xml`. Needs openvino; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import Runtime
from quantkit.runtimes.openvino.open import FOLDER, MODEL
from quantkit.runtimes.openvino.session import OpenvinoGraph, OpenvinoModel

__all__ = ["RUNTIME", "OpenvinoRuntime"]


class OpenvinoRuntime(Runtime):
    """See the module."""

    name = floats = "openvino"
    imports, extra, order = ("openvino",), "openvino", 3
    graph = MODEL
    packages = ("openvino",)

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """See `Runtime`."""
        return None if machine.has("openvino") else "openvino is not installed: pip install 'quantkit[openvino]'"

    def folder(self, bundle: Bundle) -> Path:
        """The folder with the model.

        Raises:
            InputError: `bundle-without-openvino`.
        """
        folder = bundle.path / FOLDER
        if not (folder / MODEL).is_file():
            raise InputError(
                "bundle-without-openvino",
                where=str(bundle.path),
                value=f"no {FOLDER}/{MODEL}",
                rule="this runtime runs the OpenVINO export",
                remedy="quantkit export BUNDLE --to openvino",
            )
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> OpenvinoModel:
        """What scores a bundle, or the folder of one that is being built; `built` is for what is executable."""
        return self.opens(path / FOLDER, threads)

    def opens(self, folder: Path, threads: int | None = None) -> OpenvinoModel:
        """See `Runtime`. Raises as `load`, but for what a manifest says."""
        return OpenvinoModel(folder, threads=threads)

    def opens_graph(self, file: Path, threads: int | None = None) -> OpenvinoGraph:
        """See `Runtime`. Raises as `OpenvinoGraph`."""
        return OpenvinoGraph(file, threads)

    def load(self, bundle: Bundle, **settings: Any) -> OpenvinoModel:
        """The model; its files are checked against the manifest first.

        Raises:
            MissingDependency: openvino.
            InputError: `bundle-without-openvino`, `hash-mismatch`, `openvino-unreadable`, `runtime-not-here`.
        """
        return OpenvinoModel(self.checked(bundle), **settings)


RUNTIME = OpenvinoRuntime()
