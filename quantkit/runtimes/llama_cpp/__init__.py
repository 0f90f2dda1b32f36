"""llama.cpp on the CPU: runs a bundle's `gguf/model.gguf` as its own programs do. Needs llama-cpp-python; no torch."""

from quantkit.runtimes.llama_cpp.runtime import RUNTIME

__all__ = ["RUNTIME"]
