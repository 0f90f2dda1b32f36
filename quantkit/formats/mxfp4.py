"""4-bit floats (E2M1) in groups of 32 under a shared power of two: OCP Microscaling."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FP4_E2M1, MxFormat

FORMAT: Format = MxFormat("mxfp4", 4, FP4_E2M1, exponent=2)
