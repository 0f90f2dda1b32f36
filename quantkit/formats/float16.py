"""IEEE half precision."""

from quantkit.formats import Format
from quantkit.formats.base.floats import FloatFormat

FORMAT: Format = FloatFormat("float16", 16)
