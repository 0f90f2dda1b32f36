"""IEEE single precision."""

from quantkit.formats._float import FloatFormat

FORMAT = FloatFormat("float32", 32)
