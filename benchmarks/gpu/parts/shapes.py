"""Which products the run is about."""

from __future__ import annotations

from quantkit.measurement.cuda.weights import known

# out x in of the linears of Llama-3-8B, the largest first; fused ones are what runtimes run
LLAMA_3_8B = (
    (14336, 4096),  # gate_proj, up_proj
    (4096, 14336),  # down_proj
    (4096, 4096),  # q_proj, o_proj
    (6144, 4096),  # q, k and v as one
    (28672, 4096),  # gate and up as one
    (1024, 4096),  # k_proj, v_proj
)

_NAMES = (
    *("int4.g128", "int4.g128.zeros", "int8", "fp8_e4m3", "nf4.g64.double", "int8.dynamic", "fp8_e4m3.dynamic"),
    *("int4.g32", "int4.g64"),
)
VARIANTS = tuple(known()[name] for name in _NAMES)
