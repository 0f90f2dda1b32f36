"""6-bit integers, 16 scales of 8 bits in a super-block of 256: GGUF Q6_K."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat

FORMAT: Format = SuperBlockFormat("q6_k", 6, -32, 16, 8)
