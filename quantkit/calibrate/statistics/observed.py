"""Ranges and distribution of values, from which a fixed scale of an activation or of the KV cache is found.

    minmax          the grid spans the smallest to the largest value
    moving-average  it spans the average of the samples' smallest to that of their largest values (see below)
    percentile      it spans all but the outermost 0.01 %, counted from zero outwards if symmetric
    entropy         of narrower grids, the one whose values have the most similar distribution (below)
    mse             of grids that span a share of min-max, the one with the least sum of (x̂ - x)²

Values are not stored. They are counted after rounding to bfloat16: 65,536 bins, finer than a 256th of any value; so the
result does not depend on the chunks.

The moving average is that of torch's MovingAverageMinMaxObserver (Jacob et al. 2018, arXiv 1712.05877, section 3.1),
m ← m + c (x - m), c = 0.01, over single samples for any batch, and with c = 1 / k up to the hundredth: with 0.01 from
the start, the first of 128 samples would have a weight of 28 %. Beyond a hundred, the order of samples matters.

Entropy is the least KL divergence between a distribution and its quantization by a grid (Migacz, "8-bit Inference with
TensorRT", GTC 2017; the calibrators of TensorRT and ONNX Runtime). Values are counted in bins of one width. For each
candidate range, with P the bins inside of it,

    P gets the mass outside at its outermost bins, as it will saturate; Q does not
    Q is P on the grid: the non-empty bins of one code share its mass evenly
    KL(P || Q) = Σ P log(P / Q),  both of sum 1

In these libraries a grid is symmetric and has one threshold. Here codes are those of the scheme's own scale and zero
point, so a grid may have two ends: both are first shrunk alike, then each alone while that helps. Zeros are not
counted,
since zero always has a code: half of a ReLU's outputs are zeros, which would favour ever narrower ranges. If one value
is a thousand times larger than nearly all others, these fall into a few bins, and `mse` is better.
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

# share of values covered by `percentile`
COVERED = 0.9999
# least weight of a sample in a moving average, as in torch
AVERAGING = 0.01
# number of shares of min-max for `mse`
_SHARES = 40
_BINS = 1 << 16
# values counted at a time on a GPU
_PIECE = 1 << 24
# ranges found on a GPU without waiting for it
AT_ONCE = ("minmax", "moving-average", "mse")


class Observed:
    """Observer of several rows of values, each of which will have a scale.

    Args:
        counted: True to count values: for all ranges but `minmax`, since saturation is reported.
        name: name of the values, for errors.
    """

    def __init__(self, *, counted: bool, name: str = "activations") -> None:
        self._counted, self._name = counted, name
        self._low = torch.empty(0)
        self._high = torch.empty(0)
        self._ends: list[Tensor] = []  # each [rows, samples, 2]
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def seen(self) -> bool:
        """True if there were any values."""
        return self._low.numel() > 0

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self._low.device

    @property
    def constant(self) -> bool:
        """True if each row had a single value."""
        return self.seen and bool((self._low == self._high).all())

    def add(self, values: Tensor, samples: int = 1) -> None:
        """Add values [rows, n], with each row's samples of equal length one behind the other; n may be 0.

        Raises:
            InputError: `activations-nonfinite`; for values on a GPU, only when they are settled.
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
            for row, codes in enumerate(bins):
                if codes.is_cuda:  # `bincount` would wait for the device
                    for piece in codes.split(_PIECE):
                        self._counts[row].index_add_(0, piece, self._counts.new_ones(()).expand(len(piece)))
                else:
                    self._counts[row] += torch.bincount(codes, minlength=_BINS)

    def settle(self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype) -> tuple[InputScale, int, int]:
        """Return the scale [rows] in `dtype`, the number of values beyond it, and the number of all values.

        Values beyond the scale will saturate. They are known to bfloat16's precision; without counts, there are none.
        All zeros
        get the smallest scale. Values on a GPU are copied to the processor (see `settle_at_once`).
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
                # values up to half a step beyond still round to the last code
                outside = (scaled > form.high + 0.5) | (scaled < form.low - 0.5)
                beyond += int(counts[outside].sum())
                total += int(counts.sum())
        return InputScale(scale, zero).on(device), beyond, total

    def settle_at_once(
        self, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype
    ) -> tuple[InputScale, Tensor, Tensor]:
        """Settle on a GPU without waiting for it, for the ranges in `AT_ONCE`.

        Returns:
            The scale; the number of values beyond it and of all, [2] int64; values that are finite if all values were,
            [2 rows], for the caller to check when the device is done.
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
            rows = zip(low, high, self._counts, strict=True)
            pairs = [_least_squares(values, *row, scheme) for row in rows]
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
        """Return the moving averages of both ends, [rows, 2] float64."""
        average = torch.zeros(self._low.numel(), 2, dtype=torch.float64)
        samples = (ends for part in self._ends for ends in part.cpu().double().unbind(1))
        for number, ends in enumerate(samples, 1):
            average += (ends - average) * max(AVERAGING, 1 / number)
        return average

    def _demand_finite(self, low: Tensor, high: Tensor, value: str) -> None:
        if not _finite(low, high):
            remedy = "check the model and the calibration set"
            raise InputError("activations-nonfinite", self._name, value, "a range needs finite values", remedy)

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the distinct values of a row, ascending, float32, and their counts."""
        bins = self._counts[row].nonzero().squeeze(1)
        values = bins.to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
        order = values.argsort()
        return values[order], self._counts[row][bins[order]]


def _stored(
    low: Tensor, high: Tensor, scheme: ActivationScheme | CacheScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scale in `dtype` and the zero point of a range."""
    scale, zero = activation.parameters(low, high, scheme)
    # a scale below the range of half precision would become zero
    return scale.clamp(min=torch.finfo(dtype).tiny, max=torch.finfo(dtype).max).to(dtype), zero


def _least_squares(
    values: Tensor, low: Tensor, high: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme
) -> tuple[Tensor, Tensor]:
    """Find the range of `mse` with all shares at once; `values` are those of the bins, low and high []."""
    low, high = (end.to(torch.bfloat16).double() for end in (low.clamp(max=0), high.clamp(min=0)))
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    shares = torch.arange(_SHARES, _SHARES // 5, -1, dtype=torch.float64, device=values.device) / _SHARES
    lows, highs = (low * shares).float().unsqueeze(1), (high * shares).float().unsqueeze(1)
    error = activation.apply(values, scheme, *activation.parameters(lows, highs, scheme)) - values
    best = (error.double().square_() * counts).sum(dim=1).argmin().reshape(1)  # ties take the first
    return lows.squeeze(1)[best].squeeze(0), highs.squeeze(1)[best].squeeze(0)


def _finite(low: Tensor, high: Tensor) -> bool:
    return bool((torch.isfinite(low) & torch.isfinite(high)).all())


def _reach(values: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[float, float]:
    """Return the ends of one row's grid; see the module."""
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
    """Return the first index up to which the counts reach a share of all."""
    reached = counts.cumsum(0)
    return int(torch.searchsorted(reached, share * float(reached[-1])).clamp(max=counts.numel() - 1))


# bins of the whole range: 16 per code, as TensorRT's 2,048 for 128
_BUCKETS = 4096
# candidate ranges: multiples of so many bins, down to one bin per code
_STEP, _FEWEST = 128, 256
_ROUNDS = 3

Array = NDArray[Any]


def reach(values: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[float, float]:
    """Return the ends of the grid for `entropy`, from ascending values of bfloat16 and their counts."""
    low, high = min(float(values[0]), 0.0), max(float(values[-1]), 0.0)
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    there = values != 0
    edges = np.linspace(low, high, _BUCKETS + 1)
    if not bool(there.any()) or not bool((np.diff(edges) > 0).all()):
        return low, high
    mass = _binned(values[there], counts[there], edges)
    origin = int(np.abs(edges).argmin())

    def cost(ends: tuple[int, int]) -> float:  # ties take the first
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
    """Count bfloat16 values in linear bins, [len(edges) - 1]; each is spread over the interval that rounds to it."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    away, towards = ((bits + step).view(torch.bfloat16).float() for step in (1, -1))
    ends = [((values + torch.where(torch.isfinite(end), end, values)) / 2).numpy() for end in (away, towards)]
    lower, upper = (np.clip(pick(*ends), edges[0], edges[-1]) for pick in (np.minimum, np.maximum))
    total = np.cumsum(counts.numpy(), dtype=np.float64)
    places = np.stack([lower, upper], axis=1).reshape(-1)
    reached = np.stack([total - counts.numpy(), total], axis=1).reshape(-1)
    binned: Array = np.diff(np.interp(edges, places, reached, left=0.0, right=total[-1]))
    binned[0] += np.interp(edges[0], places, reached)  # the whole mass of a value at the end
    return binned


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
