"""4-bit indices into a table of integers, 8 scales of 6 bits in a super-block of 256: GGUF IQ4_XS."""

from quantkit.formats import Format
from quantkit.formats.base.blocks import SuperBlockFormat
from quantkit.formats.iq4_nl import VALUES, Iq4Nl


class Iq4Xs(Iq4Nl, SuperBlockFormat):
    """IQ4_XS: the table of IQ4_NL."""


FORMAT: Format = Iq4Xs("iq4_xs", 4, VALUES[0], 32, 6)
