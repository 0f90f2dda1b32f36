"""A GGUF file as a model: `convert.py` makes a Hugging Face folder of it, the others read its parts."""

from quantkit.model.source.gguf.convert import GGUF, PROVENANCE, convert_gguf, note_on
from quantkit.model.source.gguf.file import demand_lengths, fields, tensors

__all__ = ["GGUF", "PROVENANCE", "convert_gguf", "demand_lengths", "fields", "note_on", "tensors"]
