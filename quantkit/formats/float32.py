"""IEEE single precision."""

from quantkit.formats import Format
from quantkit.formats.base.scaled import FloatFormat

FORMAT: Format = FloatFormat("float32", 32)
