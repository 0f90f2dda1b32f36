"""8-bit floats of 5 exponent and 2 mantissa bits up to 57344, per tensor, channel, group or block of 128 x 128."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FP8_E5M2, Fp8Format

FORMAT: Format = Fp8Format("fp8_e5m2", 8, FP8_E5M2)
