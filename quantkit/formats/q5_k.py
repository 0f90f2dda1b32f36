"""5-bit integers, 8 scales and offsets of 6 bits in a super-block of 256: GGUF Q5_K."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat

FORMAT: Format = SuperBlockFormat("q5_k", 5, 0, 32, 6)
