"""Rotate: turn the residual stream by an orthogonal matrix, so that no channel is an outlier; exact before rounding.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, arXiv 2404.00456. This is the part that
costs nothing at run time: the rotation is folded into the weights (`model/structure/residual.py` finds the weights on
the stream, `turn.py` turns them). Before any work, every block, the embedding and the head are proved in float64:
outputs within 1e-10 of the original's. If that fails, the model stays as it is, with the reason: norms after the
linears (Gemma 2 and 3, BERT) cannot be turned, nor tensors that no parameter of the class holds (draft heads, towers).
The last norm's weight is folded into the head, which then differs from an embedding that it was tied to: the model is
untied, and larger by one table. It helps where one scale serves many weights: SmolLM2-135M, int4, `rtn`, a symmetric
scale for every output channel has a KL of 1.140 without and 0.817 with it (2,048 tokens of prose).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quantkit.content import Closed
from quantkit.lazy import torch
from quantkit.passes import ModelOutcome, Pass, decision

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.model.streaming.stream import Whole
    from quantkit.model.structure.turn import Ends, Residual
    from quantkit.passes.solvers.rotate import Rotation

# tokens for tracing and proving
_PROBE = (2, 12)


@dataclass(frozen=True)
class Turning:
    """Rotation of a whole model, as its parts load; `heads`: head size -> rotation of the value paths."""

    rotation: Rotation
    heads: Callable[[int], Rotation] | None
    blocks: Sequence[Residual]
    outside: Residual

    def block(self, index: int, block: nn.Module) -> None:
        """Turn a block in place."""
        from quantkit.model.structure.turn import turn

        turn(block, self.blocks[index], self.rotation, self.heads)

    def rest(self, model: nn.Module) -> None:
        """Turn embedding and head in place."""
        from quantkit.model.structure.turn import turn

        turn(model, self.outside, self.rotation)


class Rotate(Pass):
    """Pass `rotate`."""

    name = "rotate"
    paper = "arXiv 2404.00456"
    scope = "model"
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "it turns the residual stream of a transformer, which a convolution or an activation would not let pass"

    class Settings(Closed):
        """Choice of the rotations.

        Args:
            matrix: `hadamard`, with random signs: every channel becomes a mean of all, equally weighted. For a width
                without a known matrix, its product with a random orthogonal matrix. `random`: only the latter.
            values: whether to also turn every head's values, undone in the output projection.
        """

        matrix: Literal["hadamard", "random"] = "hadamard"
        values: bool = True

    def transform(self, model: Whole, settings: Settings, seed: int) -> ModelOutcome:
        """Find all weights on the residual stream, and prove that they can be turned."""
        from quantkit.model.structure.residual import Unturnable
        from quantkit.passes.solvers import rotate as solver

        try:
            turning = _proved(model, settings, seed)
        except Unturnable as problem:
            return ModelOutcome(None, [decision(self.name, "not-rotated", "model", str(problem))])
        decisions = []
        width = turning.rotation.size
        if settings.matrix == "hadamard" and not solver.is_hadamard(width):
            reason = f"no Hadamard matrix of order {width} is constructed; {width & -width} of it is one"
            decisions.append(decision(self.name, "not-hadamard", "model", reason, "hadamard", "random"))
        return ModelOutcome(turning, decisions, unties=True)


def _proved(model: Whole, settings: Rotate.Settings, seed: int) -> Turning:
    """Return the rotation, proved on every part. Raises Unturnable with the reason."""
    from quantkit.model.streaming.calls import Call
    from quantkit.model.structure.fold import TOLERANCE
    from quantkit.model.structure.residual import Unturnable, find, find_heads
    from quantkit.model.structure.traced import is_vision_language
    from quantkit.model.structure.turn import Ends, ModelPart, Residual, prove
    from quantkit.passes.solvers import rotate as solver

    if not model.paths:
        raise Unturnable("the model is one block, without a stream from block to block")
    ids = torch.arange(1, 1 + _PROBE[0] * _PROBE[1]).reshape(_PROBE)
    calls = model.begin(ids, _PROBE[0])
    if calls.live:
        raise Unturnable("its blocks are given what other blocks have put out")
    width = calls.hidden.shape[-1]
    for name, shape in model.beside.items():
        if len(shape) > 1 and width in shape:
            raise Unturnable(f"{name} may read or write the residual stream, and no parameter of the class holds it")
    make = solver.hadamard_rotation if settings.matrix == "hadamard" else solver.random_rotation

    def call(index: int) -> Call:
        return calls.call(model.visits.index(index))

    def part(index: int) -> ModelPart:
        return ModelPart.of_block(model.load(index), call(index))

    like = find(part(0))
    if settings.values:
        paths = find_heads(model.load(0), call(0), like.writers, lambda size: make(size, seed + 1))
        like = replace(like, heads=paths)
    ends = Ends(model, ids)
    if is_vision_language(ends.model):
        raise Unturnable("a projector of images writes into the residual stream, and token ids do not reach it")
    last = find(ModelPart(ends.model, ends.finish, calls.hidden.double(), turns_output=False))
    if not last.norms:
        raise Unturnable("no linear reads the last norm: its output is the model's")
    outside = Residual(last.norms, (), ends.embeddings(width))
    rotation = make(width, seed)
    if like.centres or last.centres:
        rotation = rotation.keeping_means()
    heads = functools.cache(lambda size: make(size, seed + 1)) if settings.values else None
    blocks = []
    for index, name in enumerate(model.block_names):
        error = prove(part(index), like, rotation, heads)
        if error > TOLERANCE and index:
            # unlike the first one: another kind of attention, say
            like = find(part(index))
            error = prove(part(index), like, rotation)
        if not error <= TOLERANCE:
            raise Unturnable(f"outputs of {name} differ by {error:.1e} after turning")
        blocks.append(like)
    _prove_ends(ends, outside, rotation, calls.hidden.double())
    return Turning(rotation, heads, blocks, outside)


def _prove_ends(ends: Ends, outside: Residual, rotation: Rotation, hidden: Tensor) -> None:
    """Prove the embedding and the head. Raises Unturnable."""
    from quantkit.model.structure.fold import TOLERANCE, disagreement
    from quantkit.model.structure.residual import Unturnable
    from quantkit.model.structure.turn import ModelPart, prove

    before, inputs = ends.start()
    error = prove(ModelPart(ends.model, ends.finish, hidden, turns_output=False), outside, rotation)
    if not error <= TOLERANCE:
        raise Unturnable(f"logits differ by {error:.1e} after turning")
    after, still = ends.start()
    error = disagreement(rotation.apply(before), after)
    moved = [disagreement(*pair) for pair in zip(inputs, still, strict=True) if pair[0].is_floating_point()]
    if not max([error, *moved]) <= TOLERANCE:
        raise Unturnable(f"the first block's inputs differ by {max([error, *moved]):.1e} after turning")


PASS: Pass = Rotate()
