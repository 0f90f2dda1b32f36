"""ONNX Runtime on the CPU: runs a bundle's `onnx/`. Needs numpy, onnxruntime and, for text, tokenizers; no torch."""

from quantkit.runtimes.onnxruntime.runtime import RUNTIME

__all__ = ["RUNTIME"]
