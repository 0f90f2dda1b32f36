"""8-bit integers to 16-bit floats by magic numbers: a byte c under 0x68 is the float16 2048 + 2 c.

    (word >> 8 i & 0x00FF00FF) | 0x68006800 = 2048 + 2 c      times 1/2, minus (1024 + z)      exact, |c - z| <= 255

as in `int4`. bfloat16 has too few bits for that; c - z itself has 8 significant ones, so it is widened from float16
without rounding. Nothing is converted from integer to float. (Kim et al., 2022, arXiv 2211.10017.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.decoders.fragment import beside, halves, per_word

GAIN = 1.0
# of 2048, in both halves; an argument for the reason that `int4` gives
MAGIC = 0x68006800
# of both halves, as a signed number: a zero point goes into the low bits
_MINUS_1024 = tl.constexpr(0xE400E400 - (1 << 32))


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
    """`code - zero` of both fragments: int32 [ROWS * 8] -> DTYPE [ROWS, 32]. `zero`: [ROWS], offset 128, or None."""
    return beside(_one(words, zero, magic, 0, ROWS, DTYPE), _one(words, zero, magic, 1, ROWS, DTYPE), ROWS, 32)


@triton.jit
def _one(words, zero, magic, INDEX: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    values = halves(((words >> (8 * INDEX)) & 0x00FF00FF) | magic, ROWS, tl.float16) * 0.5
    if zero is None:
        values = values - 1152.0
    else:
        values = values + halves(per_word(zero.to(tl.int32) * 0x00010001, ROWS) | _MINUS_1024, ROWS, tl.float16)
    return values.to(DTYPE)
