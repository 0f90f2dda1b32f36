"""4-bit integers to 16-bit floats by magic numbers: a mask and an FMA for two weights.

A float16 between 2^a and 2^(a+1) has the bits of 2^a with a whole number in the last ten, which counts steps of
2^(a-10). With a word's fragments i = 0 .. 3 at bits 16 h + 4 i, a code c in its place under the bits of 2^a is

    i even   (q & 0x000F000F) | 0x68006800 = 2048 + 2 c        times 1/2,  minus (1024 + z)     exact
    i odd    (q & 0x00F000F0) | 0x64006400 = 1024 + 16 c       times 1/16, minus (64 + z)       exact
             q = word for i < 2, word >> 8 else

and in bfloat16, of 8 significant bits, (word >> 4 i & 0x000F000F) | 0x43804380 = 256 + 2 c, times 1/2, minus (128 + z).
2048 + 2 c rather than 1024 + c, so that every line is an FMA: LLVM pairs those up for both halves of a register, and
leaves half of the plain additions single. A zero point goes into the bits of what is subtracted, by integer operations.
Nothing is converted from integer to float. (Kim et al., "Who Says Elephants Can't Run", 2022, arXiv 2211.10017; the
same in Marlin, Frantar et al., 2024, arXiv 2408.11743.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.decoders.fragment import beside, halves, per_word

# what a product has to be multiplied by, beside the scale
GAIN = 1.0
# of 1024, in both halves. The compiler must not know it: an instruction takes one constant, and for two it
# makes two instructions, (q & mask) and (... | magic)
MAGIC = 0x64006400
# of both halves, as signed numbers: a zero point goes into the low bits (of -64 four places up)
_MINUS_1024 = tl.constexpr(0xE400E400 - (1 << 32))
_MINUS_64 = tl.constexpr(0xD400D400 - (1 << 32))
_MINUS_128 = tl.constexpr(0xC300C300 - (1 << 32))


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
    """`code - zero` of COUNT (2 or 4) fragments from FIRST on: int32 [ROWS * 8] -> DTYPE [ROWS, 16 COUNT].

    `zero` is [ROWS], uint8 with its offset of 8, or None; `magic` is MAGIC.
    """
    values = _two(words, zero, magic, FIRST, ROWS, DTYPE, ON_GPU)
    if COUNT == 4:
        values = beside(values, _two(words, zero, magic, FIRST + 2, ROWS, DTYPE, ON_GPU), ROWS, 64)
    return values


@triton.jit
def _two(words, zero, magic, FIRST: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    left = _one(words, zero, magic, FIRST, ROWS, DTYPE, ON_GPU)
    return beside(left, _one(words, zero, magic, FIRST + 1, ROWS, DTYPE, ON_GPU), ROWS, 32)


@triton.jit
def _one(words, zero, magic, INDEX: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    if zero is not None:
        # the same in both halves, as a register: what is subtracted is made by integer operations, once a row
        zero = per_word(zero.to(tl.int32) * 0x00010001, ROWS)
    if DTYPE == tl.bfloat16:
        # the interpreter has the type's bits, but no arithmetic in it
        SUM: tl.constexpr = DTYPE if ON_GPU else tl.float32
        values = halves(((words >> (4 * INDEX)) & 0x000F000F) | (magic - 0x20802080), ROWS, DTYPE).to(SUM) * 0.5
        if zero is None:
            values = (values - 136.0).to(DTYPE)
        else:
            values = (values + halves(zero | _MINUS_128, ROWS, DTYPE).to(SUM)).to(DTYPE)
    elif INDEX % 2 == 0:
        values = halves(((words >> (4 * INDEX)) & 0x000F000F) | (magic + 0x04000400), ROWS, DTYPE) * 0.5
        if zero is None:
            values = values - 1032.0
        else:
            values = values + halves(zero | _MINUS_1024, ROWS, DTYPE)
    else:
        values = halves(((words >> (4 * INDEX - 4)) & 0x00F000F0) | magic, ROWS, DTYPE) * 0.0625
        if zero is None:
            values = values - 72.0
        else:
            values = values + halves((zero << 4) | _MINUS_64, ROWS, DTYPE)
    return values
