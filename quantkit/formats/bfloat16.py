"""Brain floating point: the exponent of float32 with 8 bits of precision."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FloatFormat

FORMAT: Format = FloatFormat("bfloat16", 16)
