"""An ONNX graph with a cache, in the dialect of the runtime that will run it."""

from quantkit.export.onnx.exporter import EXPORT

__all__ = ["EXPORT"]
