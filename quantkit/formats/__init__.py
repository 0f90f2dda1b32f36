"""Number formats, one a file: quantize, dequantize, pack, unpack, bits per weight. Reference, exact.

`QuantTensor` is all that exporters, runtimes and kernels see of a quantized weight. Modules are torch-free at import.
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
    """Scales and offsets as whole numbers, 256 weights under a d and dmin: `scale = d * sc`, `offset = -dmin * mn`."""

    d: Tensor  # [N, K / 256] float16
    sc: Tensor  # [N, G] int8
    dmin: Tensor | None = None  # [N, K / 256] float16; None where there are no offsets
    mn: Tensor | None = None  # [N, G] int8, not negative


@dataclass(frozen=True)
class QuantTensor:
    """A quantized matrix: `w[n, k] = value(codes[n, k]) * scale[n, g(k)] * global_scale + offset[n, g(k)]`.

    `value` is `codes - zero` of integers, `codebook[codes]` where there is a codebook, and the codes themselves where
    they are floating-point numbers. For weights [4096, 4096] in groups of 128: codes [4096, 4096], scale and zero
    [4096, 32]; per channel G = 1; per tensor scale is [1, 1]; in blocks of 128 it is [32, 32].

    Args:
        codes: [N, K], unpacked; int8 of integers, of either symmetry (int4 codes lie in -8..7); uint8 places in the
            codebook; torch's float8 types.
        scale: [N, G] (or [1, 1]), in the dtype it is stored in; of nested scales the effective float32 values.
        zero: [N, G], int8, in the range of the codes; None when symmetric.
        codebook: [2^bits] float32, what each code stands for.
        global_scale: [] float32, one more factor for the whole matrix.
        nested: the stored form of scales that are quantized themselves.
        offset: [N, G], what code 0 stands for, float16 or the effective float32 values; None: nothing is added.
        super_blocks: the stored form of scales and offsets that are whole numbers under a float16.
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
        """Expand the codes to the values that they stand for, [N, K] float32."""
        return load_format(self.scheme.format).dequantize(self)

    def replace(self, **changes: object) -> QuantTensor:
        """Copy it with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def joined(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Put matrices of one scheme below one another: [N1, K], [N2, K] -> [N1 + N2, K]. Nothing is rounded again.

    Raises ValueError: different schemes, or scales that rows share.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.scheme != first.scheme for part in parts) or not first.scheme.rows_apart:
        raise ValueError("only matrices of one scheme, with scales for every row, can be joined")
    return _each(parts, torch.cat)


def _each(parts: Sequence[QuantTensor], make: Callable[[list[Tensor]], Tensor]) -> QuantTensor:
    """The tensor whose every field with rows is made of that field of all parts."""

    def fields(holders: Sequence[object], *names: str) -> dict[str, Any]:
        of_all = {name: [getattr(holder, name) for holder in holders] for name in names}
        return {name: make(values) for name, values in of_all.items() if values[0] is not None}

    changes = fields(parts, "codes", "scale", "zero", "offset")
    stored = [part.super_blocks for part in parts if part.super_blocks is not None]
    if stored:
        changes["super_blocks"] = replace(stored[0], **fields(stored, "d", "sc", "dmin", "mn"))
    return parts[0].replace(**changes)


def apart(tensor: QuantTensor, rows: Sequence[int]) -> list[QuantTensor]:
    """Cut what was `joined`: [N1 + N2, K] -> [N1, K], [N2, K]. A scale of the whole matrix is that of every part.

    Raises ValueError: scales that some of the rows share.
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
    """What every format's constant `FORMAT` offers. Tensors are torch's; inputs are never modified."""

    @property
    def name(self) -> str:
        """The file's stem."""
        ...

    @property
    def bits(self) -> int:
        """Bits of one code."""
        ...

    @property
    def rules(self) -> Rules:
        """What its schemes may say."""
        ...

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round [N, K] to nearest, each range from the smallest to the largest weight it covers."""
        ...

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """Return the values that the codes stand for, [N, K] float32."""
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


def stored_bits(shape: tuple[int, int], scheme: WeightScheme) -> float:
    """Count all stored bits of a [N, K] matrix: codes, scales, zero points, and what fills up the last group."""
    rows, columns = shape[0], shape[1] + scheme.padding(shape[1])
    return load_format(scheme.format).bits_per_weight((rows, columns), scheme) * rows * columns
