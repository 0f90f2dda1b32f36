"""How far values reach, and how many lie where: what a fixed scale of an activation or of the KV cache is found from.

    minmax      the grid spans the smallest to the largest value
    percentile  it spans all but the outermost 0.01 %, counted from zero outwards if symmetric
    mse         of grids that span a share of min-max, the one with the least sum of (x̂ - x)²

Counts are kept of values rounded to bfloat16: 65,536 bins, finer than a 256th of any value, whatever the range turns
out to be; so chunks can come in any number, and the result is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.formats import _activation
from quantkit.formats._activation import InputScale

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import ActivationScheme, CacheScheme

# the share of values that `percentile` covers
COVERED = 0.9999
# shares of min-max that `mse` tries
_SHARES = 40
_BINS = 1 << 16


class Observed:
    """Values of several rows, each of which will have a scale.

    Args:
        counted: whether to count values, for `percentile` and `mse`.
    """

    def __init__(self, *, counted: bool) -> None:
        self._counted = counted
        self._low = torch.empty(0)
        self._high = torch.empty(0)
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def seen(self) -> bool:
        """Whether there was anything."""
        return self._low.numel() > 0

    def add(self, values: Tensor) -> None:
        """Add values [rows, n]; nothing, if n is 0."""
        if values.shape[1] == 0:
            return
        values = values.float()
        low, high = torch.aminmax(values, dim=1)
        if not self.seen:
            self._low, self._high = low, high
            if self._counted:
                self._counts = torch.zeros(values.shape[0], _BINS, dtype=torch.int64)
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)
        if self._counted:
            bins = values.to(torch.bfloat16).view(torch.int16).int() & (_BINS - 1)
            for row, found in enumerate(bins):
                self._counts[row] += torch.bincount(found, minlength=_BINS)

    def settle(self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype) -> tuple[InputScale, int, int]:
        """The scale [rows] in `dtype`, how many values lie beyond it and will saturate, and of how many.

        Values are known to bfloat16's precision; without counts, none lies beyond.
        """
        low, high = self._low, self._high
        if self._counted:
            reached = [_reach(*self._row(row), scheme) for row in range(low.numel())]
            low = torch.maximum(low, torch.tensor([pair[0] for pair in reached]))
            high = torch.minimum(high, torch.tensor([pair[1] for pair in reached]))
        scale, zero = _activation.parameters(low, high, scheme)
        # a scale that half precision cannot hold would be zero there
        scale = scale.clamp(min=torch.finfo(dtype).tiny, max=torch.finfo(dtype).max).to(dtype)
        beyond, total = 0, 0
        if self._counted:
            form = _activation.form_of(scheme)
            for row in range(low.numel()):
                values, counts = self._row(row)
                shift = 0.0 if zero is None else float(zero[row])
                scaled = values / float(scale[row]) + shift
                # half a step beyond the last value is still nearest to it
                outside = (scaled > form.high + 0.5) | (scaled < form.low - 0.5)
                beyond += int(counts[outside].sum())
                total += int(counts.sum())
        return InputScale(scale, zero), beyond, total

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        """The different values of a row, ascending, float32, and how often each came."""
        bins = self._counts[row].nonzero().squeeze(1)
        values = bins.to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
        order = values.argsort()
        return values[order], self._counts[row][bins[order]]


def _reach(values: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[float, float]:
    """From where to where the grid of one row goes; see the module."""
    low, high = min(float(values[0]), 0.0), max(float(values[-1]), 0.0)
    if scheme.range == "percentile":
        if scheme.symmetric:
            size, order = values.abs().sort()
            top = float(size[_first_covering(counts[order], COVERED)])
            return -top, top
        outside = (1 - COVERED) / 2
        bottom = float(values[_first_covering(counts, outside)])
        return min(bottom, 0.0), max(float(values[_first_covering(counts, 1 - outside)]), 0.0)
    best, least = (low, high), float("inf")
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    for number in range(_SHARES, _SHARES // 5, -1):
        share = number / _SHARES
        scale, zero = _activation.parameters(torch.tensor([low * share]), torch.tensor([high * share]), scheme)
        error = _activation.apply(values, scheme, scale, zero) - values
        cost = float((error.double().square() * counts).sum())
        if cost < least:
            best, least = (low * share, high * share), cost
    return best


def _first_covering(counts: Tensor, share: float) -> int:
    """The first place up to which at least that share of all counts lies."""
    reached = counts.cumsum(0)
    return int(torch.searchsorted(reached, share * float(reached[-1])).clamp(max=counts.numel() - 1))
