"""Which runtime reads an export."""

from __future__ import annotations

from quantkit.exporters import reader


def test_the_library_that_was_asked_for_reads_it_else_the_first() -> None:
    assert reader("tensorrt", {"library": "tensorrt"}) == "tensorrt"
    assert reader("tensorrt", {}) == "tensorrt_rtx"
    assert reader("checkpoint", {"library": "tensorrt"}) == "torch"
    assert reader("onnx", {"dialect": "onnxruntime"}) == "onnxruntime"
