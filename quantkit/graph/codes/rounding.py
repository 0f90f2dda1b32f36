"""Learned rounding of one product: gradient descent on its codes and scales, with its activation in the loss.

The quantizer and the update step are those for language models (`passes/solvers/round.py`, SignRound; AdaRound: Nagel
et al. 2020, arXiv 2004.10568). x is the product's input in the float graph, x̂ its input behind quantized products,
both as patches. f is the Relu or Clip that follows. The loss is

    L = mean of (f(Ŵ (x̂ - E[x̂]) + W E[x] + b) - f(W x + b))²

The means are subtracted because bias correction restores the mean of the output for any Ŵ. Output channels are
independent: each one keeps the state with the least loss on held-out samples, which may be the initial state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from quantkit.graph.fuse.activation_bounds import CLIPS, bounds
from quantkit.passes.round import Round
from quantkit.passes.solvers.round import LearnedRounding
from quantkit.passes.solvers.unsaturated import LIMIT

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor
    from quantkit.graph.sites import Site

# limits of what is kept: numbers over all samples, and rows of one sample
_NUMBERS, _ROWS = 1 << 24, 256


@dataclass
class CalibrationRows:
    """A few calibration rows of each sample, as tensors [groups, rows, K].

    Args:
        quantized: inputs x̂ behind quantized products.
        original: inputs x in the float graph.
    """

    quantized: list[Tensor]
    original: list[Tensor]

    def add(self, quantized: Tensor, original: Tensor, *, samples: int, total: int) -> None:
        """Keep evenly spaced rows of each sample of x̂ and x [groups, rows, K].

        Args:
            quantized: x̂ of this batch, sample after sample.
            original: x of this batch.
            samples: number of samples in this batch.
            total: number of samples in all batches.
        """
        groups, rows, width = quantized.shape
        samples = samples if rows % samples == 0 else 1  # else the rows count as one sample
        length = rows // samples
        most = max(1, min(_ROWS, length, _NUMBERS // (2 * groups * width * total)))
        places = torch.linspace(0, length - 1, most).round().long()
        for kept, batch in ((self.quantized, quantized), (self.original, original)):
            apart = batch.reshape(groups, samples, length, width)[:, :, places]
            kept += [part.clone() for part in apart.unbind(1)]


def limits(site: Site) -> tuple[float, float]:
    """Return the interval outside of which the activation behind a product clips its output."""
    low, high = -math.inf, math.inf
    value = site.node.outputs[0]
    while not value.is_graph_output() and len(readers := {reader for reader, _ in value.uses()}) == 1:
        node = readers.pop()
        ends = bounds(node) if node.op_type in CLIPS else None
        if ends is None:
            break
        low, high = max(low, ends[0]), min(high, ends[1])
        value = node.outputs[0]
    return low, high


def learned(
    site: Site,
    start: QuantTensor,
    rows: CalibrationRows,
    means: tuple[Tensor, Tensor],
    bias: Tensor | None,
    settings: Round.Settings,
    generator: Generator,
    neighbours: Tensor | None = None,
) -> tuple[QuantTensor, int]:
    """Return codes [N, K] with a smaller loss, and the number of channels that changed.

    Args:
        site: the product.
        start: initial codes and scales.
        rows: calibration rows of at least two samples.
        means: E[x̂] and E[x], [groups, K].
        bias: b, [N], or None. Means are not subtracted for a MatMul, which cannot have a bias.
        settings: settings of the `round` pass.
        generator: source of randomness for the order of samples.
        neighbours: partner column [K] of each column, for bounded codes (`passes.solvers.unsaturated`). A state that
            breaks the bound is rejected.
    """
    samples = len(rows.quantized)
    held = min(max(1, round(settings.held_out * samples)), samples - 1)
    weight = torch.from_numpy(site.matrix().copy())
    objective = _Objective(site, weight, rows, means, bias)
    learner = LearnedRounding(weight, start)
    seen, unseen = range(samples - held), range(samples - held, samples)

    def measured() -> Tensor:
        errors = objective.errors(learner.values(), unseen)
        return errors if start.scheme.rows_apart else errors.sum().expand_as(errors)

    first = measured()
    least, codes, scale = first, start.codes, start.scale
    every = max(1, settings.iterations // settings.checks)
    waiting: list[int] = []
    for number in range(settings.iterations):
        if len(waiting) < settings.batch:
            waiting += torch.randperm(len(seen), generator=generator).tolist()
        now, waiting = waiting[: settings.batch], waiting[settings.batch :]
        left = 1 - number / settings.iterations
        learner.step(objective.gradient(learner.values(), now), settings.rate * left, settings.scale_rate * left)
        if (number + 1) % every == 0 or number + 1 == settings.iterations:
            loss, tensor = measured(), learner.tensor()
            loss = torch.where(_within(tensor.codes, neighbours), loss, torch.inf)
            wins = (loss < least).unsqueeze(1)
            least = torch.minimum(least, loss)
            codes = torch.where(wins, tensor.codes, codes)
            scale = torch.where(wins if start.scheme.rows_apart else wins[:1], tensor.scale, scale)
    return start.replace(codes=codes, scale=scale), int((least < first).sum())


def _within(codes: Tensor, neighbours: Tensor | None) -> Tensor:
    """Tell for each channel [N] whether the sums of neighbouring codes stay within the limit."""
    if neighbours is None:
        return torch.ones(codes.shape[0], dtype=torch.bool)
    signed = codes.int()
    alone = neighbours == torch.arange(len(neighbours))
    beside = torch.where(alone, 0, signed[:, neighbours])
    above, below = signed.clamp(min=0) + beside.clamp(min=0), signed.clamp(max=0) + beside.clamp(max=0)
    return ((above <= LIMIT) & (below >= -LIMIT)).all(dim=1)


class _Objective:
    """Squared error of a product's output behind its activation."""

    def __init__(
        self, site: Site, weight: Tensor, rows: CalibrationRows, means: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> None:
        self._groups, self._limits = site.group, limits(site)
        offset = torch.zeros(weight.shape[0]) if bias is None else bias
        self._wanted = [self._behind(self._product(weight, x) + offset) for x in rows.original]
        centre = torch.zeros_like(means[0].float())
        if site.node.op_type != "MatMul":
            centre = means[0].float()
            offset = offset + self._product(weight, means[1].float().unsqueeze(1)).squeeze(0)
        self._inputs, self._offset = [x - centre.unsqueeze(1) for x in rows.quantized], offset

    def errors(self, values: Tensor, samples: range) -> Tensor:
        """Return the mean squared error of each channel, [N]."""
        parts = [self._difference(values, sample)[0].square().mean(dim=0) for sample in samples]
        return torch.stack(parts).mean(dim=0)

    def gradient(self, values: Tensor, samples: list[int]) -> Tensor:
        """Return the gradient by `values` [N, K], up to a factor."""
        total = torch.zeros_like(values)
        for sample in samples:
            difference, through = self._difference(values, sample)
            apart = (difference * through).reshape(len(difference), self._groups, -1)
            total += (apart.permute(1, 2, 0) @ self._inputs[sample]).reshape(values.shape)
        return total

    def _difference(self, values: Tensor, sample: int) -> tuple[Tensor, Tensor]:
        """Return the difference [rows, N], and 1 where the activation passes a change, else 0."""
        output = self._product(values, self._inputs[sample]) + self._offset
        through = (output > self._limits[0]) & (output < self._limits[1])
        return self._behind(output) - self._wanted[sample], through.float()

    def _behind(self, output: Tensor) -> Tensor:
        return output.clamp(*self._limits)

    def _product(self, values: Tensor, x: Tensor) -> Tensor:
        """Multiply values [N, K] by inputs [groups, rows, K]; return [rows, N]."""
        apart = values.reshape(self._groups, -1, values.shape[1])
        return (x @ apart.transpose(1, 2)).permute(1, 0, 2).reshape(x.shape[1], -1)
