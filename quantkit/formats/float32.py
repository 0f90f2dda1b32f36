"""IEEE single precision."""

from quantkit.formats.base.floats import FloatFormat

FORMAT = FloatFormat("float32", 32)
