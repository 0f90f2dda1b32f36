"""Second moments of a product's inputs, padded to whole groups.

`calibrate/statistics/sums.py` has sums for one shared input of a block; these are means, for every group of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quantkit.bundle import Decision

Found = TypeVar("Found")


@dataclass(frozen=True)
class Moments:
    """Means over the rows of calibration, for a graph's product with `groups` groups of K inputs, or for the head.

    x̂ is the product's input after quantized layers, x its input in the float graph.

    Args:
        hessian: mean of x̂ x̂ᵀ, [groups, K, K].
        cross: mean of x x̂ᵀ, [groups, K, K]; None if both inputs are equal.
        halves: `hessian` over every other batch, and over the rest; only one if there was one batch.
        by_row: whether every group has only a few inputs, as in a depthwise convolution; all are solved at once then.
        neighbours: [K], columns by which codes are bounded (`solvers.unsaturated`).
        name: name of the product.
        decisions: list to which a pass adds its deviations from what was asked.
    """

    hessian: Tensor
    cross: Tensor | None = None
    halves: tuple[Tensor, ...] = ()
    by_row: bool = False
    neighbours: Tensor | None = None
    name: str = ""
    decisions: list[Decision] = field(default_factory=list, repr=False, compare=False)
    _solved: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Any, make: Callable[[], Found]) -> Found:
        """Call `make` once for a key and keep the result: pieces of a weight share a factor."""
        if key not in self._solved:
            self._solved[key] = make()
        kept: Found = self._solved[key]
        return kept

    def filled(self, columns: int) -> Moments:
        """Pad to `columns` inputs; the added ones are always zero."""
        if columns == self.hessian.shape[-1]:
            return self
        cross = filled(self.cross, columns, columns)
        halves = tuple(filled(half, columns, columns) for half in self.halves)
        return replace(self, hessian=filled(self.hessian, columns, columns), cross=cross, halves=halves)

    @cached_property
    def noise(self) -> float:
        """Random share of the Hessian's off-diagonal entries, 0..1; as `calibrate.statistics.InputStats.noise`."""
        if len(self.halves) < 2:
            return 1.0
        size = self.hessian.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        size = torch.where(size > 0, size, torch.inf)
        scale = size.unsqueeze(2) * size.unsqueeze(1)
        first, second, whole = ((part / scale).triu(1) for part in (*self.halves, self.hessian))
        both = float(whole.square().sum())
        return min(1.0, float((first - second).square().sum()) / 4 / both) if both > 0 else 1.0

    @property
    def mean_square(self) -> Tensor:
        """Mean square of x̂, [groups, K] float32."""
        return self.hessian.diagonal(dim1=1, dim2=2).float()


def filled(values: Any, columns: int, rows: int = 0) -> Any:
    """Pad weights, inputs or moments with zeros to the right and below, to whole groups."""
    if values is None:
        return None
    missing = (0, columns - values.shape[-1], 0, rows - values.shape[-2]) if rows else (0, columns - values.shape[-1])
    return torch.nn.functional.pad(values, missing) if any(missing) else values
