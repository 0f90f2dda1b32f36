"""7-bit integers: two products with unsigned 8-bit inputs fit into 16 bits, so that no sum saturates."""

from quantkit.formats import Format
from quantkit.formats.base.integers import IntegerFormat

# |q| <= 64, and 2 · 255 · 64 < 2¹⁵: what x86 processors without VNNI add up of u8 by s8 at a time
FORMAT: Format = IntegerFormat("int7", 7)
