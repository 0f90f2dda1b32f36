"""A folder that plain transformers, with compressed-tensors, and vLLM load."""

from quantkit.export.checkpoint.exporter import EXPORT

__all__ = ["EXPORT"]
