"""From 32-bit words to operands of a matrix product, without moving anything between threads.

`layout` says where an element lies. These functions only rename axes: in the compiled code they are nothing at all, as
the tests of the machine code show (the left operand of the product is used from the registers it was decoded in).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(words, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """One fragment of each tile: int32 [ROWS * 8], a register each -> DTYPE (16 bits) [ROWS, 16]."""
    low = (words & 0xFFFF).to(tl.int16)
    high = (words >> 16).to(tl.int16)
    values = tl.join(low, high).to(DTYPE, bitcast=True)
    values = tl.reshape(values, (ROWS // 16, 8, 4, 2, 2, 2))  # R, g, t, rh, rl, h
    return tl.reshape(tl.permute(values, (0, 4, 1, 3, 2, 5)), (ROWS, 16))


@triton.jit
def per_word(values, ROWS: tl.constexpr):
    """What belongs to a row, once for each of its words: [ROWS] -> [ROWS * 8]."""
    values = tl.permute(tl.reshape(values, (ROWS // 16, 2, 8)), (0, 2, 1))  # R, g, rl
    values = tl.broadcast_to(values[:, :, None, None, :], (ROWS // 16, 8, 4, 2, 2))
    return tl.reshape(values, (ROWS * 8,))


@triton.jit
def beside(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS / 2] twice -> [ROWS, COLUMNS], left then right."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def undecoded(words, FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """The raw twin of every decode: the same words as operands as they are, in the same registers."""
    one = halves(words, ROWS, DTYPE)
    values = one
    if COUNT >= 2:
        values = beside(one, one, ROWS, 32)
    if COUNT == 4:
        values = beside(values, values, ROWS, 64)
    return values
