"""The inputs of one shared input as sums: Hessian, mean, range, drift from the original stream, a small sample.

Sums are deterministic: a fixed number of partials, in a fixed order, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quantkit.errors import InputError

# columns of a Hessian that are summed at a time; only the part on and above the diagonal is
_PANEL = 256
# inputs that are kept as they are: so many in all, and of one sequence, evenly spaced
_SAMPLE, _SAMPLE_EACH = 512, 16


class InputStats:
    """The inputs of one shared input, as sums over two halves: every other sequence, so that chunks do not matter.

    Args:
        inputs: chunks [sequences, tokens, K] in order; or [tokens, K], of which every other token counts as a sequence.
        products: whether products of two inputs are summed, without which there is no Hessian; they take the time.

    Attributes:
        low, high: `min x_k` and `max x_k` over all tokens, [K] float32.
    """

    def __init__(self, inputs: Iterable[Tensor] = (), name: str = "", *, products: bool = True) -> None:
        self._name = name
        self._products = products
        self.tokens = 0
        self._squares = torch.zeros(0, dtype=torch.float64)
        self._halves: list[Tensor] = []
        self._drift: Tensor | None = None
        self._lags: dict[str, Tensor] = {}
        self._counts = [0, 0]
        self._sequences = 0
        self._hessian: Tensor | None = None
        self._sum = torch.zeros(0, dtype=torch.float64)
        self.low, self.high = torch.zeros(0), torch.zeros(0)
        self._sample: list[Tensor] = []  # each [n, K]
        for part in inputs:
            self.add(part)

    def add(
        self,
        part: Tensor,
        original: Tensor | None = None,
        lags: Mapping[str, Tensor] | None = None,
        stream: Tensor | None = None,
    ) -> None:
        """Add a chunk [sequences, tokens, K] or [tokens, K].

        Args:
            part: what the linears receive.
            original: what they would in the unquantized model, token by token; what some chunk has not is not known.
            lags: linear -> [..., N], what its output is added to in the original stream less what it is here.
            stream: [..., N], what outputs are added to. The next norm brings it to one size, so an error counts
                relative to it: in products, tokens weigh by the inverse of its mean square.

        Raises:
            InputError: `activations-nonfinite`.
        """
        # sums of half-precision products lose what they are for
        part = part.float()
        width = part.shape[-1]
        flat = part.reshape(-1, width)
        share = None if stream is None else _inverse_size(stream.float()).reshape(*part.shape[:-1], 1)
        weighed = part if share is None else part * share
        panel = width if part.is_cuda else _PANEL
        if not self.tokens:
            self._halves = [part.new_zeros(width, width) for _ in range(2)] if self._products else []
            self._squares = part.new_zeros(width, dtype=torch.float64)
            self._drift = part.new_zeros(width, width) if original is not None else None
            self._sum = torch.zeros_like(self._squares)
            self.low, self.high = part.new_full((width,), math.inf), part.new_full((width,), -math.inf)
        if original is None:
            self._drift = None
        elif self._drift is not None:
            moved = original.float().reshape(part.shape) - part
            moved = moved if share is None else moved * share
            self._drift.addmm_(moved.reshape(-1, width).T, weighed.reshape(-1, width))
        for half, products in enumerate(self._halves):
            piece = weighed[(half + self._sequences) % 2 :: 2].reshape(-1, width)
            for left in range(0, width, panel):
                upper = products[left : left + panel, left:]
                upper.addmm_(piece[:, left : left + panel].T, piece[:, left:])
            self._counts[half] += piece.shape[0]
        for linear, lag in (lags or {}).items():
            behind = lag.float() if share is None else lag.float() * share
            if linear not in self._lags:
                self._lags[linear] = part.new_zeros(lag.shape[-1], width)
            self._lags[linear].addmm_(behind.reshape(-1, lag.shape[-1]).T, weighed.reshape(-1, width))
        self.tokens += part.numel() // width
        self._sequences += part.shape[0]
        self._squares += weighed.reshape(-1, width).square().sum(dim=0).double()
        # a GPU is not waited for: there it is asked once a block (`Stats.doubts`)
        if not part.is_cuda and not bool(self.finite):
            raise nonfinite(self._name, f"{int((~torch.isfinite(part)).sum())} NaN or infinite inputs")
        self._hessian = None
        self._sum += flat.sum(dim=0).double()
        # on a CPU in pieces that a cache holds, and not by torch.aminmax, which takes ten times as long across rows
        for piece in flat.split(len(flat) if part.is_cuda else _PANEL) if flat.shape[0] else ():
            self.low = torch.minimum(self.low, piece.amin(dim=0))
            self.high = torch.maximum(self.high, piece.amax(dim=0))
        left = _SAMPLE - sum(map(len, self._sample))
        if left > 0 and part.numel():
            rows = part.reshape(part.shape[0], -1, width)[:left]
            self._sample.append(rows[:, :: max(1, -(-rows.shape[1] // _SAMPLE_EACH))].reshape(-1, width).clone())

    @property
    def finite(self) -> Tensor:
        """Whether all inputs were finite, [] bool on their device."""
        # a square is finite if its root is, and there are far fewer of them
        return torch.isfinite(self._squares).all()

    @property
    def sample(self) -> Tensor:
        """Some inputs, [at most 512, K] float32: up to 16 of each of the first sequences."""
        return torch.cat(self._sample)[:_SAMPLE]

    @property
    def absmax(self) -> Tensor:
        """`max |x_k|` over all tokens, [K] float32."""
        return torch.maximum(-self.low, self.high).clamp(min=0)

    @property
    def mean(self) -> Tensor:
        """The mean input, [K] float32."""
        return (self._sum / max(self.tokens, 1)).float()

    @property
    def mean_square(self) -> Tensor:
        """The (weighed) mean of `x_k²`, [K] float32: the diagonal of the Hessian."""
        return (self._squares / max(self.tokens, 1)).float()

    @property
    def hessian(self) -> Tensor:
        """`Xᵀ X / tokens`, [K, K] float32; only where products are summed.

        Raises:
            InputError: `calibration-unreached`.
        """
        if self.tokens == 0:  # a part for another kind of input, as the audio layers of a model that reads text too
            raise InputError(
                "calibration-unreached",
                where=self._name,
                value="no token of the calibration text reaches it",
                rule="a layer is calibrated on what it will see",
                remedy="leave it in high precision with an override (weights: null), or calibrate on what reaches it",
            )
        if self._hessian is None:
            upper = (self._halves[0] + self._halves[1]).triu_()
            self._hessian = upper.add_(upper.triu(1).T).div_(self.tokens)
        return self._hessian

    @property
    def drift(self) -> Tensor | None:
        """`ΔᵀX / tokens`, [K, K] float32, with Δ the original inputs less these; None where those are not known."""
        return None if self._drift is None else self._drift / self.tokens

    def lag(self, linear: str) -> Tensor | None:
        """`RᵀX / tokens`, [N, K] float32, with R how far what the linear's output is added to lags behind the original.

        None where the output is added to nothing, or that is not known.
        """
        found = self._lags.get(linear)
        return None if found is None else found / self.tokens

    @property
    def noise(self) -> Tensor:
        """How much of the Hessian beside its diagonal is chance: 0..1, the best share to take off; [] float64.

            λ = sum of the variances of r_ij / sum of r_ij²,   i ≠ j,   estimated as  ¼ ||R₁ - R₂||² / ||R||²

        with R₁, R₂ the correlations in two halves of the tokens and R in all of them. (Schäfer and Strimmer, "A
        Shrinkage Approach to Large-Scale Covariance Matrix Estimation", 2005, for shrinking towards the diagonal.)
        """
        if min(self._counts) == 0:
            return self._squares.new_ones(())
        size = self.hessian.diagonal().clamp(min=0).sqrt()
        size = torch.where(size > 0, size, torch.inf)
        both, apart = self._squares.new_zeros(()), self._squares.new_zeros(())
        panel = size.numel() if size.is_cuda else _PANEL
        for left in range(0, size.numel(), panel):
            rows = slice(left, left + panel)
            scale = size[rows].unsqueeze(1) * size[left:]
            first, second = (
                (half[rows, left:] / count / scale).triu_(1)
                for half, count in zip(self._halves, self._counts, strict=True)
            )
            apart += (first - second).square().sum()
            both += (self.hessian[rows, left:] / scale).triu_(1).square().sum()
        return torch.where(both > 0, (apart / 4 / both).clamp(max=1.0), 1.0)


def nonfinite(name: str, value: str) -> InputError:
    """The error for a linear whose inputs are not finite."""
    return InputError(
        "activations-nonfinite",
        where=name,
        value=value,
        rule="calibration needs finite activations",
        remedy="check the model with another text, or leave this layer in high precision",
    )


def _inverse_size(stream: Tensor) -> Tensor:
    """One over the root mean square of each token, [..., 1]; 0 where it is 0, since nothing is relative to that."""
    size = stream.square().mean(dim=-1, keepdim=True).sqrt()
    return torch.where(size > 0, size.reciprocal(), 0.0)
