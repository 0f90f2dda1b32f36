"""Grids of codes while `gptq.py` chooses them: where they lie, how a value snaps to one, and the tensor they end as.

Weights lie by column, [K, N], so that work on a column of all rows is one vector operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.formats import QuantTensor
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.grid import GridFormat, effective
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.formats.base.layout import by_row
from quantkit.formats.base.scaled import ScaledFormat
from quantkit.kernels.cpu import columns as loops
from quantkit.passes.solvers import device, ranges
from quantkit.passes.solvers.factor import Factor
from quantkit.scheme import WeightScheme

Range = Literal["minmax", "mse", "hessian"]
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class CodeGrid:
    """Grid of the codes: scale, updated by a descent, and zero [G, N] float32; `coarse`: super-scales [N, S]."""

    form: GridFormat
    scheme: WeightScheme
    group: int
    scale: Tensor
    zero: Tensor | None
    coarse: Tensor | None

    def launch(self, target: Tensor) -> tuple[Any, ...]:
        """Return the grid as the kernels take it, from scales to the ends."""
        zero = None if self.zero is None else self.zero.contiguous()
        return self.scale, zero, *device.table(self.form, target.device), self.form.low, self.form.high

    def snap(self) -> Callable[..., object]:
        """Return a function of units [N], a tensor for the nearest values of the grid, and their `ends`.

        `form.snap` in units of the scale, without temporaries, with middles looked up beforehand.
        """
        form = self.form
        values = form.element.codebook() if isinstance(form, ScaledFormat) else None
        if values is not None and bool((values.diff() > 0).all()):
            middles = (values[1:] + values[:-1]) / 2
            return lambda units, out, *_: torch.index_select(values, 0, torch.bucketize(units, middles), out=out)
        if self._clamps:
            return lambda units, out, low, high: torch.clamp(units.round_(), low, high, out=out)
        return lambda units, out, zero=None: out.copy_(form.snap(units, zero))

    @property
    def _clamps(self) -> bool:
        form = self.form
        return isinstance(form, IntegerFormat) or (isinstance(form, BlockFormat) and form.codebook() is None)

    def ends(self) -> list[Tensor]:
        """Return the last arguments of `snap`, each [G, N]: both ends of the grid; else the zero points, if any."""
        zero = [] if self.zero is None else [self.zero]
        if not self._clamps:
            return zero
        low, high = (torch.full_like(self.scale, end) for end in (self.form.low, self.form.high))
        return [low - zero[0], high - zero[0]] if zero else [low, high]

    def compiled(self, target: Tensor) -> bool:
        """Tell whether the loops over columns run in C: clamped integers on a CPU, and a C compiler."""
        clamped = self._clamps and self.points is None and not device.launched(target)
        return clamped and loops.ready() is not None

    def tables(self) -> tuple[Tensor, ...]:
        """Return scales, their inverses, and `ends`, [G, N] each."""
        return self.scale, inverted(self.scale), *self.ends()

    @property
    def points(self) -> LatticeFormat | None:
        """Return the format if neighbouring columns are chosen together."""
        return self.form if isinstance(self.form, LatticeFormat) else None

    def of(self, rows: slice | Tensor) -> CodeGrid:
        """Return the grid of some rows."""
        zero, coarse = self.zero, self.coarse
        zero, coarse = (None if zero is None else zero[:, rows]), (None if coarse is None else coarse[rows])
        return replace(self, scale=self.scale[:, rows], zero=zero, coarse=coarse)

    def tensor(self, units: Tensor, whole: Tensor | None) -> QuantTensor:
        """Make a `QuantTensor` of values in units of their scale [K, N]; `whole`: the global scale, if any."""
        form, scheme, scale, zero = self.form, self.scheme, self.scale, self.zero
        if device.launched(units) and isinstance(form, IntegerFormat) and scheme.rows_apart:
            from quantkit.kernels.solving.stored import integers

            stored, scales, zeros = integers(units, scale, zero, effective(scheme), self.group)
            return QuantTensor(stored, scales, None if zero is None else zeros, scheme)
        # rows that share a scale have equal ones
        stride = {"tensor": scale.shape[1], "block": self.group}.get(scheme.granularity, 1)
        scales = scale.T[::stride].contiguous().to(effective(scheme))
        zeros = None if zero is None else zero.T[::stride].contiguous().to(torch.int8)
        if isinstance(form, IntegerFormat):
            codes = units if zero is None else zero.repeat_interleave(self.group, dim=0).add_(units)
            return QuantTensor(codes.to(torch.int8).T.contiguous(), scales, zeros, scheme)
        values = units * scale.repeat_interleave(self.group, dim=0)[: units.shape[0]]
        return form.nearest(values.T.contiguous(), scales, zeros, scheme, whole)


def placed(
    target: Tensor, rows: list[int], group: int, scheme: WeightScheme, solved: Factor, kind: Range, threads: int
) -> tuple[Tensor, Tensor | None]:
    """Return effective scale and zero [G, N] float32 of weights with these `rows`, side by side in target [K, N]."""
    search = ranges.Search(steps=0, refinements=0) if kind == "minmax" else ranges.Search()
    importance = solved.diagonal.contiguous() if kind == "hessian" else None
    if scheme.granularity not in ("tensor", "block"):
        scale, zero = ranges.transposed(target, group, scheme, importance, search, True, threads)
        return scale.float(), None if zero is None else zero.float()
    scales, zeros = [], []
    for part in torch.split(target, rows, dim=1):
        scale, zero = ranges.searched(part.T, scheme, importance, search)
        scales.append(by_row(scale.float(), part.shape[1], scheme).T)
        if zero is not None:
            zeros.append(by_row(zero.float(), part.shape[1], scheme).T)
    return torch.cat(scales, dim=1), torch.cat(zeros, dim=1) if zeros else None


def inverted(scale: Tensor) -> Tensor:
    """Invert scales; zero, the scale of a group of zeros, is raised to the smallest number."""
    return scale.clamp(min=_TINY).reciprocal() if bool((scale >= 0).all()) else torch.where(scale == 0, 0.0, 1 / scale)
