"""Points of 4 weights from 512, a sign each, 8 scales of 4 bits in a super-block of 256: GGUF IQ3_S, 3.44 bits."""

from quantkit.formats import Format
from quantkit.formats.base.lattice import LatticeFormat

FORMAT: Format = LatticeFormat("iq3_s", 4, -1, 32, 4, (1, 3, 5, 7, 9, 11, 13, 15), 4, 9, False, 2 / 3)
