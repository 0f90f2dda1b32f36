"""Number formats, one a file: quantize, dequantize, pack, unpack, bits per weight. Reference code, exact.

Exporters, runtimes and kernels see a quantized weight only as a `QuantTensor`. Modules do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.lazy import torch
from quantkit.plugins import Kind, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class Nested:
    """Scales that are quantized themselves: `scale = code_values[codes] * absmax[i // 256] + offset`, row by row.

    Codes are [N * G] uint8, absmax [ceil(N * G / 256)] float32, the offset [] is the mean of the scales.
    """

    codes: Tensor
    absmax: Tensor
    offset: Tensor


@dataclass(frozen=True)
class SuperBlocks:
    """Scales and offsets as integers; 256 weights share a d and a dmin: `scale = d * sc`, `offset = -dmin * mn`."""

    d: Tensor  # [N, K / 256] float16
    sc: Tensor  # [N, G] int8
    dmin: Tensor | None = None  # [N, K / 256] float16; None where there are no offsets
    mn: Tensor | None = None  # [N, G] int8, not negative


@dataclass(frozen=True)
class QuantTensor:
    """A quantized matrix: `w[n, k] = value(codes[n, k]) * scale[n, g(k)] * global_scale + offset[n, g(k)]`.

    `value` is `codes - zero` for integers, `codebook[codes]` if there is a codebook, and the code itself if it is a
    floating-point number. For weights [4096, 4096] in groups of 128: codes [4096, 4096], scale and zero [4096, 32]; per
    channel G = 1; per tensor scale is [1, 1]; in blocks of 128 it is [32, 32].

    Args:
        codes: [N, K], unpacked; int8 for integers, symmetric or not (int4 codes are in -8..7); uint8 indices into the
            codebook; torch's float8 types.
        scale: [N, G] (or [1, 1]), in its storage dtype; the effective float32 values of nested scales.
        zero: [N, G], int8, in the range of the codes; None if symmetric.
        codebook: [2^bits] float32, value of every code.
        global_scale: [] float32, one more factor for the whole matrix.
        nested: stored form of scales that are quantized themselves.
        offset: [N, G], value of code 0, float16 or the effective float32 values; None: nothing is added.
        super_blocks: stored form of scales and offsets that are integers times a float16.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: WeightScheme
    codebook: Tensor | None = None
    global_scale: Tensor | None = None
    nested: Nested | None = None
    offset: Tensor | None = None
    super_blocks: SuperBlocks | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self) -> Tensor:
        """Expand the codes to their values, [N, K] float32."""
        return load_format(self.scheme.format).dequantize(self)

    def replace(self, **changes: object) -> QuantTensor:
        """Copy the tensor with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def joined(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Stack matrices of one scheme along N: [N1, K], [N2, K] -> [N1 + N2, K]. Nothing is rounded again.

    Raises ValueError: different schemes, or scales shared between rows.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.scheme != first.scheme for part in parts) or not first.scheme.rows_apart:
        raise ValueError("only matrices of one scheme, with scales for every row, can be joined")
    return _each(parts, torch.cat)


def _each(parts: Sequence[QuantTensor], make: Callable[[list[Tensor]], Tensor]) -> QuantTensor:
    """Make a tensor by combining every per-row field of all parts."""

    def fields(holders: Sequence[object], *names: str) -> dict[str, Any]:
        of_all = {name: [getattr(holder, name) for holder in holders] for name in names}
        return {name: make(values) for name, values in of_all.items() if values[0] is not None}

    changes = fields(parts, "codes", "scale", "zero", "offset")
    stored = [part.super_blocks for part in parts if part.super_blocks is not None]
    if stored:
        changes["super_blocks"] = replace(stored[0], **fields(stored, "d", "sc", "dmin", "mn"))
    return parts[0].replace(**changes)


def apart(tensor: QuantTensor, rows: Sequence[int]) -> list[QuantTensor]:
    """Split a `joined` matrix: [N1 + N2, K] -> [N1, K], [N2, K]. Every part gets the scale of the whole matrix, if any.

    Raises ValueError: scales that only some rows share.
    """
    if len(rows) == 1:
        return [tensor]
    if tensor.nested is not None or tensor.scale.shape[0] not in (1, tensor.shape[0]):
        raise ValueError("only a matrix with scales for every row, or one for all of them, can be cut")
    ends = list(accumulate(rows))

    def cut(start: int, stop: int) -> QuantTensor:
        return _each([tensor], lambda value: value[0] if len(value[0]) == 1 < ends[-1] else value[0][start:stop])

    return [cut(stop - count, stop) for count, stop in zip(rows, ends, strict=True)]


class Format(Protocol):
    """Interface of every format's constant `FORMAT`. Tensors are torch's; inputs are never modified."""

    @property
    def name(self) -> str:
        """Stem of the file."""
        ...

    @property
    def bits(self) -> int:
        """Bits of a code."""
        ...

    @property
    def rules(self) -> Rules:
        """Rules for its schemes."""
        ...

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round [N, K] to nearest; every range spans the smallest to the largest of its weights."""
        ...

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """Return the values of the codes, [N, K] float32."""
        ...

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [N, K] densely into bytes, uint8 [N, ceil(K * bits / 8)]."""
        ...

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`; K = columns."""
        ...

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Count the stored bits per weight of a [N, K] matrix: codes, scales and zero points."""
        ...


load_format = Kind[Format]("formats").load


def is_halved(scheme: WeightScheme) -> bool:
    """Tell whether two codes share a byte until the export: codes of up to 4 bits, in formats without offsets."""
    chosen = load_format(scheme.format)
    return chosen.bits <= 4 and True in chosen.rules.symmetric


def stored_bits(shape: tuple[int, int], scheme: WeightScheme) -> float:
    """Count all stored bits of a [N, K] matrix: codes, scales, zero points, and padding of the last group."""
    rows, columns = shape[0], shape[1] + scheme.padding(shape[1])
    return load_format(scheme.format).bits_per_weight((rows, columns), scheme) * rows * columns
