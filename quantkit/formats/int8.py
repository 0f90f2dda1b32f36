"""8-bit integers, per tensor, channel or group, with or without a zero point."""

from quantkit.formats import Format
from quantkit.formats.base.integers import IntegerFormat

FORMAT: Format = IntegerFormat("int8", 8)
