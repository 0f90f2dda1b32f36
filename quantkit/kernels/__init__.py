"""GPU kernels for quantized weights (Triton), with the reference that they must equal.

    y[m, n] = sum_k x[m, k] * value(codes[n, k], zero[n, g(k)]) * scale[n, g(k)]

`layout` packs a weight so that threads read whole 16-byte pieces. `decoders` decodes such a piece in registers (int4,
int8, fp8_e4m3, nf4), and `matmul` is the product around all decoders. `native` multiplies 8-bit codes by 8-bit codes,
as
torch's own operators do; other formats go to another library (`humming`). `ahead` compiles for a GPU that is not
present and reads the machine code. Importing this package needs neither torch nor Triton.
"""

from __future__ import annotations

import re

# lowest compute capability that they are written and checked for
_OLDEST = (8, 0)
GPUS = "quantkit's kernels are for GPUs of SM {}.{} and later".format(*_OLDEST)


def too_old(capability: str) -> bool:
    """Tell whether a compute capability ("7.5") is below the minimum of the kernels; False for unknown text."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", capability, re.ASCII)
    return match is not None and (int(match[1]), int(match[2])) < _OLDEST
