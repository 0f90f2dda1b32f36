"""Uniform integer formats one number at a time, in Python's own float64 and integers: slow, obviously right."""

from collections.abc import Sequence
from fractions import Fraction


def nearest_even(value: Fraction) -> int:
    """The nearest integer, ties to even; exact."""
    return round(value)


def encode(weight: float, scale: float, zero: int, bits: int) -> int:
    """`clip(round(w / s) + z)`, the division made in exact arithmetic."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return max(low, min(high, nearest_even(Fraction(weight) / Fraction(scale)) + zero))


def decode(code: int, scale: float, zero: int) -> float:
    """`(q - z) * s`."""
    return float((code - zero) * Fraction(scale))


def group_of(row: int, column: int, columns: int, groups: int, *, per_tensor: bool) -> tuple[int, int]:
    """Where the scale of element [row, column] stands."""
    return (0, 0) if per_tensor else (row, column // (columns // groups))


def pack(codes: Sequence[Sequence[int]], bits: int) -> list[bytes]:
    """Each row as one long integer, the first code in its lowest bits, written out little-endian."""
    rows = []
    for row in codes:
        word = 0
        for place, code in enumerate(row):
            word |= (code + 2 ** (bits - 1)) << (place * bits)
        rows.append(word.to_bytes((len(row) * bits + 7) // 8, "little"))
    return rows
