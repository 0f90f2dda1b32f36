"""IEEE half precision."""

from quantkit.formats._float import FloatFormat

FORMAT = FloatFormat("float16", 16)
