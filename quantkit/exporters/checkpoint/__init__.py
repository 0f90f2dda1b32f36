"""A folder that plain transformers, with compressed-tensors, and vLLM load."""

from quantkit.exporters.checkpoint.exporter import EXPORT

__all__ = ["EXPORT"]
