"""3-bit integers, 16 scales of 6 bits in a super-block of 256: GGUF Q3_K."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat

FORMAT: Format = SuperBlockFormat("q3_k", 3, -4, 16, 6)
