"""One GGUF file for llama.cpp and programs built on it: weights, tokenizer and chat template."""

from quantkit.exporters.gguf.exporter import EXPORT

__all__ = ["EXPORT"]
