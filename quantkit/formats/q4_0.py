"""4-bit integers in blocks of 32 under a float16 scale of either sign: GGUF Q4_0."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import BlockFormat

FORMAT: Format = BlockFormat("q4_0", 4, -8)
