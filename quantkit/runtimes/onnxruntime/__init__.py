"""ONNX Runtime on the CPU: runs a bundle's `onnx/`. Needs numpy, onnxruntime and, for text, tokenizers; no torch."""

from __future__ import annotations

from pathlib import Path

from quantkit.runtimes import FileRuntime
from quantkit.runtimes.onnxruntime.encoder_decoder import opened
from quantkit.runtimes.onnxruntime.session import FOLDER, MODEL, OnnxGraph


class OnnxRuntime(FileRuntime):
    """Runtime `onnxruntime`."""

    name = floats = "onnxruntime"
    imports, extra, order = ("onnxruntime",), "onnx", 0
    graph, file = MODEL, f"{FOLDER}/{MODEL}"
    absent = ("bundle-without-onnx", "this runtime runs the ONNX export")
    model = staticmethod(opened)

    def opens_graph(self, file: Path, threads: int | None = None) -> OnnxGraph:
        """Open as `Runtime.opens_graph` does. Raises as `open_graph`."""
        return OnnxGraph(file, threads)


RUNTIME = OnnxRuntime()
