"""4-bit integers, per tensor, channel or group, with or without a zero point."""

from quantkit.formats.base.integers import IntegerFormat

FORMAT = IntegerFormat("int4", 4)
