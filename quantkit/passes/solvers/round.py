"""Learned rounding: gradient descent on codes and scales for the error of the block's output.

A code is chosen from its weight's position on the grid plus a learned offset; a scale is the initial one times a
learned factor:

    s = stored(s0 · ρ)        x = w / s + t        c = clip(round(x + v), low - zero, high - zero)        w^ = c · s

`t` reproduces the initial codes at v = 0, ρ = 1: zero if they are the nearest ones, else the least shift that moves the
weight into the cell that another pass chose. With G the gradient of the loss with respect to w^, and the
straight-through estimator for rounding:

    dL/dv = G · s                                   where nothing was clipped, else 0
    dL/dρ = sum over the group of  G · s0 · (c - w / s · [not clipped])

Both follow the sign of the gradient, in steps that fall linearly to zero (Cheng et al., "Optimize Weight Rounding
via Signed Gradient Descent for the Quantization of LLMs", 2023, arXiv 2309.05516, there called SignRound; the offset is
that of Nagel et al., "Up or Down? Adaptive Rounding", 2020, arXiv 2004.10568). So the quantizer needs no autograd: only
the block does. The zero points stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import QuantTensor
from quantkit.passes.solvers import ranges

# distance from the cell's edge for a weight that another pass moved over it
_INSIDE = 1e-3
# largest change of a scale from the initial one
_NARROWEST, _WIDEST = 0.8, 1.2


class LearnedRounding:
    """Learned offsets [N, K] and factors [N, G] of one weight; `step` changes both.

    Args:
        weight: [N, K], weight to be quantized.
        start: initial codes, scales and zero points, of an integer format (else InputError `format-not-integer`).
    """

    def __init__(self, weight: Tensor, start: QuantTensor) -> None:
        self._form = ranges.integer_format(start.scheme)
        self._start = start
        self._weight = self._grouped(weight.float())
        self._scale = start.scale.float().unsqueeze(2)
        zero = weight.new_zeros(()).float() if start.zero is None else start.zero.float().unsqueeze(2)
        self._low, self._high = self._form.low - zero, self._form.high - zero
        initial = self._grouped(start.codes.float()) - zero
        place = self._weight / self._scale
        inside = place.clamp(initial - 0.5 + _INSIDE, initial + 0.5 - _INSIDE)
        # at the end of the grid, a weight may lie beyond its cell
        nearest = place.round().clamp(self._low, self._high) == initial
        self._shift = torch.where(nearest, 0.0, inside - place)
        self.offset = torch.zeros_like(self._weight)
        self.factor = torch.ones_like(self._scale)

    def values(self) -> Tensor:
        """Return the values of the present codes, [N, K] float32."""
        scale = self._stored().float()
        return (self._codes(scale)[0] * scale).reshape(self._start.shape)

    def tensor(self) -> QuantTensor:
        """Return the present codes and scales."""
        scale = self._stored()
        codes = self._codes(scale.float())[0]
        if self._start.zero is not None:
            codes = codes + self._start.zero.float().unsqueeze(2)
        return self._start.replace(codes=codes.reshape(self._start.shape).to(torch.int8), scale=scale.squeeze(2))

    def step(self, gradient: Tensor, rate: float, scale_rate: float) -> None:
        """Move against the sign of the loss's gradient with respect to `values()` [N, K].

        Args:
            rate: step of an offset, in cells.
            scale_rate: step of a factor.
        """
        scale = self._stored().float()
        codes, free = self._codes(scale)
        slope = self._grouped(gradient.float())
        if scale_rate:
            along = (codes - self._weight / scale * free).mul_(slope).sum(dim=2, keepdim=True)
            if self.factor.numel() == 1:
                along = along.sum().reshape(1, 1, 1)
            self.factor.sub_(along.sign_(), alpha=scale_rate).clamp_(_NARROWEST, _WIDEST)
        if rate:
            self.offset.sub_(slope.sign().mul_(free), alpha=rate).clamp_(-0.5, 0.5)

    def _grouped(self, matrix: Tensor) -> Tensor:
        """[N, K] -> [N, G, K / G]; per tensor one group a row."""
        rows, columns = self._start.shape
        return matrix.reshape(rows, self._start.scale.shape[1], columns // self._start.scale.shape[1])

    def _stored(self) -> Tensor:
        return self._form.stored(self._scale * self.factor, self._start.scheme)

    def _codes(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes minus zero [N, G, L], and 1 where a weight was not clipped."""
        wanted = (self._weight / scale).add_(self._shift).add_(self.offset).round_()
        codes = wanted.clamp(self._low, self._high)
        return codes, (codes == wanted).float()
