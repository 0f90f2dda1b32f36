"""FP8 (E4M3) to 16-bit floats by moving bits: sign to the top, exponent and mantissa right below it.

    s eeee mmm  ->  s 0eeee mmm0000000        the float16 of 2^-8 times the value: exponents are biased by 7 and by 15

which holds for subnormal numbers too; the factor 2^8 goes with the scale, exactly. In bfloat16, whose exponents are
biased by 127,

    s eeee mmm  ->  s 0000eeee mmm0000        2^-120 times the value

which products in float32 would lose: it is multiplied by 2^112, and 2^8 goes with the scale again. NaN (S.1111.111)
would become 480: weights have none. SM 8.0, which has no instruction for it, runs the same.
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.decoders.fragment import beside, halves

GAIN = 256.0
MAGIC = 0
# sign bits of both halves, as a signed number
_SIGNS = tl.constexpr(0x80008000 - (1 << 32))
# a bfloat16 itself, so that nothing is rounded
_UP = tl.constexpr(2.0**112)


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
    if DTYPE == tl.bfloat16:
        low = ((words << 4) & 0x07F007F0) | ((words << 8) & _SIGNS)
        high = ((words >> 4) & 0x07F007F0) | (words & _SIGNS)
        left, right = _raised(low, ROWS, ON_GPU), _raised(high, ROWS, ON_GPU)
    else:
        low = ((words << 7) & 0x3F803F80) | ((words << 8) & _SIGNS)
        high = ((words >> 1) & 0x3F803F80) | (words & _SIGNS)
        left, right = halves(low, ROWS, DTYPE), halves(high, ROWS, DTYPE)
    return beside(left, right, ROWS, 32)


@triton.jit
def _raised(bits, ROWS: tl.constexpr, ON_GPU: tl.constexpr):
    """2^112 times one fragment in bfloat16: int32 [ROWS * 8] -> bfloat16 [ROWS, 16]."""
    if ON_GPU:
        values = halves(bits, ROWS, tl.bfloat16) * _UP
    else:
        # the interpreter has no arithmetic in bfloat16, and widens its subnormal numbers wrong
        wide = (halves(bits, ROWS, tl.int16).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        values = (wide * _UP).to(tl.bfloat16)
    return values
