"""GPU kernels for quantized weights (Triton), with the reference they must equal.

    y[m, n] = sum_k x[m, k] * value(codes[n, k], zero[n, g(k)]) * scale[n, g(k)]

`layout` packs a weight so that the kernels read it in whole 16-byte pieces; `decoders` decodes such a piece in
registers (int4, int8, fp8_e4m3, nf4), and `matmul` is the skeleton around all of them. `native` multiplies 8-bit codes
by 8-bit codes, and so do torch's own operators; what none of these takes is left to other people's kernels (`humming`).
`ahead` reads the machine code. Importing this package needs neither torch nor Triton.
"""

from __future__ import annotations

import re

# compute capability that they are written for, and looked into
_OLDEST = (8, 0)
GPUS = "quantkit's kernels are for GPUs of SM {}.{} and later".format(*_OLDEST)


def too_old(capability: str) -> bool:
    """Whether a GPU of a compute capability ("7.5") is older than `GPUS` says; of one that names none, nobody knows."""
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", capability, re.ASCII)
    return found is not None and (int(found[1]), int(found[2])) < _OLDEST
