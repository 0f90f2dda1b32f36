"""One GGUF file, which llama.cpp and what is built on it load: weights, tokenizer and chat template."""

from quantkit.exporters.gguf.exporter import EXPORT

__all__ = ["EXPORT"]
