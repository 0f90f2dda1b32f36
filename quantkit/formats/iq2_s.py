"""Points of 8 weights from 1,024, a sign each, 16 scales of 4 bits in a super-block of 256: GGUF IQ2_S, 2.56 bits."""

from quantkit.formats import Format
from quantkit.formats.base.lattice import LatticeFormat

FORMAT: Format = LatticeFormat("iq2_s", 3, -1, 16, 4, (1, 3.125, 5.375), 8, 10, False, 1.25)
