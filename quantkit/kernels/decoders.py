"""Decoding of packed weights to 16-bit floats in registers, without moving data between threads.

`layout` says where an element lies. `halves`, `per_word` and `beside` only rename axes and compile to no instruction,
as
the tests of the machine code show: the product reads its left operand from the registers in which it was decoded. Each
format has its own method; none uses an integer-to-float conversion.

**int4** by magic numbers: a mask and an FMA for two weights. A float16 between 2^a and 2^(a+1) has the bits of 2^a with
an integer in the last ten bits, which counts steps of 2^(a-10). A word has its fragments i = 0 .. 3 at bits 16 h + 4 i.
A code c, left in its place under the bits of 2^a, is

    i even   (q & 0x000F000F) | 0x68006800 = 2048 + 2 c        times 1/2,  minus (1024 + z)     exact
    i odd    (q & 0x00F000F0) | 0x64006400 = 1024 + 16 c       times 1/16, minus (64 + z)       exact
             q = word for i < 2, word >> 8 else

and in bfloat16, of 8 significant bits, (word >> 4 i & 0x000F000F) | 0x43804380 = 256 + 2 c, times 1/2, minus (128 + z).
2048 + 2 c is used rather than 1024 + c so that every line is an FMA: LLVM pairs FMAs for both halves of a register, but
leaves half of the plain additions unpaired. A zero point goes into the bits of the subtrahend, by integer operations.
(Kim et al., "Who Says Elephants Can't Run", 2022, arXiv 2211.10017; the same in Marlin, Frantar et al., 2024, arXiv
2408.11743.)

**int8** likewise: a byte c under 0x68 is the float16 2048 + 2 c.

    (word >> 8 i & 0x00FF00FF) | 0x68006800 = 2048 + 2 c      times 1/2, minus (1024 + z)      exact, |c - z| <= 255

bfloat16 has too few bits for that; c - z itself has 8 significant ones, so it is widened from float16 without rounding.

**fp8_e4m3** by moving bits: sign to the top, exponent and mantissa right below it.

    s eeee mmm  ->  s 0eeee mmm0000000        the float16 of 2^-8 times the value: exponents are biased by 7 and by 15

This holds for subnormal numbers too; the factor 2^8 goes into the scale, exactly. In bfloat16, with exponents biased by
127,

    s eeee mmm  ->  s 0000eeee mmm0000        2^-120 times the value

which products in float32 would lose: it is multiplied by 2^112, and 2^8 goes into the scale again. NaN (S.1111.111)
would become 480; weights have none. SM 8.0, which has no instruction for FP8, runs the same code.
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433.)

**nf4** by a table in registers: a byte permutation looks up four codes at once. PRMT takes each byte of its result from
eight bytes in two registers, selected by three bits of a nibble. The 16 values of the codebook, in the dtype of the
product, fill four pairs of registers: low and high bytes of values 0 to 7 and 8 to 15. For the four codes in 16 bits of
a word

    low   = PRMT(PRMT(low bytes of 0..7), PRMT(low bytes of 8..15)), whose selector keeps each byte's place and takes
            it from the first or the second by bit 3 of its code
    high  = likewise
    pairs = PRMT(low, high)           (low 0, high 0, low 1, high 1), (low 2, high 2, low 3, high 3)

Eight permutations decode four weights without memory access. float16 rounds the codebook by at most 2^-11 of a value,
bfloat16 by 2^-8. (Dettmers et al., "QLoRA", 2023, arXiv 2305.14314, for the codebook.)
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantkit.formats.nf4 import VALUES


@triton.jit
def halves(words, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Return one fragment of each tile: int32 [ROWS * 8], one register each -> DTYPE (16 bits) [ROWS, 16]."""
    low = (words & 0xFFFF).to(tl.int16)
    high = (words >> 16).to(tl.int16)
    values = tl.join(low, high).to(DTYPE, bitcast=True)
    values = tl.reshape(values, (ROWS // 16, 8, 4, 2, 2, 2))  # R, g, t, rh, rl, h
    return tl.reshape(tl.permute(values, (0, 4, 1, 3, 2, 5)), (ROWS, 16))


@triton.jit
def per_word(values, ROWS: tl.constexpr):
    """Repeat a value of each row for each of its words: [ROWS] -> [ROWS * 8]."""
    values = tl.permute(tl.reshape(values, (ROWS // 16, 2, 8)), (0, 2, 1))  # R, g, rl
    values = tl.broadcast_to(values[:, :, None, None, :], (ROWS // 16, 8, 4, 2, 2))
    return tl.reshape(values, (ROWS * 8,))


@triton.jit
def beside(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Concatenate [ROWS, COLUMNS / 2] twice -> [ROWS, COLUMNS], left then right."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def undecoded(words, FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Return words as operands without decoding, in the same registers: the raw twin of every decoder."""
    one = halves(words, ROWS, DTYPE)
    values = one
    if COUNT >= 2:
        values = beside(one, one, ROWS, 32)
    if COUNT == 4:
        values = beside(values, values, ROWS, 64)
    return values


# --- scales ---------------------------------------------------------------------------------------------------------


@triton.jit
def effective(stored, absmax_ptr, values_ptr, offset_ptr, rows, g, N, GROUPS, GAIN: tl.constexpr):
    """Return float32 scales of `rows` in group g, times GAIN: [ROWS]; nested ones: values[code] * absmax + offset."""
    scale = stored
    if absmax_ptr is not None:
        # the last rows of a tile may be padding: they have no absmax
        place = tl.minimum(rows, N - 1) * GROUPS + g
        scale = tl.load(values_ptr + stored.to(tl.int32)) * tl.load(absmax_ptr + place // 256) + tl.load(offset_ptr)
    return scale.to(tl.float32) * GAIN


@triton.jit
def as_read(zero):
    """Return a float32 computed from zero points, so that the raw twin loads them too."""
    return (zero.to(tl.int32) | 0x3F800000).to(tl.float32, bitcast=True)


# --- int4 -------------------------------------------------------------------------------------------------------------

# what makes MAGIC the bits of -1024, -64 or -128 in both halves; a zero point is added to the low bits (for -64 shifted
# by four). As constants, the sum would become a product and an OR
_MINUS_1024 = tl.constexpr(0x80008000 - (1 << 32))
_MINUS_64 = tl.constexpr(0x70007000)
_MINUS_128 = tl.constexpr(0x5F005F00)


@triton.jit
def decode_int4(
    words, zero, magic,
    FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return `code - zero` of COUNT (2 or 4) fragments from FIRST on: int32 [ROWS * 8] -> DTYPE [ROWS, 16 COUNT].

    `zero` is [ROWS], uint8 with its offset of 8, or None; `magic` is MAGIC.
    """
    values = _two_int4(words, zero, magic, FIRST, ROWS, DTYPE, ON_GPU)
    if COUNT == 4:
        values = beside(values, _two_int4(words, zero, magic, FIRST + 2, ROWS, DTYPE, ON_GPU), ROWS, 64)
    return values


@triton.jit
def _two_int4(words, zero, magic, FIRST: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    left = _one_int4(words, zero, magic, FIRST, ROWS, DTYPE, ON_GPU)
    return beside(left, _one_int4(words, zero, magic, FIRST + 1, ROWS, DTYPE, ON_GPU), ROWS, 32)


@triton.jit
def _one_int4(words, zero, magic, INDEX: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    if zero is not None:
        # in both halves of a register, one integer operation a row
        zero = zero.to(tl.int32)
    if DTYPE == tl.bfloat16:
        # the interpreter has no bfloat16 arithmetic
        SUM: tl.constexpr = DTYPE if ON_GPU else tl.float32
        values = halves(((words >> (4 * INDEX)) & 0x000F000F) | (magic - 0x20802080), ROWS, DTYPE).to(SUM) * 0.5
        if zero is None:
            values = (values - 136.0).to(DTYPE)
        else:
            minus = per_word(zero * 0x00010001 + (magic + _MINUS_128), ROWS)
            values = (values + halves(minus, ROWS, DTYPE).to(SUM)).to(DTYPE)
    elif INDEX % 2 == 0:
        values = halves(((words >> (4 * INDEX)) & 0x000F000F) | (magic + 0x04000400), ROWS, DTYPE) * 0.5
        if zero is None:
            values = values - 1032.0
        else:
            values = values + halves(per_word(zero * 0x00010001 + (magic + _MINUS_1024), ROWS), ROWS, DTYPE)
    else:
        values = halves(((words >> (4 * INDEX - 4)) & 0x00F000F0) | magic, ROWS, DTYPE) * 0.0625
        if zero is None:
            values = values - 72.0
        else:
            values = values + halves(per_word(zero * 0x00100010 + (magic + _MINUS_64), ROWS), ROWS, DTYPE)
    return values


# --- int8 -------------------------------------------------------------------------------------------------------------

_MINUS_1024_OF_INT8 = tl.constexpr(0x7C007C00)


@triton.jit
def decode_int8(
    words, zero, magic,
    FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return `code - zero` of both fragments: int32 [ROWS * 8] -> DTYPE [ROWS, 32]; `zero` is [ROWS], offset 128, or
    None.
    """
    return beside(
        _one_int8(words, zero, magic, 0, ROWS, DTYPE), _one_int8(words, zero, magic, 1, ROWS, DTYPE), ROWS, 32
    )


@triton.jit
def _one_int8(words, zero, magic, INDEX: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    values = halves(((words >> (8 * INDEX)) & 0x00FF00FF) | magic, ROWS, tl.float16) * 0.5
    if zero is None:
        values = values - 1152.0
    else:
        minus = per_word(zero.to(tl.int32) * 0x00010001 + (magic + _MINUS_1024_OF_INT8), ROWS)
        values = values + halves(minus, ROWS, tl.float16)
    return values.to(DTYPE)


# --- fp8_e4m3 ---------------------------------------------------------------------------------------------------------

# sign bits of both halves, as a signed number
_SIGNS = tl.constexpr(0x80008000 - (1 << 32))
# exact in bfloat16
_UP = tl.constexpr(2.0**112)


@triton.jit
def decode_fp8(
    words, zero, magic,
    FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return 2^-8 times the values of both fragments: int32 [ROWS * 8] -> DTYPE [ROWS, 32]; there is no zero point."""
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
    """Return 2^112 times one fragment in bfloat16: int32 [ROWS * 8] -> bfloat16 [ROWS, 16]."""
    if ON_GPU:
        values = halves(bits, ROWS, tl.bfloat16) * _UP
    else:
        # the interpreter has no bfloat16 arithmetic, and widens subnormal numbers wrongly
        wide = (halves(bits, ROWS, tl.int16).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        values = (wide * _UP).to(tl.bfloat16)
    return values


# --- nf4 --------------------------------------------------------------------------------------------------------------


def _bits(value: float, bfloat16: bool) -> int:
    """Return the bits of the nearest 16-bit float, ties to even."""
    if not bfloat16:
        return int.from_bytes(struct.pack("<e", value), "little")
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _table(bfloat16: bool) -> tuple[int, ...]:
    """Return registers as signed numbers: low bytes of values 0-3, 4-7, 8-11, 12-15, then the high bytes."""
    bits = [_bits(value, bfloat16) for value in VALUES]
    return tuple(
        int.from_bytes(bytes(value >> shift & 255 for value in bits[first : first + 4]), "little", signed=True)
        for shift in (0, 8)
        for first in (0, 4, 8, 12)
    )


_FLOAT16 = tl.constexpr(_table(bfloat16=False))
_BFLOAT16 = tl.constexpr(_table(bfloat16=True))


@triton.jit
def decode_nf4(
    words, zero, magic,
    FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return codebook values of COUNT (2 or 4) fragments from FIRST on: int32 [ROWS * 8] -> DTYPE [ROWS, 16 COUNT]."""
    none = (words & 0) + magic
    place = words & 0x77777777
    half = ((words >> 1) & 0x44444444) | (none + 0x32103210)
    left = _two_nf4(place >> (8 * FIRST), half >> (8 * FIRST), none, ROWS, DTYPE, ON_GPU)
    values = left
    if COUNT == 4:
        values = beside(left, _two_nf4(place >> 16, half >> 16, none, ROWS, DTYPE, ON_GPU), ROWS, 64)
    return values


@triton.jit
def _two_nf4(place, half, none, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """Return two fragments from the four codes in the low 16 bits: codes 0 and 1 are the halves of the first."""
    TABLE: tl.constexpr = _BFLOAT16 if DTYPE == tl.bfloat16 else _FLOAT16
    low_a = permuted(none + TABLE[0], none + TABLE[1], place, ON_GPU)
    low_b = permuted(none + TABLE[2], none + TABLE[3], place, ON_GPU)
    high_a = permuted(none + TABLE[4], none + TABLE[5], place, ON_GPU)
    high_b = permuted(none + TABLE[6], none + TABLE[7], place, ON_GPU)
    low, high = permuted(low_a, low_b, half, ON_GPU), permuted(high_a, high_b, half, ON_GPU)
    one = halves(permuted(low, high, none + 0x5140, ON_GPU), ROWS, DTYPE)
    two = halves(permuted(low, high, none + 0x7362, ON_GPU), ROWS, DTYPE)
    return beside(one, two, ROWS, 32)


@triton.jit
def permuted(a, b, selector, ON_GPU: tl.constexpr):
    """Return bytes selected from a (0 to 3) and b (4 to 7): byte j is number (selector >> 4 j & 7).

    One PRMT instruction; shifts in Triton's interpreter, which has no PRMT.
    """
    if ON_GPU:
        result = libdevice.byte_perm(a, b, selector)
    else:
        pool = (a.to(tl.int64) & 0xFFFFFFFF) | (b.to(tl.int64) << 32)
        result = a & 0
        for j in tl.static_range(4):
            byte = (pool >> (8 * ((selector >> (4 * j)) & 7)).to(tl.int64)) & 0xFF
            result = result | (byte.to(tl.int32) << (8 * j))
    return result


class WordDecoder(NamedTuple):
    """Decoder of a format.

    Args:
        decode: the function.
        GAIN: factor for the product, beside the scale.
        MAGIC: argument of `decode` that the compiler must not know. An instruction takes one constant, so the compiler
            would split (q & mask) | magic into two. The value is 1024 for int4 and 2048 for int8, in both halves; for
            nf4, 0 prevents reloading the table's constants at every use.
    """

    decode: Any
    GAIN: float
    MAGIC: int


DECODERS = {
    "int4": WordDecoder(decode_int4, 1.0, 0x64006400),
    "int8": WordDecoder(decode_int8, 1.0, 0x68006800),
    "fp8_e4m3": WordDecoder(decode_fp8, 256.0, 0),
    "nf4": WordDecoder(decode_nf4, 1.0, 0),
}
