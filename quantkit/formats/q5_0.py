"""5-bit integers in blocks of 32 under a float16 scale of either sign: GGUF Q5_0."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import BlockFormat

FORMAT: Format = BlockFormat("q5_0", 5, -16)
