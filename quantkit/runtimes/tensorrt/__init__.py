"""TensorRT: runs an engine that was built on this kind of GPU, by this version, from a verified bundle."""

from quantkit.runtimes.tensorrt.runtime import RUNTIME

__all__ = ["RUNTIME"]
