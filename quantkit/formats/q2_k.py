"""2-bit integers, 16 scales and offsets of 4 bits in a super-block of 256: GGUF Q2_K."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat

FORMAT: Format = SuperBlockFormat("q2_k", 2, 0, 16, 4)
