"""Learned rounding: codes and scales moved down the gradient of what a block puts out wrong, watched on held-out text.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023, arXiv
2309.05516 (SignRound, AutoRound). The quantizer and its gradient are `solvers/round.py`. Here: the block's output
against what the unquantized model puts out there, token by token,

    L = mean over tokens of ||y^_t - y_t||² / ||y_t||²

since the norm behind it divides by a token's size, and a few tokens are a thousand times larger than the others. A part
of the calibration sequences, the same for every block, is never learned from: the state that does best there is kept,
and that may be the first. Alone it starts at the nearest codes in searched ranges, and stays behind `gptq`; after
`gptq`, `hqq` or `rtn` it goes on from theirs. After `gptq` steps have to be small (`rate` 0.02 or less), since its
codes sit on the edges of their cells: on the second of two middle blocks of SmolLM2-135M (int4, groups of 64, 8 x 256
tokens) the error on text not seen went from 0.33 % to 0.27 % of its output, from 0.30 % to 0.28 % where `gptq` corrects
for drift. 10 steps take three times as long as `gptq`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantkit.content import Closed
from quantkit.lazy import torch
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from torch import nn

    from quantkit.passes import Block, QuantTensor, Stats, Tensor
    from quantkit.passes.solvers.round import LearnedRounding


class Round(Pass):
    """See the module."""

    name = "round"
    paper = "arXiv 2309.05516"
    needs = frozenset({"original_outputs"})
    # neither codes nor their absence: it assigns them, or improves what another pass assigned
    ensures = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """How codes are learned.

        Args:
            iterations: steps a block; each block costs their number times `batch` forwards and backwards.
            batch: sequences a step.
            rate: how far an offset goes in the first step, in cells; then linearly less. An offset ends at half a cell.
            scale_rate: how far a scale goes in the first step, as a share of it; 0 leaves scales as they are.
            held_out: share of the sequences that is not learned from but chooses the state to keep.
            checks: how often it is asked, in equal distances.
        """

        iterations: int = Field(default=20, ge=1)
        batch: int = Field(default=2, ge=1)
        rate: float = Field(default=0.05, ge=0)
        scale_rate: float = Field(default=0.002, ge=0)
        held_out: float = Field(default=0.25, gt=0, lt=1)
        checks: int = Field(default=4, ge=1)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block, or improve those that it has."""
        from quantkit.model.structure.traced import weight_of
        from quantkit.passes.assign import assign, nearest
        from quantkit.passes.solvers.round import LearnedRounding

        start = {name: block.tensors[name] for name in block.linears() if name in block.tensors}
        fresh = not start
        if fresh:
            start = {name: nearest(block.weight(name), block.scheme(name)) for name in block.linears()}
        weights = {name: block.original_weight(name) for name in start}
        if not start:
            return declined(self.name, block.name, "no linear has codes to improve")
        outcome = Outcome(fresh)
        width = {name: weight_of(block.module.get_submodule(name)).shape[1] for name in start}
        samples = stats.hidden.shape[0]
        if samples < 2:
            outcome.decisions += declined(self.name, block.name, "one sequence leaves none to hold out").decisions
            best = start
        else:
            held = min(max(1, round(settings.held_out * samples)), samples - 1)
            learned = {name: LearnedRounding(weights[name], start[name]) for name in start}
            _put(block, learned)
            best, better = _learn(block, stats, learned, start, held, settings)
            if not better and not fresh:
                reason = "nothing that was learned did better on the held-out sequences"
                outcome.decisions += declined(self.name, block.name, reason, "no-better").decisions
            outcome.changed |= better
        for name, tensor in best.items():
            block.replace(name, weights[name][:, : width[name]])  # the error is that against the original weight
            outcome.errors[name] = assign(block, name, tensor)
        stats.outputs = None
        return outcome


def _put(block: Block, learned: dict[str, LearnedRounding]) -> None:
    """Let the block compute with the present codes."""
    from quantkit.model.structure.traced import weight_of

    for name, each in learned.items():
        width = weight_of(block.module.get_submodule(name)).shape[1]
        block.replace(name, each.values()[:, :width])


def _learn(
    block: Block,
    stats: Stats,
    learned: dict[str, LearnedRounding],
    start: dict[str, QuantTensor],
    held_out: int,
    settings: Round.Settings,
) -> tuple[dict[str, QuantTensor], bool]:
    """Return the best of the states on the held-out sequences, and whether it is not the first."""
    targets = stats.original_outputs()
    rows = torch.arange(stats.hidden.shape[0])
    seen, held = rows[:-held_out], rows[-held_out:]
    generator = torch.Generator().manual_seed(block.seed + block.index)

    def measured() -> float:
        with torch.no_grad():
            return sum(float(_loss(block, stats, targets, int(row))) for row in held)

    best, better, least = start, False, measured()
    every = max(1, settings.iterations // settings.checks)
    waiting: list[int] = []
    for number in range(settings.iterations):
        if len(waiting) < settings.batch:
            waiting += seen[torch.randperm(len(seen), generator=generator)].tolist()
        now, waiting = waiting[: settings.batch], waiting[settings.batch :]
        gradients = _gradients(block, stats, targets, now, list(learned))
        left = 1 - number / settings.iterations
        for name, gradient in gradients.items():
            learned[name].step(gradient, settings.rate * left, settings.scale_rate * left)
        _put(block, learned)
        if (number + 1) % every == 0 or number + 1 == settings.iterations:
            loss = measured()
            if loss < least:
                best, better, least = {name: each.tensor() for name, each in learned.items()}, True, loss
    return best, better


def _gradients(block: Block, stats: Stats, targets: Tensor, rows: list[int], names: list[str]) -> dict[str, Tensor]:
    """Of the loss on some sequences, one after the other, by the weights, [N, K + padding]."""
    from quantkit.model.structure.traced import is_transposed

    modules: dict[str, nn.Module] = {name: block.module.get_submodule(name) for name in names}
    parameters = [module.get_parameter("weight").requires_grad_() for module in modules.values()]
    total: list[Tensor] | None = None
    for row in rows:
        with torch.enable_grad():
            loss = _loss(block, stats, targets, row)
        # a linear that these tokens do not reach has no gradient
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        total = list(found) if total is None else [left + right for left, right in zip(total, found, strict=True)]
    assert total is not None
    gradients = {}
    for (name, module), gradient in zip(modules.items(), total, strict=True):
        matrix = gradient.T if is_transposed(module) else gradient
        gradients[name] = torch.nn.functional.pad(matrix, (0, block.scheme(name).padding(matrix.shape[1])))
    return gradients


def _loss(block: Block, stats: Stats, targets: Tensor, row: int) -> Tensor:
    output = stats.calls.forward_row(block.module, stats.stage, stats.hidden[row : row + 1], row).flatten(0, -2)
    target = targets[row : row + 1].flatten(0, -2)
    size = target.square().sum(dim=1).clamp(min=1e-12)
    return ((output - target).square().sum(dim=1) / size).mean()


PASS: Pass = Round()
