"""TensorRT-RTX: runs an engine that was compiled ahead of time for this kind of GPU, from a verified bundle."""

from quantkit.runtimes.tensorrt import TensorrtRuntime

RUNTIME = TensorrtRuntime("tensorrt_rtx")
