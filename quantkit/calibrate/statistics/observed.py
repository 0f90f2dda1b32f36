"""How far values reach, and how many lie where: what a fixed scale of an activation or of the KV cache is found from.

    minmax          the grid spans the smallest to the largest value
    moving-average  it spans the average of the samples' smallest to that of their largest values (see below)
    percentile      it spans all but the outermost 0.01 %, counted from zero outwards if symmetric
    entropy         of narrower grids, the one whose values are distributed most like those that came (`entropy.py`)
    mse             of grids that span a share of min-max, the one with the least sum of (x̂ - x)²

Nothing that comes is kept. Counts are of values rounded to bfloat16: 65,536 bins, finer than a 256th of any value,
whatever the range turns out to be; so chunks can come in any number, and the result is the same.

The moving average is that of torch's MovingAverageMinMaxObserver (Jacob et al. 2018, arXiv 1712.05877, section 3.1),
m ← m + c (x - m), with c = 0.01, but for two things. A batch is one sample, whatever number runs at once. And until the
hundredth sample c is 1 / k, so that m is their plain mean: with c from the start, the first of 128 counts for 28 %.
Beyond a hundred, samples count the more the later they come: their order, which the seed decides, matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.calibrate.statistics import entropy
from quantkit.errors import InputError
from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputScale
from quantkit.formats.base.grid import load_grid

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import ActivationScheme, CacheScheme

# the share of values that `percentile` covers
COVERED = 0.9999
# the least weight of a sample in a moving average, torch's
AVERAGING = 0.01
# shares of min-max that `mse` tries
_SHARES = 40
_BINS = 1 << 16


class Observed:
    """Values of several rows, each of which will have a scale.

    Args:
        counted: whether to count values: for all ranges but `minmax`, since what lies beyond them is told.
    """

    def __init__(self, *, counted: bool, name: str = "activations") -> None:
        self._counted, self._name = counted, name
        self._low = torch.empty(0)
        self._high = torch.empty(0)
        self._average = torch.empty(0)
        self._samples = 0
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def seen(self) -> bool:
        """Whether there was anything."""
        return self._low.numel() > 0

    @property
    def constant(self) -> bool:
        """Whether all that came was one value a row."""
        return self.seen and bool((self._low == self._high).all())

    def add(self, values: Tensor, samples: int = 1) -> None:
        """Add values [rows, n]; nothing, if n is 0.

        Args:
            values: each row's samples one behind the other, all of the same length.
            samples: how many there are in a row.

        Raises:
            InputError: `activations-nonfinite`.
        """
        if values.shape[1] == 0:
            return
        values = values.float()
        lows, highs = torch.aminmax(values.reshape(values.shape[0], samples, -1), dim=2)
        low, high = lows.amin(dim=1), highs.amax(dim=1)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            raise InputError(
                "activations-nonfinite",
                where=self._name,
                value=f"{int((~torch.isfinite(values)).sum())} of {values.numel()} values are NaN or infinite",
                rule="a range needs finite values",
                remedy="look for what made them so, in the model or in what calibrates it",
            )
        if not self.seen:
            self._low, self._high = low, high
            self._average = torch.zeros(values.shape[0], 2, dtype=torch.float64)
            if self._counted:
                self._counts = torch.zeros(values.shape[0], _BINS, dtype=torch.int64)
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)
        for ends in torch.stack([lows, highs], dim=2).double().unbind(1):
            self._samples += 1
            self._average += (ends - self._average) * max(AVERAGING, 1 / self._samples)
        if self._counted:
            bins = values.to(torch.bfloat16).view(torch.int16).int() & (_BINS - 1)
            for row, found in enumerate(bins):
                self._counts[row] += torch.bincount(found, minlength=_BINS)

    def settle(self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype) -> tuple[InputScale, int, int]:
        """The scale [rows] in `dtype`, how many values lie beyond it and will saturate, and of how many.

        Values are known to bfloat16's precision; without counts, none lies beyond. All zeros have the smallest of
        scales.
        """
        low, high = self._low, self._high
        if scheme.range == "moving-average":
            low, high = self._average.float().unbind(1)
        elif scheme.range != "minmax":
            reached = [_reach(*self._row(row), scheme) for row in range(low.numel())]
            low = torch.maximum(low, torch.tensor([pair[0] for pair in reached]))
            high = torch.minimum(high, torch.tensor([pair[1] for pair in reached]))
        scale, zero = activation.parameters(low, high, scheme)
        # a scale that half precision cannot hold would be zero there
        scale = scale.clamp(min=torch.finfo(dtype).tiny, max=torch.finfo(dtype).max).to(dtype)
        beyond, total = 0, 0
        if self._counted:
            form = load_grid(scheme.format)
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
    if scheme.range == "entropy":
        return entropy.reach(values, counts, scheme)
    best, least = (low, high), float("inf")
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    for number in range(_SHARES, _SHARES // 5, -1):
        share = number / _SHARES
        scale, zero = activation.parameters(torch.tensor([low * share]), torch.tensor([high * share]), scheme)
        error = activation.apply(values, scheme, scale, zero) - values
        cost = float((error.double().square() * counts).sum())
        if cost < least:
            best, least = (low * share, high * share), cost
    return best


def _first_covering(counts: Tensor, share: float) -> int:
    """The first place up to which at least that share of all counts lies."""
    reached = counts.cumsum(0)
    return int(torch.searchsorted(reached, share * float(reached[-1])).clamp(max=counts.numel() - 1))
