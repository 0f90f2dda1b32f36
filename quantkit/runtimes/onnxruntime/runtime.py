"""ONNX Runtime on the CPU: runs a bundle's `onnx/`. Needs numpy, onnxruntime and, for text, tokenizers; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import Runtime
from quantkit.runtimes.generate import Sampling, stream
from quantkit.runtimes.onnxruntime.session import FOLDER, MODEL, OnnxGraph, OnnxModel

__all__ = ["RUNTIME", "OnnxRuntime", "Sampling", "stream"]


class OnnxRuntime(Runtime):
    """See the module."""

    name = floats = "onnxruntime"
    imports, extra, order = ("onnxruntime",), "onnx", 0
    graph = "model.onnx"

    def folder(self, bundle: Bundle) -> Path:
        """The folder with the graph.

        Raises:
            InputError: `bundle-without-onnx`.
        """
        folder = bundle.path / FOLDER
        if not (folder / MODEL).is_file():
            raise InputError(
                "bundle-without-onnx",
                where=str(bundle.path),
                value=f"no {FOLDER}/{MODEL}",
                rule="this runtime runs the ONNX export",
                remedy="quantkit export BUNDLE --to onnx",
            )
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> OnnxModel:
        """What scores a bundle, or the folder of one that is being built; `built` is for what is executable."""
        return self.opens(path / FOLDER, threads)

    def opens(self, folder: Path, threads: int | None = None) -> OnnxModel:
        """See `Runtime`. Raises as `load`, but for what a manifest says."""
        return OnnxModel(folder, threads=threads)

    def opens_graph(self, file: Path, threads: int | None = None) -> OnnxGraph:
        """See `Runtime`. Raises as `open_graph`."""
        return OnnxGraph(file, threads)

    def load(self, bundle: Bundle, **settings: Any) -> OnnxModel:
        """The model in a session; its files are checked against the manifest first.

        Raises:
            MissingDependency: onnxruntime.
            InputError: `bundle-without-onnx`, `hash-mismatch`, `onnx-unreadable`.
        """
        return OnnxModel(self.checked(bundle), **settings)


RUNTIME = OnnxRuntime()
