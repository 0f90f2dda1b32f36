"""FP8 (E4M3) to 16-bit floats by moving bits: sign to the top, exponent and mantissa right below it.

    s eeee mmm  ->  s 0eeee mmm0000000        the float16 of 2^-8 times the value: exponents are biased by 7 and by 15

which holds for subnormal numbers too; the factor 2^8 goes with the scale, exactly. NaN (S.1111.111) would become 480:
weights have none. bfloat16 is widened from there without rounding. SM 8.0, which has no instruction for it, runs the
same. (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.decoders.fragment import beside, halves

GAIN = 256.0
MAGIC = 0
# sign bits of both halves, as a signed number
_SIGNS = tl.constexpr(0x80008000 - (1 << 32))


@triton.jit
def decode(
    words,
    zero,
    magic,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """2^-8 times the values of both fragments: int32 [ROWS * 8] -> DTYPE [ROWS, 32]. There is no zero."""
    low = ((words << 7) & 0x3F803F80) | ((words << 8) & _SIGNS)
    high = ((words >> 1) & 0x3F803F80) | (words & _SIGNS)
    return beside(halves(low, ROWS, tl.float16).to(DTYPE), halves(high, ROWS, tl.float16).to(DTYPE), ROWS, 32)
