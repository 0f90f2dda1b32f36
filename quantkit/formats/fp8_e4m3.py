"""8-bit floats of 4 exponent and 3 mantissa bits up to 448, per tensor, channel, group or block of 128 x 128."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FP8_E4M3, Fp8Format

FORMAT: Format = Fp8Format("fp8_e4m3", 8, FP8_E4M3)
