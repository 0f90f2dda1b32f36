"""5-bit integers in blocks of 32 with a float16 scale and offset: GGUF Q5_1."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import BlockFormat

FORMAT: Format = BlockFormat("q5_1", 5, 0)
