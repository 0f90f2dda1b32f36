"""4-bit integers, 8 scales and offsets of 6 bits in a super-block of 256: GGUF Q4_K."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat

FORMAT: Format = SuperBlockFormat("q4_k", 4, 0, 32, 6)
