"""What is known of a product's inputs when its weights become codes: second moments, filled up to whole groups.

`calibrate/statistics/sums.py` has the sums of one shared input of a block; these are means, of each group of a product.
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
    """Means over the rows of calibration, of a graph's product with `groups` groups and K inputs each, or of the head.

    x̂ is what the product sees behind quantized ones, x what it sees in the float graph.

    Args:
        hessian: of x̂ x̂ᵀ, [groups, K, K].
        cross: of x x̂ᵀ, [groups, K, K]; None where both are the same.
        halves: `hessian` over every other batch, and over the rest; one, where there was one batch.
        by_row: whether every group is a few inputs alone, as in a depthwise convolution; all are solved at once then.
        neighbours: [K], by which codes are bounded (`solvers.unsaturated`).
        name: of the product.
        decisions: what a pass did with them otherwise than it was asked; it adds to them.
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
        """Return what `make` gives, made once: pieces of a weight share a factor."""
        if key not in self._solved:
            self._solved[key] = make()
        found: Found = self._solved[key]
        return found

    def filled(self, columns: int) -> Moments:
        """Of `columns` inputs, those that fill up a last group never anything but zero."""
        if columns == self.hessian.shape[-1]:
            return self
        cross = filled(self.cross, columns, columns)
        halves = tuple(filled(half, columns, columns) for half in self.halves)
        return replace(self, hessian=filled(self.hessian, columns, columns), cross=cross, halves=halves)

    @cached_property
    def noise(self) -> float:
        """How much of the Hessian beside its diagonal is chance, 0..1; as `calibrate.statistics.InputStats.noise`."""
        if len(self.halves) < 2:
            return 1.0
        size = self.hessian.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        size = torch.where(size > 0, size, torch.inf)
        scale = size.unsqueeze(2) * size.unsqueeze(1)
        first, second, whole = ((each / scale).triu(1) for each in (*self.halves, self.hessian))
        both = float(whole.square().sum())
        return min(1.0, float((first - second).square().sum()) / 4 / both) if both > 0 else 1.0

    @property
    def mean_square(self) -> Tensor:
        """Of x̂, [groups, K] float32."""
        return self.hessian.diagonal(dim1=1, dim2=2).float()


def filled(values: Any, columns: int, rows: int = 0) -> Any:
    """With zeros to the right, and below: what weights, inputs or moments are of a last group that is filled up."""
    if values is None:
        return None
    missing = (0, columns - values.shape[-1], 0, rows - values.shape[-2]) if rows else (0, columns - values.shape[-1])
    return torch.nn.functional.pad(values, missing) if any(missing) else values
