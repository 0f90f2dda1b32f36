"""8-bit integers in compressed-tensors' `int-quantized` layout, which W8A8 kernels read directly."""

from quantkit.model.layouts import Layout
from quantkit.model.layouts._compressed_tensors import PlainCodes

LAYOUT: Layout = PlainCodes("int_quantized", "int8", "I8", "int")
