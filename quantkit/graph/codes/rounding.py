"""Learned rounding of one product: its codes and scales move down the gradient of what follows its activation.

The quantizer and its step are those of language models (`passes/solvers/round.py`, SignRound; AdaRound: Nagel et al.
2020, arXiv 2004.10568). With x what the product sees in the float graph, x̂ what it sees behind quantized ones, both
patch by patch, and f the Relu or Clip behind it,

    L = mean of (f(Ŵ (x̂ - E[x̂]) + W E[x] + b) - f(W x + b))²

so that the bias gives back the mean whatever Ŵ is, as it will. One output channel's codes are no other's matter: each
channel keeps the state that does best on samples which nothing is learned from, and that may be the first.
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

# numbers kept of all samples, and rows of one of them, at most
_NUMBERS, _EACH = 1 << 24, 256


@dataclass
class CalibrationRows:
    """Rows of calibration, a few of each sample: x̂ and x, [groups, rows, K] a sample."""

    found: list[Tensor]
    wanted: list[Tensor]

    def add(self, found: Tensor, wanted: Tensor, *, samples: int, total: int) -> None:
        """Take some rows of x̂ and x [groups, rows, K], in which samples stand one behind the other, of `total` samples
        in all.
        """
        groups, rows, width = found.shape
        samples = samples if rows % samples == 0 else 1  # rows of all of them in one
        each = rows // samples
        most = max(1, min(_EACH, each, _NUMBERS // (2 * groups * width * total)))
        places = torch.linspace(0, each - 1, most).round().long()
        for kept, given in ((self.found, found), (self.wanted, wanted)):
            apart = given.reshape(groups, samples, each, width)[:, :, places]
            kept += [part.clone() for part in apart.unbind(1)]


def limits(site: Site) -> tuple[float, float]:
    """Between which values the activation that alone reads a product lets it through."""
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
    """Better codes [N, K], and of how many channels they are not those of the start.

    Args:
        rows: of two samples at least.
        means: E[x̂] and E[x], [groups, K].
        bias: b, [N]; the product has no mean to give back where it is none and cannot have one (MatMul).
        generator: which samples a step is of.
        neighbours: [K], of codes that are bounded (`passes.solvers.unsaturated`): what breaks the bound is not taken.
    """
    samples = len(rows.found)
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
    """[N]: whether no two neighbours of a channel are too large together."""
    if neighbours is None:
        return torch.ones(codes.shape[0], dtype=torch.bool)
    signed = codes.int()
    alone = neighbours == torch.arange(len(neighbours))
    beside = torch.where(alone, 0, signed[:, neighbours])
    above, below = signed.clamp(min=0) + beside.clamp(min=0), signed.clamp(max=0) + beside.clamp(max=0)
    return ((above <= LIMIT) & (below >= -LIMIT)).all(dim=1)


class _Objective:
    """What a product's output is off by, behind its activation."""

    def __init__(
        self, site: Site, weight: Tensor, rows: CalibrationRows, means: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> None:
        self._groups, self._limits = site.group, limits(site)
        offset = torch.zeros(weight.shape[0]) if bias is None else bias
        self._wanted = [self._behind(self._product(weight, x) + offset) for x in rows.wanted]
        centre = torch.zeros_like(means[0].float())
        if site.node.op_type != "MatMul":
            centre = means[0].float()
            offset = offset + self._product(weight, means[1].float().unsqueeze(1)).squeeze(0)
        self._found, self._offset = [x - centre.unsqueeze(1) for x in rows.found], offset

    def errors(self, values: Tensor, samples: range) -> Tensor:
        """Of each channel the mean square, [N]."""
        parts = [self._difference(values, sample)[0].square().mean(dim=0) for sample in samples]
        return torch.stack(parts).mean(dim=0)

    def gradient(self, values: Tensor, samples: list[int]) -> Tensor:
        """By `values` [N, K], up to a factor."""
        total = torch.zeros_like(values)
        for sample in samples:
            difference, through = self._difference(values, sample)
            apart = (difference * through).reshape(len(difference), self._groups, -1)
            total += (apart.permute(1, 2, 0) @ self._found[sample]).reshape(values.shape)
        return total

    def _difference(self, values: Tensor, sample: int) -> tuple[Tensor, Tensor]:
        """[rows, N], and 1 where the activation lets a change through."""
        made = self._product(values, self._found[sample]) + self._offset
        through = (made > self._limits[0]) & (made < self._limits[1])
        return self._behind(made) - self._wanted[sample], through.float()

    def _behind(self, made: Tensor) -> Tensor:
        return made.clamp(*self._limits)

    def _product(self, values: Tensor, x: Tensor) -> Tensor:
        """[N, K] and [groups, rows, K] -> [rows, N]."""
        apart = values.reshape(self._groups, -1, values.shape[1])
        return (x @ apart.transpose(1, 2)).permute(1, 0, 2).reshape(x.shape[1], -1)
