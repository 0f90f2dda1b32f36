"""8-bit floats in compressed-tensors' `float-quantized` layout, which W8A8 kernels read directly."""

from quantkit.model.layouts import Layout
from quantkit.model.layouts._compressed_tensors import PlainCodes

LAYOUT: Layout = PlainCodes("float_quantized", "fp8_e4m3", "F8_E4M3", "float")
