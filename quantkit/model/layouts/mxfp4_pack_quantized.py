"""MXFP4 in compressed-tensors' `mxfp4-pack-quantized` layout, weights only."""

from quantkit.model.layouts import Layout
from quantkit.model.layouts._compressed_tensors import PackedFp4

SERVING = (
    "from SM 9.0 on vLLM 0.33 rounds inputs too, to 8 or 4 bits, unless it runs with `--linear-backend marlin`; "
    "the scores here are of quantized weights alone"
)
LAYOUT: Layout = PackedFp4("mxfp4_pack_quantized", "mxfp4", "group", "U8", "torch.uint8", serving=SERVING)
