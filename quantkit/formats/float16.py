"""IEEE half precision."""

from quantkit.formats.base.floats import FloatFormat

FORMAT = FloatFormat("float16", 16)
