"""NF4 to 16-bit floats by a table in registers: a byte permutation looks four codes up at once.

PRMT takes each byte of its result from eight bytes in two registers, by three bits of a nibble of its selector. The 16
values of the codebook, in the dtype of the product, make four pairs of registers: low and high bytes of values 0 to 7
and 8 to 15. For the four codes in 16 bits of a word

    low   = PRMT(PRMT(low bytes of 0..7), PRMT(low bytes of 8..15)), whose selector keeps each byte's place and takes
            it from the first or the second by bit 3 of its code
    high  = likewise
    pairs = PRMT(low, high)           (low 0, high 0, low 1, high 1), (low 2, high 2, low 3, high 3)

eight permutations for four weights, none of which touches memory; nothing is converted afterwards. float16 rounds the
codebook by at most 2^-11 of a value, bfloat16 by 2^-8. (Dettmers et al., "QLoRA", 2023, arXiv 2305.14314, for the
codebook.)
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantkit.formats.nf4 import VALUES
from quantkit.kernels.decoders.fragment import beside, halves

GAIN = 1.0
# nothing, but the compiler does not know it: else it would load the table's constants anew for every use
MAGIC = 0


def _bits(value: float, bfloat16: bool) -> int:
    """Of the nearest 16-bit float, ties to even."""
    if not bfloat16:
        return int.from_bytes(struct.pack("<e", value), "little")
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _table(bfloat16: bool) -> tuple[int, ...]:
    """Registers as signed numbers: low bytes of values 0 to 3, 4 to 7, 8 to 11, 12 to 15, then the high bytes."""
    bits = [_bits(value, bfloat16) for value in VALUES]
    return tuple(
        int.from_bytes(bytes(each >> shift & 255 for each in bits[first : first + 4]), "little", signed=True)
        for shift in (0, 8)
        for first in (0, 4, 8, 12)
    )


_FLOAT16 = tl.constexpr(_table(bfloat16=False))
_BFLOAT16 = tl.constexpr(_table(bfloat16=True))


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
    """Codebook values of COUNT (2 or 4) fragments from FIRST on: int32 [ROWS * 8] -> DTYPE [ROWS, 16 COUNT]."""
    none = (words & 0) + magic
    place = words & 0x77777777
    half = ((words >> 1) & 0x44444444) | (none + 0x32103210)
    left = _two(place >> (8 * FIRST), half >> (8 * FIRST), none, ROWS, DTYPE, ON_GPU)
    values = left
    if COUNT == 4:
        values = beside(left, _two(place >> 16, half >> 16, none, ROWS, DTYPE, ON_GPU), ROWS, 64)
    return values


@triton.jit
def _two(place, half, none, ROWS: tl.constexpr, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """Fragments of the four codes in the low 16 bits: codes 0 and 1 are one's halves, 2 and 3 the other's."""
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
    """Byte j of the result is byte (selector >> 4 j & 7) of the eight in a (0 to 3) and b (4 to 7).

    One PRMT instruction; without PRMT (Triton's interpreter knows no instruction by name) the same by shifts.
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
