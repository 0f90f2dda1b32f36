"""How far values reach, and how many lie where: what a fixed scale of an activation or of the KV cache is found from.

    minmax          the grid spans the smallest to the largest value
    moving-average  it spans the average of the samples' smallest to that of their largest values (see below)
    percentile      it spans all but the outermost 0.01 %, counted from zero outwards if symmetric
    entropy         of narrower grids, the one whose values are distributed most like those that came (below)
    mse             of grids that span a share of min-max, the one with the least sum of (x̂ - x)²

Nothing that comes is kept. Counts are of values rounded to bfloat16: 65,536 bins, finer than a 256th of any value; so
chunks can come in any number, and the result is the same.

The moving average is that of torch's MovingAverageMinMaxObserver (Jacob et al. 2018, arXiv 1712.05877, section 3.1),
m ← m + c (x - m), c = 0.01, of single samples whatever the batch, and with c = 1 / k until the hundredth: with 0.01
from the start, the first of 128 samples counts for 28 %. Beyond a hundred, the order of samples matters.

Entropy is the least KL divergence between a distribution and what a grid makes of it (Migacz, "8-bit Inference with
TensorRT", GTC 2017; the calibrators of TensorRT and ONNX Runtime). Values are counted in bins of one width. For each
range that is tried, with P the bins inside of it,

    P gets what lies outside at its outermost bins, as it will saturate; Q does not
    Q is P on the grid: the bins of one code share its mass evenly, as far as they are not empty
    KL(P || Q) = Σ P log(P / Q),  both of sum 1

There, a grid is symmetric and has one threshold. Here, codes are those of the scheme's own scale and zero point, so
that a grid may have two ends: both are first shrunk alike, then each for itself while that helps. Zeros are not
counted, since zero is always a code: half of what a ReLU makes is zeros, which would ask for ever narrower ranges.
Where one value is a thousand times larger than nearly all others, these fall into a few bins, and `mse` does better.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputScale
from quantkit.formats.base.grid import load_grid
from quantkit.scheme import ActivationScheme, CacheScheme

# the share of values that `percentile` covers
COVERED = 0.9999
# the least weight of a sample in a moving average, torch's
AVERAGING = 0.01
# shares of min-max that `mse` tries
_SHARES = 40
_BINS = 1 << 16
# values that a GPU counts at a time
_PIECE = 1 << 24
# ranges that a GPU finds without being waited for
AT_ONCE = ("minmax", "moving-average", "mse")


class Observed:
    """Values of several rows, each of which will have a scale.

    Args:
        counted: whether to count values: for all ranges but `minmax`, since what lies beyond them is told.
    """

    def __init__(self, *, counted: bool, name: str = "activations") -> None:
        self._counted, self._name = counted, name
        self._low = torch.empty(0)
        self._high = torch.empty(0)
        self._ends: list[Tensor] = []  # each [rows, samples, 2]
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def seen(self) -> bool:
        """Whether there was anything."""
        return self._low.numel() > 0

    @property
    def device(self) -> torch.device:
        """Where what came lay."""
        return self._low.device

    @property
    def constant(self) -> bool:
        """Whether all that came was one value a row."""
        return self.seen and bool((self._low == self._high).all())

    def add(self, values: Tensor, samples: int = 1) -> None:
        """Add values [rows, n], each row's samples of one length behind each other; nothing, if n is 0.

        Raises:
            InputError: `activations-nonfinite`; of values on a GPU, which is not waited for, when they are settled.
        """
        if values.shape[1] == 0:
            return
        values = values.float()
        lows, highs = torch.aminmax(values.reshape(values.shape[0], samples, -1), dim=2)
        low, high = lows.amin(dim=1), highs.amax(dim=1)
        if not values.is_cuda:
            wrong = int((~torch.isfinite(values)).sum()) if not _finite(low, high) else 0
            self._demand_finite(low, high, f"{wrong} of {values.numel()} values are NaN or infinite")
        if not self.seen:
            self._low, self._high = low, high
            if self._counted:
                self._counts = torch.zeros(values.shape[0], _BINS, dtype=torch.int64, device=values.device)
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)
        self._ends.append(torch.stack([lows, highs], dim=2))
        if self._counted:
            bins = values.to(torch.bfloat16).view(torch.int16).int() & (_BINS - 1)
            for row, found in enumerate(bins):
                if found.is_cuda:  # `bincount` waits for the largest
                    for piece in found.split(_PIECE):
                        self._counts[row].index_add_(0, piece, self._counts.new_ones(()).expand(len(piece)))
                else:
                    self._counts[row] += torch.bincount(found, minlength=_BINS)

    def settle(self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype) -> tuple[InputScale, int, int]:
        """Return the scale [rows] in `dtype`, how many values lie beyond it and will saturate, and of how many.

        Values are known to bfloat16's precision; without counts, none lies beyond. All zeros have the smallest of
        scales. What was seen on a GPU is looked at on the processor, and waited for (see `settle_at_once`).
        """
        device = self._low.device
        low, high, self._counts = self._low.cpu(), self._high.cpu(), self._counts.cpu()
        self._demand_finite(low, high, "NaN or infinite values")
        if scheme.range == "moving-average":
            low, high = self._averaged().float().unbind(1)
        elif scheme.range != "minmax":
            reached = [_reach(*self._row(row), scheme) for row in range(low.numel())]
            low = torch.maximum(low, torch.tensor([pair[0] for pair in reached]))
            high = torch.minimum(high, torch.tensor([pair[1] for pair in reached]))
        scale, zero = _stored(low, high, scheme, dtype)
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
        return InputScale(scale, zero).on(device), beyond, total

    def settle_at_once(
        self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype
    ) -> tuple[InputScale, Tensor, Tensor]:
        """`settle` on a GPU, which is not waited for: of the ranges in `AT_ONCE`.

        Returns:
            the scale; how many values lie beyond it and of how many, [2] int64; what is finite if all values were,
            [2 rows], for the caller to look at when the device is done.
        """
        low, high = self._low, self._high
        checked = torch.cat([low, high])
        values = torch.arange(_BINS, dtype=torch.int32, device=low.device).to(torch.int16).view(torch.bfloat16)
        values = values.float().nan_to_num(0.0, 0.0, 0.0)
        if scheme.range == "moving-average":
            ends = torch.cat(self._ends, dim=1).double()
            kept = [max(AVERAGING, 1 / number) for number in range(1, ends.shape[1] + 1)]
            weights = np.array(kept) * np.append(np.cumprod(1 - np.array(kept)[:0:-1])[::-1], 1.0)
            shares = torch.from_numpy(weights).to(low.device, non_blocking=True)
            low, high = (ends * shares[None, :, None]).sum(dim=1).float().unbind(1)
        elif scheme.range == "mse":
            pairs = [_least_squares(values, *each, scheme) for each in zip(low, high, self._counts, strict=True)]
            low = torch.maximum(low, torch.stack([pair[0] for pair in pairs]))
            high = torch.minimum(high, torch.stack([pair[1] for pair in pairs]))
        scale, zero = _stored(low, high, scheme, dtype)
        if not self._counted:
            return InputScale(scale, zero), low.new_zeros(2, dtype=torch.int64), checked
        form = load_grid(scheme.format)
        scaled = values / scale.float().unsqueeze(1)
        if zero is not None:
            scaled = scaled + zero.float().unsqueeze(1)
        outside = (scaled > form.high + 0.5) | (scaled < form.low - 0.5)
        beyond = torch.stack([(self._counts * outside).sum(), self._counts.sum()])
        return InputScale(scale, zero), beyond, checked

    def _averaged(self) -> Tensor:
        """[rows, 2] float64."""
        average = torch.zeros(self._low.numel(), 2, dtype=torch.float64)
        samples = (ends for part in self._ends for ends in part.cpu().double().unbind(1))
        for number, ends in enumerate(samples, 1):
            average += (ends - average) * max(AVERAGING, 1 / number)
        return average

    def _demand_finite(self, low: Tensor, high: Tensor, value: str) -> None:
        if not _finite(low, high):
            remedy = "look for what made them so, in the model or in what calibrates it"
            raise InputError("activations-nonfinite", self._name, value, "a range needs finite values", remedy)

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the different values of a row, ascending, float32, and how often each came."""
        bins = self._counts[row].nonzero().squeeze(1)
        values = bins.to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
        order = values.argsort()
        return values[order], self._counts[row][bins[order]]


def _stored(
    low: Tensor, high: Tensor, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale in `dtype` and zero point of a range."""
    scale, zero = activation.parameters(low, high, scheme)
    # a scale that half precision cannot hold would be zero there
    return scale.clamp(min=torch.finfo(dtype).tiny, max=torch.finfo(dtype).max).to(dtype), zero


def _least_squares(
    values: Tensor, low: Tensor, high: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme
) -> tuple[Tensor, Tensor]:
    """`_reach` of `mse` with all shares at once; `values` are those of the bins, low and high []."""
    low, high = (end.to(torch.bfloat16).double() for end in (low.clamp(max=0), high.clamp(min=0)))
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    shares = torch.arange(_SHARES, _SHARES // 5, -1, dtype=torch.float64, device=values.device) / _SHARES
    lows, highs = (low * shares).float().unsqueeze(1), (high * shares).float().unsqueeze(1)
    error = activation.apply(values, scheme, *activation.parameters(lows, highs, scheme)) - values
    best = (error.double().square_() * counts).sum(dim=1).argmin().reshape(1)  # the first of equals
    return lows.squeeze(1)[best].squeeze(0), highs.squeeze(1)[best].squeeze(0)


def _finite(low: Tensor, high: Tensor) -> bool:
    return bool((torch.isfinite(low) & torch.isfinite(high)).all())


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
        return reach(values, counts, scheme)
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
    """Return the first place up to which at least that share of all counts lies."""
    reached = counts.cumsum(0)
    return int(torch.searchsorted(reached, share * float(reached[-1])).clamp(max=counts.numel() - 1))


# of the whole range: 16 a code, as TensorRT's 2,048 for 128
_BUCKETS = 4096
# tried are multiples of so many bins, down to where a bin is a code
_STEP, _FEWEST = 128, 256
_ROUNDS = 3

Array = NDArray[Any]


def reach(values: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[float, float]:
    """From where to where the grid of `entropy` goes, for ascending values of bfloat16 and how often each came."""
    low, high = min(float(values[0]), 0.0), max(float(values[-1]), 0.0)
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    there = values != 0
    edges = np.linspace(low, high, _BUCKETS + 1)
    if not bool(there.any()) or not bool((np.diff(edges) > 0).all()):
        return low, high
    mass = _binned(values[there], counts[there], edges)
    origin = int(np.abs(edges).argmin())

    def cost(ends: tuple[int, int]) -> float:  # of equals `min` takes the first
        return _divergence(mass, edges, ends, scheme)

    below, above = origin, _BUCKETS - origin
    shares = [number / _BUCKETS for number in range(_BUCKETS, _FEWEST - 1, -_STEP)]
    best = min(((origin - round(share * below), origin + round(share * above)) for share in shares), key=cost)
    for _ in range(0 if scheme.symmetric or not below or not above else _ROUNDS):
        before = best
        best = min([(best[0], origin + round(share * above)) for share in shares], key=cost)
        best = min([(origin - round(share * below), best[1]) for share in shares], key=cost)
        if best == before:
            break
    return min(float(edges[best[0]]), 0.0), max(float(edges[best[1]]), 0.0)


def _binned(values: Tensor, counts: Tensor, edges: Array) -> Array:
    """Counts of bfloat16 values in linear bins, [len(edges) - 1]: each spread over what rounds to it."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    away, towards = ((bits + step).view(torch.bfloat16).float() for step in (1, -1))
    ends = [((values + torch.where(torch.isfinite(end), end, values)) / 2).numpy() for end in (away, towards)]
    lower, upper = (np.clip(pick(*ends), edges[0], edges[-1]) for pick in (np.minimum, np.maximum))
    total = np.cumsum(counts.numpy(), dtype=np.float64)
    places = np.stack([lower, upper], axis=1).reshape(-1)
    reached = np.stack([total - counts.numpy(), total], axis=1).reshape(-1)
    found: Array = np.diff(np.interp(edges, places, reached, left=0.0, right=total[-1]))
    found[0] += np.interp(edges[0], places, reached)  # all of a value that is the end itself
    return found


def _divergence(mass: Array, edges: Array, ends: tuple[int, int], scheme: ActivationScheme | CacheScheme) -> float:
    first, last = ends
    inside = mass[first:last]
    there = np.flatnonzero(inside)
    if not len(there):
        return float("inf")
    parts = inside[there]
    p = parts.copy()
    p[0] += mass[:first].sum()
    p[-1] += mass[last:].sum()
    middles = torch.from_numpy((edges[first:last] + edges[first + 1 : last + 1])[there] / 2).float()
    low, high = (torch.tensor([edges[end]], dtype=torch.float32) for end in ends)
    scale, zero = activation.parameters(low, high, scheme)
    codes = activation.apply(middles, scheme, scale, zero).numpy()
    group = np.concatenate([[0], np.cumsum(np.diff(codes) != 0)])
    q = (np.bincount(group, weights=parts) / np.bincount(group))[group]
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())
