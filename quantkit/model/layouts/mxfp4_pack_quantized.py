"""MXFP4 in compressed-tensors' `mxfp4-pack-quantized` layout, weights only."""

from quantkit.model.layouts._packed_fp4 import PackedFp4

LAYOUT = PackedFp4("mxfp4_pack_quantized", "mxfp4", "group", "U8", "torch.uint8")
