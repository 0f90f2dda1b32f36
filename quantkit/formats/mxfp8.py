"""8-bit floats (E4M3) in groups of 32 under a shared power of two: OCP Microscaling."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FP8_E4M3, MxFormat

FORMAT: Format = MxFormat("mxfp8", 8, FP8_E4M3, exponent=8)
