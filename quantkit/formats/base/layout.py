"""Layout of scales: from a matrix [N, K] to its scales and back.

tensor    [1, 1]          all weights share one
channel   [N, 1]          a row
group     [N, K / g]      g consecutive inputs of a row
block     [⌈N/b⌉, ⌈K/b⌉]  a square tile, cut off at the edges

And packing of codes of any width: densely, least significant bit first, rows padded to whole bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


def groups_of(columns: int, scheme: WeightScheme) -> int:
    """Count the scales along K: [4096, 4096] in groups of 128 has 32. Raises InputError (`group-indivisible`)."""
    if scheme.granularity in ("tensor", "channel"):
        return 1
    group = scheme.group or columns
    if scheme.granularity == "block":
        return -(-columns // group)
    if columns % scheme.multiple:
        sizes = (256, 192, 128, 96, 64, 48, 32, 16) if scheme.multiple == group else ()
        fitting = [size for size in sizes if columns % size == 0 and size <= group]
        use = f"use {fitting[0]}, or " if fitting else "use "
        raise InputError(
            "group-indivisible",
            value=f"group {scheme.multiple}, K {columns}",
            rule="group divides K",
            remedy=f"{use}on_indivisible: keep or pad",
        )
    return columns // group


def scale_shape(shape: tuple[int, int], scheme: WeightScheme) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [N, K]. Raises InputError (`group-indivisible`)."""
    rows, columns = shape
    if scheme.granularity == "tensor":
        return 1, 1
    if scheme.granularity == "block":
        rows = -(-rows // (scheme.group or rows))
    return rows, groups_of(columns, scheme)


def tiles(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """Cut [N, K] into [n, b, k, b] for `granularity: block`, padded with zeros at the edges."""
    size = scheme.group or max(weight.shape)
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    return whole.reshape(whole.shape[0] // size, size, whole.shape[1] // size, size)


def extremes(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Find the smallest and the largest weight under every scale, in the shape of the scales, float32.

    Raises InputError: `group-indivisible`.
    """
    weight = weight.float()
    if scheme.granularity == "block":
        parts = tiles(weight, scheme)
        return parts.amin(dim=(1, 3)), parts.amax(dim=(1, 3))
    rows, columns = weight.shape
    parts = weight.reshape(rows, groups_of(columns, scheme), -1)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    if scheme.granularity == "tensor":
        return low.amin().reshape(1, 1), high.amax().reshape(1, 1)
    return low, high


def by_row(scales: Tensor, rows: int, scheme: WeightScheme) -> Tensor:
    """Repeat scales (or zero points) so that every row has its own: [N, G], the same values in another shape."""
    if scheme.granularity == "tensor":
        return scales.expand(rows, 1)
    if scheme.granularity == "block":
        return scales.repeat_interleave(scheme.group or rows, dim=0)[:rows]
    return scales


def split(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """Reshape [N, K] for broadcasting with `against`: [N, G, K / G], or unchanged in blocks.

    Raises InputError: `group-indivisible`.
    """
    if scheme.granularity == "block":
        return weight
    rows, columns = weight.shape
    groups = groups_of(columns, scheme)
    return weight.reshape(rows, groups, columns // groups)


def against(scales: Tensor, shape: tuple[int, int], scheme: WeightScheme) -> Tensor:
    """Reshape scales (or zero points) for broadcasting with `split` of a matrix [N, K]."""
    if scheme.granularity != "block":
        return scales.unsqueeze(2)
    rows, columns = shape
    return by_row(scales, rows, scheme).repeat_interleave(scheme.group or columns, dim=1)[:, :columns]


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes 0 .. 2^bits - 1 [N, K] -> uint8 [N, ceil(K * bits / 8)]; 4 bits [4096, 4096] -> [4096, 2048]."""
    rows, columns = codes.shape
    shifts = torch.arange(bits, dtype=torch.int16, device=codes.device)
    every = ((codes.to(torch.int16).unsqueeze(2) >> shifts) & 1).reshape(rows, columns * bits)
    every = torch.nn.functional.pad(every, (0, -every.shape[1] % 8)).reshape(rows, -1, 8)
    places = torch.arange(8, dtype=torch.int16, device=codes.device)
    return (every << places).sum(dim=2).to(torch.uint8)


def unpacked_bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack uint8 [N, ceil(K * bits / 8)] -> codes [N, K], uint8."""
    rows = packed.shape[0]
    places = torch.arange(8, dtype=torch.int16, device=packed.device)
    every = ((packed.to(torch.int16).unsqueeze(2) >> places) & 1).reshape(rows, -1)[:, : columns * bits]
    shifts = torch.arange(bits, dtype=torch.int16, device=packed.device)
    return (every.reshape(rows, columns, bits) << shifts).sum(dim=2).to(torch.uint8)
