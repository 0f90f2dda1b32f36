"""An ONNX graph with a cache, in the dialect of the runtime that will run it."""

from quantkit.exporters.onnx.exporter import EXPORT

__all__ = ["EXPORT"]
