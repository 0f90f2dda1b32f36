"""Points of 4 weights from 256, even signs, 8 scales of 4 bits in a super-block of 256: GGUF IQ3_XXS, 3.06 bits."""

from quantkit.formats import Format
from quantkit.formats.base.lattice import LatticeFormat

FORMAT: Format = LatticeFormat("iq3_xxs", 4, -1, 32, 4, (1, 3, 5, 7, 9, 11, 13, 15.5), 4, 8, True, 2 / 3)
