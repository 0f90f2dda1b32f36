"""Flip codes of finished blocks where the KL from the original falls: the first half of the pass `recover`, on request.

Block by block, some sequences give the gradient of the KL by the block's weights, with every other block as it is
stored, and the curvature by its inputs and outputs. A solver (`passes/solvers/flips.py`) moves codes by one step where
they lower that model of the loss. How far it may be trusted is searched: at first so that a few codes in a hundred
move, then so that the KL of sequences that gave no gradients falls. A block is committed as it is done.

Afterwards sequences that trained nothing decide whether all of it stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.formats import QuantTensor
from quantkit.formats.base import layout
from quantkit.formats.base.grid import load_grid
from quantkit.model import finished
from quantkit.model.structure.traced import is_transposed
from quantkit.passes import NOTE, decision
from quantkit.passes.solvers import one_thread
from quantkit.passes.solvers.flips import curvature, flipped
from quantkit.stats.clustered import gained

if TYPE_CHECKING:
    from quantkit.bundle import Build
    from quantkit.pipeline.blocks.prepared import Prepared
    from quantkit.pipeline.blocks.student import Student
    from quantkit.pipeline.blocks.work import PassRun
    from quantkit.pipeline.progress import Progress

# decision: what codes were flipped is not shown to be better
UNGAINED = "flips-without-gain"
_DONE, _BEFORE, _BLOCK = "recovered-codes", "flips", "flipped"
# share of codes that may move in a block; the first trust, its steps, its ends, and trials
_FEWEST, _MOST, _TRUST, _WIDER, _NARROWER, _TRIALS = 0.01, 0.05, 0.004, 2.5, 0.5, 5
# share of its mean that is added to the diagonal of the curvature by outputs, and by inputs
_DAMPING = 0.1, 0.05


def flip(prepared: Prepared, build: Build, progress: Progress, step: PassRun, student: Callable[[], Student]) -> None:
    """Flip the codes of every block as the recipe asks, and commit them.

    Args:
        step: the pass with its settings.
        student: function that makes the student from what is committed.
    """
    if _DONE in build.done():
        return
    begun, name, settings, model = time.process_time(), step.run.name, step.settings, student()
    rows, held = range(settings.sequences), range(settings.sequences, settings.sequences + settings.held)
    if _BEFORE not in build.done():
        build.commit(_BEFORE, {"scores": model.score(held)}, {})
    generator = torch.Generator().manual_seed(prepared.request.recipe.seed)
    hidden, moved, trust = model.states(rows), 0, _TRUST
    for number, (stage, index) in enumerate(model.stages):
        progress.at("train", number / len(model.stages), f"codes of block {number + 1} of {len(model.stages)}")
        count = settings.flips
        chosen = torch.randperm(len(rows), generator=generator)[: count + settings.tests].tolist()
        key = f"{_BLOCK}-{index:06}"
        # a block that runs twice would move at one place what it needs at the other
        if key in build.done() or model.stream.visits.count(index) > 1:
            hidden = model.forward(rows, hidden, [(stage, index)])
        else:
            block = _Block(model, number, chosen, [hidden[row] for row in chosen], count)
            tensors = block.solve(trust)
            place = build.temporary(f"{key}.safetensors")
            hashes = {place: finished.save(place, tensors, {})}
            record = {"moved": block.moved, "trust": block.trust, "scores": block.scores}
            build.commit(key, record, {place: build.steps / f"{key}.safetensors"}, hashes=hashes)
            hidden = model.through(block.run, stage, hidden, rows)
        if key in build.done():
            moved, trust = moved + build.done()[key]["moved"], build.done()[key]["trust"]
    before, after = build.done()[_BEFORE]["scores"], student().score(held)
    kl = f"KL of {len(held)} held sequences {np.mean(before):.4f} -> {np.mean(after):.4f} nats a token"
    kept = gained(before, after) > 0
    reason = f"{moved:,} codes moved by one; {kl}" if kept else f"{kl} is no more than chance: kept as they were"
    taken = decision(name, NOTE if kept else UNGAINED, "codes", reason)
    record = {"layers": [], "decisions": [taken.as_dict()], "cpu_seconds": time.process_time() - begun}
    build.commit(_DONE, record, {}, remove=[] if kept else build.steps.glob(f"{_BLOCK}-*.safetensors"))


class _Block:
    """Search for better codes of one block.

    Args:
        model: the model with blocks as they are stored.
        number: place of its stage.
        rows: sequences that give gradients, then those that test.
        hidden: their hidden states before the block.
        count: how many give gradients.

    Attributes:
        run: the block with the codes that were chosen.
        moved: number of codes that moved.
        trust: share of a step to the minimum of the modelled loss that was taken.
        scores: KL of the testing sequences before and after.
    """

    def __init__(self, model: Student, number: int, rows: list[int], hidden: list[Tensor], count: int) -> None:
        (self._stage, index), self._later = model.stages[number], model.stages[number + 1 :]
        self._model, self._own, self._tested = model, rows[:count], rows[count:]
        self._hidden, self._shown = hidden[:count], hidden[count:]
        self._prefix = f"{model.stream.block_names[index]}."
        self.run = model.block(index)
        self.moved, self.trust = 0, _TRUST
        self.scores = [self._score()]

    def solve(self, trust: float) -> dict[str, QuantTensor]:
        """Move codes where the KL falls, and return the linears that changed; `trust` begins the search."""
        before, sides = dict(self.run.leaves), self._sides()
        total = sum(side.codes.numel() for side in sides)
        aims, tried = [side.flipped(trust) for side in sides], {trust}
        for _ in range(_TRIALS):
            share = sum(side.moved(aim) for side, aim in zip(sides, aims, strict=True)) / total
            other = trust * (_NARROWER if share > _MOST else _WIDER if share < _FEWEST else 1)
            if other in tried or other > 1:
                break
            trust = other
            tried.add(trust)
            aims = [side.flipped(trust) for side in sides]
        for _ in range(2):
            changed = {side.linear: side.with_codes(aim) for side, aim in zip(sides, aims, strict=True)}
            for side in sides:
                leaf = before[side.leaf]
                values = changed[side.linear].dense()
                values = values[:, : leaf.shape[0]].T if side.turned else values[:, : leaf.shape[1]]
                self.run.leaves[side.leaf] = values.to(leaf)
            score = self._score()
            self.trust = trust
            if np.mean(score) < np.mean(self.scores[0]):
                self.moved = sum(side.moved(aim) for side, aim in zip(sides, aims, strict=True))
                self.scores.append(score)
                return changed
            trust /= 3
            aims = [side.flipped(trust) for side in sides]
        self.run.leaves.update(before)
        return {}

    def _score(self) -> list[float]:
        hidden = self._model.through(self.run, self._stage, self._shown, self._tested)
        return self._model.losses(self._tested, self._model.forward(self._tested, hidden, self._later))

    def _sides(self) -> list[_Side]:
        """Return gradients and curvatures of the block's linears."""
        model, rows, inputs = self._model, self._own, list[list[Tensor]]()
        hidden = model.through(self.run, self._stage, self._hidden, rows)
        _, pulls, _ = model.pulls(rows, model.forward(rows, hidden, self._later, note=inputs.append))
        for stage, index in reversed(self._later):
            pulls, _ = model.back(model.block(index, stored=True), stage, inputs.pop(), rows, pulls)
        seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        leaves = {name: leaf for name, leaf in self.run.leaves.items() if self._linear(name) in model.trained}
        with ExitStack() as hooks:
            for name in leaves:
                linear = name.removesuffix(".weight")
                hooks.enter_context(_watched(self.run.module.get_submodule(linear), *seen.setdefault(name, ([], []))))
            _, gradients = model.back(self.run, self._stage, self._hidden, rows, pulls, list(leaves.values()))
        scale, sides = float(len(rows) * model.tokens) ** 2, []
        for name, gradient in zip(leaves, gradients, strict=True):
            if seen[name][1]:  # an expert may have seen no token
                sides.append(_Side(name, self._linear(name), model, gradient, *seen[name], scale))
        return sides

    def _linear(self, name: str) -> str:
        return self._prefix + name.removesuffix(".weight")


class _Side:
    """Codes of a linear, with the gradient and the curvatures of the loss around them.

    Args:
        leaf: name of its weight in the block.
        linear: its name in the model.
        gradient: gradient by the weight, in its layout.
        inputs, outputs: inputs, and gradients by outputs, of every sequence.
        scale: factor that makes squares of these gradients those of a token's own loss.
    """

    def __init__(
        self,
        leaf: str,
        linear: str,
        model: Student,
        gradient: Tensor,
        inputs: list[Tensor],
        outputs: list[Tensor],
        scale: float,
    ) -> None:
        self.leaf, self.linear = leaf, linear
        self.turned = is_transposed(model.stream.skeleton.get_submodule(linear))
        self._before = model.values.quantized(linear)
        self.codes = self._before.codes.to(gradient.device, torch.float32)
        more, scheme = self.codes.shape[1] - gradient.shape[0 if self.turned else 1], self._before.scheme
        self._gradient = nn.functional.pad(gradient.T if self.turned else gradient, (0, more))
        self._inputs, self._outputs, self._scale = inputs, outputs, scale
        whole = layout.against(self._before.scale.to(self.codes), (len(self.codes), self.codes.shape[1]), scheme)
        self._steps = (layout.split(torch.ones_like(self.codes), scheme) * whole).reshape(self.codes.shape)

    def flipped(self, trust: float) -> Tensor:
        """Return codes for a share of the step to the minimum of the modelled loss."""
        form = load_grid(self._before.scheme.format)
        more = self.codes.shape[1] - self._inputs[0].shape[-1]
        with one_thread(self.codes):
            inputs = nn.functional.pad(curvature(self._inputs, _DAMPING[1]), (0, more, 0, more))
            outputs = curvature(self._outputs, _DAMPING[0], even=True) * self._scale
            aimed = trust * self._gradient
            return flipped(self.codes, self._steps, aimed, outputs, inputs, form.low, form.high)

    def moved(self, codes: Tensor) -> int:
        """Count the moved codes."""
        return int((codes != self.codes).sum())

    def with_codes(self, codes: Tensor) -> QuantTensor:
        """Return the linear with other codes."""
        return self._before.replace(codes=codes.to(self._before.codes))


@contextmanager
def _watched(module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """Keep a linear's inputs and the gradients by its outputs, [tokens, K] and [tokens, N]."""

    def note(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        inputs.append(args[0].detach().flatten(0, -2))
        out.register_hook(lambda gradient: outputs.append(gradient.detach().flatten(0, -2)))

    hook = module.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()
