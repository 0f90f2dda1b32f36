"""A TensorRT engine, and the network that it is built from, checked on the CPU before TensorRT sees it."""

from quantkit.exporters.tensorrt.exporter import EXPORT

__all__ = ["EXPORT"]
