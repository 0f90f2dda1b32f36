"""7-bit integers: two products with unsigned 8-bit inputs fit into 16 bits, so that no sum saturates."""

from quantkit.formats import Format
from quantkit.formats.base.integers import IntegerFormat

# |q| <= 64, and 2 · 255 · 64 < 2¹⁵: x86 processors without VNNI add two u8 · s8 products in 16 bits
FORMAT: Format = IntegerFormat("int7", 7)
