"""NVFP4 in compressed-tensors' `nvfp4-pack-quantized` layout, weights only."""

from quantkit.model.layouts import Layout
from quantkit.model.layouts._compressed_tensors import PackedFp4

LAYOUT: Layout = PackedFp4("nvfp4_pack_quantized", "nvfp4", "tensor_group", "F8_E4M3", "torch.float8_e4m3fn")
