"""8-bit integers in compressed-tensors' `int-quantized` layout, which W8A8 kernels multiply as they are."""

from quantkit.model.layouts import Layout
from quantkit.model.layouts._compressed_tensors import PlainCodes

LAYOUT: Layout = PlainCodes("int_quantized", "int8", "I8", "int")
