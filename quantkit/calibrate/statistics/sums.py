"""Sums over one shared input: Hessian, mean, range, drift from the original stream, a small sample.

Sums are deterministic: a fixed number of partial sums, in a fixed order, for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.model.device import one_thread, spread

# rows and columns of a Hessian summed at a time, of which only the upper triangle is
_PANEL, _WIDE = 192, 1024
# rows and elements that a cache holds
_ROWS, _CACHED = 1024, 1 << 19
# inputs in the sample: in all, and of one sequence, evenly spaced
_SAMPLE, _SAMPLE_EACH = 512, 16


# kinds of sums beside the lags, each [rows, K]; those of products have their upper panels alone
_PRODUCTS = ("products.0", "products.1")
DRIFT, LAG = "drift", "lag."
# those of eight bytes first, where they are aligned in a message
SUMS = ("sums", *_PRODUCTS, DRIFT, "low", "high")
DTYPES = {"sums": torch.float64}


@dataclass
class Sums:
    """Sums over some sequences, to be added to those over others.

    Args:
        values: kind -> sum, [rows, K].
        counts: tokens, sequences, and the tokens of either half.
        columns: K.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = (0, 0, 0, 0)
    columns: int = 0

    def rows(self, kinds: Iterable[str]) -> list[int]:
        """Count the rows of each kind, 0 for one that is not there."""
        return [self.values[kind].shape[0] if kind in self.values else 0 for kind in kinds]

    def counting(self, counts: Sequence[int]) -> Sums:
        """Add the counts of other sequences."""
        self.counts = tuple(mine + theirs for mine, theirs in zip(self.counts, counts, strict=True))
        return self


def panels(kind: str, value: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a sum that hold values, some rows at a time."""
    for first in range(0, value.shape[0], _PANEL):
        yield value[first : first + _PANEL, first if kind in _PRODUCTS else 0 :]


def add(kind: str, value: Tensor, other: Tensor) -> None:
    """Add a sum over other sequences to one, in place."""
    if kind in ("low", "high"):
        (torch.minimum if kind == "low" else torch.maximum)(value, other, out=value)
    else:
        value.add_(other)


class InputStats:
    """Inputs of one shared input, as sums over two halves: every other sequence, so that chunks do not matter.

    On a device the last chunk is summed on demand, and unused sums are not launched.

    Args:
        inputs: chunks [sequences, tokens, K] in order; or [tokens, K], with every token as a sequence.
        name: name of the shared input, for errors.
        products: True to sum products of two inputs, which a Hessian needs; they take most of the time.
        noise: True to sum them in halves, which `noise` needs.
        moments: True for means and ranges of inputs, which a Hessian does without; always so on a device, and without
            products.
        part: number of the part that all sequences belong to (`parts.py`), whose half is that of its number; sums are
            then the same on all devices.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        name: str = "",
        *,
        products: bool = True,
        noise: bool = True,
        moments: bool = True,
        part: int | None = None,
    ) -> None:
        self.name, self._part = name, part
        self._products, self._moments = products, moments or not products
        self._in_halves = noise
        self.tokens = 0
        self._waiting: dict[str, Callable[[], None]] = {}  # pending sums of the last chunk, on a device
        self._halves: Sequence[Tensor | None] | Tensor = ()  # on a device one tensor, [2, K, K], both triangles
        self._drift: Tensor | None = None
        self._lags: dict[str, Tensor] = {}
        self._counts = [0, 0]
        self._sequences = 0
        self._hessian: Tensor | None = None
        self._sums = torch.zeros(2, 0, dtype=torch.float64)  # sums of inputs, and of their squares
        self._ends = torch.zeros(2, 0)
        self._sample: list[Tensor] = []  # each [n, K]
        for some in inputs:
            self.add(some)

    def add(
        self,
        part: Tensor,
        original: Tensor | None = None,
        lags: Mapping[str, Tensor] | None = None,
        stream: Tensor | None = None,
    ) -> None:
        """Add a chunk [sequences, tokens, K] or [tokens, K] of inputs of the linears.

        Args:
            part: the chunk.
            original: the same inputs in the unquantized model, token by token; drift is unknown unless all chunks have
                them.
            lags: linear -> [..., N], difference between the original stream and this one in the tensor to which its
                output is added, and in that output.
            stream: [..., N], the tensor to which outputs are added. The next norm scales it to one size, so errors
                count relative to it: in products, tokens are weighted by the inverse of its mean square.

        Raises:
            InputError: `activations-nonfinite`.
        """
        self._sum(*self._waiting)
        # sums of half-precision products would be too inaccurate
        part = part.float()
        width = part.shape[-1]
        flat = part.reshape(-1, width)
        share = None if stream is None else _inverse_size(stream.float()).reshape(*part.shape[:-1], 1)
        weighed = part if share is None else part * share
        if original is None:
            self._drift = None
        elif self._drift is not None or not self.tokens:
            moved = original.float().reshape(part.shape) - part
            moved = moved if share is None else moved * share
            self._drift = self._added(self._drift, moved.reshape(-1, width), weighed.reshape(-1, width), self.tokens)
        known = self._lags if self.tokens else lags or {}
        self._lags = {linear: total for linear, total in self._lags.items() if linear in (lags or {})}
        for linear, lag in (lags or {}).items():
            if linear not in known:  # unknown for an earlier chunk
                continue
            behind = lag.float() if share is None else lag.float() * share
            flat_lag = behind.reshape(-1, lag.shape[-1])
            self._lags[linear] = self._added(self._lags.get(linear), flat_lag, weighed.reshape(-1, width), self.tokens)
        if self._moments or on_device(part):
            self._waiting["moments"] = partial(self._add_moments, flat, weighed.reshape(-1, width), share)
        self._waiting["sample"] = partial(self._add_sample, part)
        if self._products:
            one = self._in_halves or not self._waits(part)
            self._waiting["products"] = partial(
                self._add_products if one else self._add_all_products, weighed, self._sequences
            )
        self.tokens += part.numel() // width
        self._sequences += part.shape[0]
        if self._waits(part):
            return
        self._sum("products", "moments", "sample")
        if not bool(torch.isfinite(self.squares).all()):
            raise nonfinite(self.name, f"{int((~torch.isfinite(flat)).sum())} NaN or infinite inputs")

    def _sum(self, *which: str) -> None:
        """Compute pending sums."""
        for kind in which:
            self._waiting.pop(kind, lambda: None)()

    def _sum_moments(self) -> None:
        self._sum("moments")
        assert self._sums.shape[1] or not self.tokens, "a pass that asks for ranges or means collects moments"

    def _add_sample(self, part: Tensor) -> None:
        left = _SAMPLE - sum(map(len, self._sample))
        if left > 0 and part.numel():
            rows = part.reshape(part.shape[0], -1, part.shape[-1])[:left]
            some = rows[:, :: max(1, -(-rows.shape[1] // _SAMPLE_EACH))]
            self._sample.append(some.clone(memory_format=torch.contiguous_format).reshape(-1, part.shape[-1]))

    def _add_all_products(self, weighed: Tensor, _: int) -> None:
        """Add products to their mean, in one launch."""
        flat = weighed.reshape(-1, weighed.shape[-1])
        self._hessian = self._added(self._hessian, flat, flat, self._counts[0])
        self._counts[0] += len(flat)

    def _add_products(self, weighed: Tensor, begun: int) -> None:
        """Add products to the half of each sequence; on a device to both at once, if they have equal lengths."""
        self._hessian = None
        width, sequences, at_once = weighed.shape[-1], weighed.shape[0], self._waits(weighed)
        if at_once and begun % 2 == sequences % 2 == 0:
            half = sequences // 2 * weighed.shape[1:-1].numel()
            pairs = weighed.reshape(sequences // 2, 2, -1, width) if half else weighed.new_empty(0, 2, 0, width)
            pairs = pairs.transpose(0, 1).reshape(2, half, width)
            if isinstance(self._halves, Tensor):
                self._halves.baddbmm_(pairs.mT, pairs)
            else:
                self._halves = torch.bmm(pairs.mT, pairs)
            self._counts = [count + half for count in self._counts]
            return
        if not len(self._halves) and self._part is not None:
            self._halves = [weighed.new_zeros(width, width) if half == self._part % 2 else None for half in range(2)]
        elif not len(self._halves):
            count = 0 if at_once else 1 + self._in_halves
            apiece = [weighed.new_zeros(width, width) for _ in range(count)]  # each is freed alone
            self._halves = apiece or weighed.new_zeros(2, width, width)
        for half, products in enumerate(self._halves):
            if products is None:
                continue
            every = self._part is not None or not self._in_halves
            piece = (weighed if every else weighed[(half + begun) % 2 :: 2]).reshape(-1, width)
            if at_once:
                products.addmm_(piece.T, piece)
            else:
                _accumulate(products, piece, piece, upper=True)
            self._counts[half] += piece.shape[0]

    def _add_moments(self, flat: Tensor, weighed: Tensor, share: Tensor | None) -> None:
        """Add sums, sums of squares and ranges of inputs [T, K]."""
        if self._waits(flat):
            from quantkit.kernels.solving.statistics import moments_joined, moments_of_parts

            before = (self._sums, self._ends) if self._sums.shape[1] else (None, None)
            parts = moments_of_parts(flat.contiguous(), None if share is None else share.reshape(-1))
            self._sums, self._ends = moments_joined(parts, *before)
            return
        if not self._sums.shape[1]:
            self._sums = flat.new_zeros(2, flat.shape[1], dtype=torch.float64)
            self._ends = flat.new_tensor([math.inf, -math.inf])[:, None].repeat(1, flat.shape[1])
        total, squares = self._sums
        low, high = self._ends

        def summed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            piece, weighty = pair
            return weighty.square().sum(dim=0), piece.sum(dim=0), piece.amin(dim=0), piece.amax(dim=0)

        # in pieces that fit the cache; torch.aminmax takes ten times as long across rows
        pieces = zip(flat.split(_ROWS), weighed.split(_ROWS), strict=True) if flat.shape[0] else ()
        with one_thread(flat) as threads:
            partial_sums = spread(summed, pieces, threads)
        for squared, added, least, most in partial_sums:
            squares += squared
            total += added
            torch.minimum(low, least, out=low)
            torch.maximum(high, most, out=high)

    def sums(self) -> Sums:
        """Return the sums of a part, to be added to those of other parts; not to be used afterwards."""
        values = {kind: half for kind, half in zip(_PRODUCTS, self._halves, strict=False) if half is not None}
        values |= {} if self._drift is None else {DRIFT: self._drift}
        values |= {"sums": self._sums, "low": self._ends[:1], "high": self._ends[1:]} if self._sums.shape[1] else {}
        values |= {LAG + linear: lag for linear, lag in self._lags.items()}
        counts = (self.tokens, self._sequences, *self._counts)
        columns = max((value.shape[1] for value in values.values()), default=0)
        return Sums(values, counts, columns)

    @classmethod
    def of_sums(cls, sums: Sums, name: str) -> InputStats:
        """Make the statistics of a shared input from the sums of all parts."""
        values = sums.values
        seen = cls(name=name, moments="sums" in values, part=0)
        seen.tokens, seen._sequences, *seen._counts = sums.counts
        seen._halves = [values.get(kind) for kind in _PRODUCTS]
        seen._drift = values.get(DRIFT)
        if seen._moments:
            seen._sums, seen._ends = values["sums"], torch.cat([values["low"], values["high"]])
        seen._lags = {kind.removeprefix(LAG): lag for kind, lag in values.items() if kind.startswith(LAG)}
        return seen

    def _waits(self, tensor: Tensor) -> bool:
        """Tell whether sums of these values are launched on a device, and waited for later."""
        return on_device(tensor) and self._part is None

    def _added(self, total: Tensor | None, left: Tensor, right: Tensor, before: int) -> Tensor:
        """Add products [N, K] of tokens' values [T, N] and [T, K] to earlier ones.

        On a device the result is their mean, given the number of tokens `before`, so that one launch suffices.
        """
        first = total is None
        if total is None:
            total = right.new_empty(left.shape[1], right.shape[1])
        if not self._waits(right):
            return _accumulate(total.zero_() if first else total, left, right)
        tokens = max(before + len(right), 1)
        return total.addmm_(left.T, right, beta=0 if first else before / tokens, alpha=1 / tokens)

    @property
    def low(self) -> Tensor:
        """Smallest input, `min x_k` over all tokens, [K] float32; as `high` and `mean` it needs moments."""
        self._sum_moments()
        return self._ends[0]

    @property
    def high(self) -> Tensor:
        """Largest input, `max x_k` over all tokens, [K] float32."""
        self._sum_moments()
        return self._ends[1]

    @property
    def squares(self) -> Tensor:
        """Sum of `x_k²`, weighted, [K] float64; finite if all inputs were."""
        self._sum("moments")
        if self._sums.shape[1] or not self.tokens:
            return self._sums[1]
        assert len(self._halves), "squares without moments are those of products, which are taken"
        return torch.stack([half.diagonal() for half in self._halves if half is not None]).double().sum(dim=0)

    @property
    def checked(self) -> Tensor:
        """Values [K], some of them non-finite if any input was: those with the fewest launches."""
        if self._products and "moments" in self._waiting:
            return self.hessian.diagonal()
        return self.squares

    @property
    def sample(self) -> Tensor:
        """Sample of inputs, [at most 512, K] float32: up to 16 of each of the first sequences."""
        self._sum("sample")
        return torch.cat(self._sample)[:_SAMPLE]

    @property
    def absmax(self) -> Tensor:
        """Largest magnitude, `max |x_k|` over all tokens, [K] float32."""
        return torch.maximum(-self.low, self.high).clamp(min=0)

    @property
    def mean(self) -> Tensor:
        """Mean input, [K] float32."""
        self._sum_moments()
        return (self._sums[0] / max(self.tokens, 1)).float()

    @property
    def mean_square(self) -> Tensor:
        """Mean of `x_k²`, weighted, [K] float32: the diagonal of the Hessian."""
        return (self.squares / max(self.tokens, 1)).float()

    @property
    def hessian(self) -> Tensor:
        """Hessian `Xᵀ X / tokens`, [K, K] float32; needs products.

        Raises:
            InputError: `calibration-unreached`.
        """
        if self.tokens == 0:  # a part for another kind of input, such as the audio layers of a multimodal model
            value, rule = "no token of the calibration text reaches it", "a layer needs calibration inputs"
            remedy = "leave it in high precision with an override (weights: null), or use another calibration set"
            raise InputError("calibration-unreached", self.name, value, rule, remedy)
        self._sum("products")
        if self._hessian is None:
            if isinstance(self._halves, Tensor):
                self._hessian = self._halves.sum(dim=0).div_(self.tokens)
            else:
                summed = [half for half in self._halves if half is not None]
                upper = summed[0] + summed[1] if len(summed) > 1 else summed[0].clone()
                self._hessian = _mirrored(upper).div_(self.tokens)
        return self._hessian

    def taken(self) -> Tensor:
        """Return the Hessian and let go of it and of its halves, which no property that needs products outlives.

        On a CPU it takes the place of one of them.
        """
        self._sum("products")
        if self._hessian is None and not isinstance(self._halves, Tensor) and self.tokens:
            first, *others = [half for half in self._halves if half is not None]
            self._halves = ()
            return _mirrored(first.add_(others[0]) if others else first).div_(self.tokens)
        whole = self.hessian
        if not self._waits(whole):
            self._halves, self._hessian = (), None
        return whole

    @property
    def halves(self) -> tuple[Tensor, ...]:
        """Hessian of every other sequence and of the rest, [K, K] float32 each; a single one for one sequence."""
        assert self._in_halves, "a pass that asks for halves collects statistics with noise"
        if isinstance(self._halves, Tensor):
            whole = list(self._halves)
        else:
            whole = [half if half is None else half.triu() + half.triu(1).T for half in self._halves]
        return tuple(half / count for half, count in zip(whole, self._counts, strict=True) if count)

    @property
    def drift(self) -> Tensor | None:
        """Drift `ΔᵀX / tokens`, [K, K] float32, with Δ the original inputs less these; None if unknown, or if the lags
        of all linears hold its effect.
        """
        total = self._drift
        return total if total is None or self._waits(total) else total / self.tokens

    def taken_drift(self) -> Tensor | None:
        """Return the drift and let go of it; on a CPU it takes the place of its sum."""
        total, self._drift = self._drift, None
        return total if total is None or self._waits(total) else total.div_(self.tokens)

    def taken_lag(self, linear: str) -> Tensor | None:
        """Return the lag `RᵀX / tokens`, [N, K] float32, and let go of it.

        R is the original stream less this one, after a linear's output was added. None for a linear whose output is
        added to nothing, or if unknown.
        """
        total = self._lags.pop(linear, None)
        return total if total is None or self._waits(total) else total.div_(self.tokens)

    @property
    def noise(self) -> Tensor:
        """Noise of the Hessian outside of its diagonal: 0..1, the best share to shrink; [] float64.

            λ = sum of the variances of r_ij / sum of r_ij²,   i ≠ j,   estimated as  ¼ ||R₁ - R₂||² / ||R||²

        with R₁, R₂ the correlations in two halves of the tokens and R in all of them. (Schäfer and Strimmer, "A
        Shrinkage
        Approach to Large-Scale Covariance Matrix Estimation", 2005, for shrinking towards the diagonal.)
        """
        self._sum("products")
        assert self._in_halves, "a pass that asks for noise collects statistics with it"
        if min(self._counts) == 0:
            return self.squares.new_ones(())
        if isinstance(self._halves, Tensor):
            from quantkit.kernels.solving.statistics import chance, quotient

            share: Tensor = quotient(chance(self._halves, self._counts, self.tokens), True)
            return share
        first, second = self._halves
        assert first is not None and second is not None
        square = (first.diagonal() + second.diagonal()) / self.tokens
        inverse = torch.where(square > torch.finfo(square.dtype).tiny, square.rsqrt(), 0.0)

        def panel(left: int) -> list[Tensor]:
            rows = slice(left, left + step)
            one, other = first[rows, left:], second[rows, left:]
            apart, both = (one / self._counts[0]).sub_(other, alpha=1 / self._counts[1]), one + other
            for part in (apart, both):
                part[:, :step].triu_(1)
                part.mul_(inverse[left:]).mul_(inverse[rows, None]).square_()
            return [part.sum(dim=1).sum() for part in (apart, both)]

        step = max(32, min(_PANEL, _CACHED // len(first)))
        with one_thread(first) as threads:
            pairs = spread(panel, range(0, len(first), step), threads)
        apart, both = (torch.stack(sums).double().sum() for sums in zip(*pairs, strict=True))
        return torch.where(both > 0, (apart * self.tokens**2 / 4 / both).clamp(max=1.0), 1.0)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, *, upper: bool = False) -> Tensor:
    """Add products [N, K] of tokens' values [T, N] and [T, K], a tile a thread; `upper`: the upper panels alone."""
    height = _PANEL if upper else max(32, min(_PANEL, len(total) // 4))
    if on_device(total):
        height, width = _PANEL if upper else len(total), total.shape[1]
    else:
        width = _WIDE
    starts = range(0, len(total), height)
    tiles = [(row, column) for row in starts for column in range(row if upper else 0, total.shape[1], width)]

    def tile(start: tuple[int, int]) -> None:
        rows, columns = (slice(first, first + size) for first, size in zip(start, (height, width), strict=True))
        total[rows, columns].addmm_(left[:, rows].T, right[:, columns])

    with one_thread(total) as threads:
        spread(tile, tiles, threads)
    return total


def _mirrored(upper: Tensor) -> Tensor:
    """Copy the upper triangle of [K, K] to the lower one, in place."""

    def panel(left: int) -> None:
        rows, after = slice(left, left + _PANEL), slice(left + _PANEL, None)
        corner = upper[rows, rows].triu()
        upper[rows, rows] = corner.add_(corner.triu(1).T)
        upper[after, rows] = upper[rows, after].T

    with one_thread(upper) as threads:
        spread(panel, range(0, len(upper), _PANEL), threads)
    return upper


def on_device(tensor: Tensor) -> bool:
    """Tell whether sums are asynchronous launches on a device."""
    return tensor.is_cuda


def nonfinite(name: str, value: str) -> InputError:
    """Make the error for a linear with non-finite inputs."""
    rule = "calibration needs finite activations"
    remedy = "check the model with another text, or leave this layer in high precision"
    return InputError("activations-nonfinite", name, value, rule, remedy)


def _inverse_size(stream: Tensor) -> Tensor:
    """Return one over the root mean square of each token, [..., 1]; 0 for a token of zeros."""
    if on_device(stream):
        from quantkit.kernels.solving.statistics import inverse_sizes

        sizes: Tensor = inverse_sizes(stream.reshape(-1, stream.shape[-1]))
        return sizes.reshape(*stream.shape[:-1], 1)
    size = stream.square().mean(dim=-1, keepdim=True).sqrt()
    return torch.where(size > 0, size.reciprocal(), 0.0)
