"""Super-blocks whose weights are coded several at a time, as in GGUF's IQ types: a point of a lattice, and signs.

    w = (d sc) v[q]     sc = 1, 3 ... 31; |v| of 4 or 8 neighbours is one of the listed points

A code is the index of a value in a table, as in other formats with tables; only some neighbours are points together.
`even`: of 8 neighbours, an even number is negative, so that the file holds seven signs. Points are those of ggml
(`iq3s_grid` and its like in `ggml-common.h`), read from the `gguf` package.

`snap` finds the nearest value of one weight, `encode` the nearest points. `near` finds points that are near, by a table
over the cells of a cube, in a twentieth of the time: good enough to compare scales by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quantkit.formats.base.blocks import FLOAT16, SuperBlockFormat
from quantkit.formats.base.layout import packed_bits, unpacked_bits
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

# neighbours whose signs are stored together
SIGNS = 8
# weights, or cells, whose distances from all points are computed at once: these stay in the cache
_CHUNK = 256
# points whose least cost is found first, without its place: that takes a tenth of the time
_BUNCH = 16


@dataclass(frozen=True)
class LatticeFormat(SuperBlockFormat):
    """Points and signs, in super-blocks; codes are uint8, indices into the table of values of both signs."""

    levels: tuple[float, ...]  # magnitudes of a value, ascending from 1
    length: int  # weights of a point
    index: int  # bits of a point's number
    even: bool  # whether an even number of 8 weights is negative
    cell: float  # side of a cell of the table, in units of the scale

    @property
    def low(self) -> float:
        """Largest level, negative."""
        return -self.levels[-1]

    @property
    def high(self) -> float:
        """Largest level."""
        return self.levels[-1]

    @property
    def scales(self) -> tuple[int, int]:
        """Smallest and largest integer of a scale, which is odd."""
        return 1, int(2 ** (self.scale_bits + 1)) - 1

    @property
    def reach(self) -> float:
        """Largest magnitude of a value."""
        return FLOAT16 * self.scales[1] * self.high

    @property
    def unit(self) -> int:
        """Number of neighbours chosen together."""
        return SIGNS if self.even else self.length

    def codebook(self) -> Tensor:
        """Return the values, float32, ascending."""
        levels = torch.tensor(self.levels)
        return torch.cat((-levels.flip(0), levels))

    def points(self) -> Tensor:
        """Return the points, [P, length] float32, in the order of their numbers in a file."""
        return _points(self.name)

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scale for a grid from `low` to `high`, float32, never negative."""
        return torch.maximum(-low, high).float() / self.high, None

    def whole(self, units: Tensor) -> Tensor:
        """Round to the nearest integers of a scale, which are odd."""
        low, high = self.scales
        return ((units - 1) / 2).round().mul(2).add(1).clamp(low, high)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest values, each on its own: neighbours need not be a point."""
        return self.codebook().to(units.device)[self.coded(units).int()]

    def folded(self, weight: Tensor, dim: int) -> Tensor:
        """Return weights times the signs of their values: below zero is at most one of 8."""
        parts: Tensor = weight.float().unflatten(dim, (-1, self.unit))  # type: ignore[no-untyped-call]
        return (parts * self.signs(parts, dim + 1)).view_as(weight)

    def near(self, units: Tensor, dim: int) -> Tensor:
        """Return the values of near points for `folded` weights in units of the scale, neighbours along `dim`."""
        table, bins = _cells(self.name, self.levels, self.cell)
        place = units.div(self.cell).clamp_(0, bins - 1).int().unflatten(dim, (-1, self.length))  # type: ignore[no-untyped-call]
        first, *others = place.unbind(dim + 1)
        for power, other in enumerate(others, 1):
            first.add_(other, alpha=bins**power)
        numbers = table.to(units.device).index_select(0, first.reshape(-1))
        values = [row.index_select(0, numbers).view_as(first) for row in self.points().T.to(units.device)]
        return torch.stack(values, dim + 1).view_as(units)

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the codes of the nearest points; neighbours lie along the dimension of one scale, whose size is 1."""
        dim = weight.dim() - 1 if scale.shape[-1] == 1 else 1
        units = torch.where(scale == 0, 0.0, weight.float() / scale.float()).movedim(dim, -1)
        signs = self.signs(units.reshape(-1, self.unit), 1).view(-1, self.length).T
        along = units.reshape(-1, self.length).T * signs
        values = self.least(along, torch.ones(self.length, 1, device=units.device)) * signs
        return self.coded(values.T.reshape(units.shape).movedim(-1, dim))

    def points_of(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the points of codes [B, K], int32 [B, K / length], and which are negative [B, K]."""
        count = len(self.levels)
        negative = codes < count
        level = torch.where(negative, count - 1 - codes.int(), codes.int() - count)
        bases = count ** torch.arange(self.length)
        keys = (self.points()[:, :, None] == torch.tensor(self.levels)).int().argmax(2) @ bases
        numbers = torch.zeros(int(count**self.length), dtype=torch.int32)
        numbers[keys] = torch.arange(len(keys), dtype=torch.int32)
        return numbers[level.view(len(codes), -1, self.length).long() @ bases], negative

    def least(self, along: Tensor, norms: Tensor, bend: Tensor | None = None) -> Tensor:
        """Return of R the points p with the least `sum norms_i p_i² - 2 sum along_i p_i + 2 sum_{i<j} bend_ij p_i p_j`.

        Args:
            along: [length, R].
            norms: [length, R] or [length, 1].
            bend: [pairs, R], in the order of `torch.combinations`; None: zeros.

        Returns:
            [length, R], not negative.
        """
        points, pairs = _features(self.name, along.device)
        base = points.square()
        features, terms = [points], [-2 * along]
        if bend is not None:
            features, terms = [*features, pairs], [*terms, 2 * bend]
        if norms.shape[1] > 1:
            features, terms, base = [*features, base], [*terms, norms], base.new_zeros(len(points), 1)
        else:
            base = base @ norms
        matrix, parts = torch.cat(features, 1), torch.cat(terms).split(_CHUNK, dim=1)
        return points[torch.cat([_least(torch.addmm(base, matrix, some)) for some in parts])].T.contiguous()

    def signs(self, parts: Tensor, dim: int) -> Tensor:
        """Return 1 or -1 for weights; the smallest along `dim` gets the wrong sign where `even` demands it."""
        signs = torch.ones_like(parts).copysign_(parts)
        if not self.even:
            return signs
        least = parts.abs().min(dim, keepdim=True).indices
        return signs.scatter(dim, least, signs.gather(dim, least) * signs.prod(dim, keepdim=True))

    def coded(self, values: Tensor) -> Tensor:
        """Return the indices of the nearest values."""
        book = self.codebook().to(values.device)
        return torch.bucketize(values.float().contiguous(), (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Look up the values and multiply them by the scale."""
        return self.codebook().to(codes.device)[codes.int()] * scale.float()

    def pack(self, codes: Tensor) -> Tensor:
        """Pack indices, least significant bit first."""
        return packed_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return unpacked_bits(packed, self.bits, columns)

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Count the stored bits per weight: iq3_s 3.4375, iq3_xxs 3.0625, iq2_s 2.5625."""
        signs = 1 - self.even / SIGNS
        return self.index / self.length + signs + super().bits_per_weight(shape, scheme) - self.bits


@cache
def _points(name: str) -> Tensor:
    """Return the points of ggml's type with this name, in units of its smallest level."""
    import gguf

    kind: Any = getattr(gguf.quants, name.upper())
    kind.init_grid()
    points: Tensor = torch.from_numpy(kind.grid.copy()).reshape(kind.grid_shape)
    return points.div_(kind.grid_map[0])


@cache
def _cells(name: str, levels: tuple[float, ...], width: float) -> tuple[Tensor, int]:
    """Return the number of the nearest point for every cell, and cells along an axis; the first axis counts fastest."""
    points = _points(name)
    bins = math.ceil(levels[-1] / width)
    centres = (torch.arange(bins) + 0.5) * width
    norms = points.square().sum(1, keepdim=True) / 2
    every = torch.cartesian_prod(*[centres] * points.shape[1]).flip(1)
    nearest = [_least(torch.addmm(norms, points, some.T, alpha=-1)) for some in every.split(_CHUNK)]
    return torch.cat(nearest).to(torch.int32), bins


def _least(costs: Tensor) -> Tensor:
    """Return the places [R] of the least of costs [P, R]."""
    bunches: Tensor = costs.unflatten(0, (-1, _BUNCH))  # type: ignore[no-untyped-call]
    first = bunches.amin(1).min(0).indices
    inside = bunches.gather(0, first.expand(1, _BUNCH, -1))[0].min(0).indices
    return first * _BUNCH + inside


@cache
def _features(name: str, where: torch.device) -> tuple[Tensor, Tensor]:
    """Return the points [P, length] and the products of every two of their weights [P, pairs]."""
    points = _points(name).to(where)
    first, second = torch.combinations(torch.arange(points.shape[1])).T
    return points, points[:, first] * points[:, second]
