"""Find where a quantized model is hurt: by layer, by block, through depth, and at which words.

Both models run block by block on tokens that were not used for calibration. With h_b the original's hidden state after
block b, ĥ_b the candidate's, f̂_b the candidate's block, and means over tokens:

    error_b   √ mean ‖ĥ_b − h_b‖² / ‖h_b‖²              error accumulated after block b
    own_b     √ mean ‖f̂_b(h_{b−1}) − h_b‖² / ‖h_b‖²     error of block b alone, on the original's input

The ratio is per token, because the last norm sees single tokens, and because one token with a huge norm would hide the
others. For a layer with inputs x inside f̂_b, and output ŷ without bias (rounding of activations included):

    error     ‖ŷ − x W'ᵀ‖ / ‖x W'ᵀ‖ ,    W' = diag(r) W diag(c)

Folds scale rows and columns of a weight exactly; W' is the original weight with these scales. r and c are fitted to the
stored weight by least squares, without knowledge of the passes. The fit removes (N + K)/(N K) of the error. Outliers of
an input: its largest channel over its median channel, each by its largest absolute value.

**Mixed precision by sensitivity** (`MixedSearch`): layers are quantized one at a time, and each one's harm is measured
at the model's output. Layers are then kept in high precision, in order of harm per byte saved. This gives a curve from
"all quantized" to "all original". Each point is compiled and scored, because harms do not quite add up. The choice is
the first point that meets the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from quantkit.content import Closed
from quantkit.measurement.rows import Finite, Interval

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.measurement.accuracy.positions import Items
    from quantkit.model.streaming.stream import StreamedModel

# tokens for both models
_TOKENS = 128
# positions shown, and tokens before each
_WORST, _BEFORE = 10, 16
# alternating least squares of two vectors settles at once
_ROUNDS = 3


class BlockHarm(Closed):
    """Relative error of the hidden state after a block, and the block's own part of it."""

    name: str
    error: float
    own: float


class LayerHarm(Closed):
    """A layer's relative output error."""

    name: str
    error: float


class InputHarm(Closed):
    """A shared input, by its first layer: largest over median channel, of the original and of the candidate."""

    name: str
    before: float
    after: float


class Position(Closed):
    """A position where the two models differ most.

    Args:
        sequence, position: place, counted from 0.
        kl: nats.
        before, follows: text up to there, and the true next token.
        original, candidate: most likely next token of each, and `_chance`: its probability.
    """

    sequence: int
    position: int
    kl: float
    before: str
    follows: str
    original: str
    original_chance: float
    candidate: str
    candidate_chance: float


class Harm(Closed):
    """Content of a bundle's `harm.json`.

    Args:
        worst_share: share of all KL in the worst hundredth of the positions.
        mixed: search for layers to keep in high precision, if it ran.
    """

    blocks: list[BlockHarm] = Field(default=[])
    layers: list[LayerHarm] = Field(default=[])
    inputs: list[InputHarm] = Field(default=[])
    worst: list[Position] = Field(default=[])
    worst_share: float | None = None
    mixed: MixedSearch | None = None


class Depth:
    """Measurement of blocks, layers and inputs, stage by stage, beside whatever else loads the candidate's blocks.

    Args:
        original: original in the candidate's class and basis: with the transforms that reach every block.
        ids: [samples, tokens]; the beginning of the first sample is used.
        layers: full names of the quantized layers.
        before: original without those transforms, if there are any; its outliers are compared with the candidate's.
    """

    def __init__(
        self,
        original: StreamedModel,
        candidate: StreamedModel,
        ids: Tensor,
        *,
        layers: Sequence[str] = (),
        before: StreamedModel | None = None,
    ) -> None:
        few = ids[:1, :_TOKENS]
        self.harm = Harm()
        self._ends = original.ends(), candidate.ends()  # read once for these calls, and for the scores beside them
        self._original, self._before, self._wanted = original, before, set(layers)
        self._ours, self._theirs = original.begin(few, 1), candidate.begin(few, 1)
        # a live model's blocks share state through its calls, so one block alone needs calls of its own
        self._single = original.begin(few, 1) if self._ours.live else self._ours
        self._untouched = self._ours if before is None else before.begin(few, 1)
        self._hidden, self._changed, self._clean = self._ours.hidden, self._theirs.hidden, self._untouched.hidden

    def visit(self, stage: int, second: nn.Module) -> None:
        """Measure the call number `stage` of a block; `second` is the candidate's."""
        original, ours, theirs, single = self._original, self._ours, self._theirs, self._single
        index = original.visits[stage]
        first = original.load(index)
        with _Watch(first) as old:
            target = ours.run_all(first, stage, self._hidden)
        with _Watch(second) as new:
            alone = single.run_all(second, stage, self._hidden)
        if single is not ours:
            single.pass_on(stage, single.run_all(first, stage, self._hidden))
        out = theirs.run_all(second, stage, self._changed)
        self._changed = theirs.pass_on(stage, out)
        if self._before is not None:
            third = self._before.load(index)
            with _Watch(third) as old:
                self._clean = self._untouched.pass_on(stage, self._untouched.run_all(third, stage, self._clean))
        self._hidden = ours.pass_on(stage, target)
        if index in original.visits[:stage]:
            return
        name = original.block_names[index]
        self.harm.blocks.append(BlockHarm(name=name, error=_apart(out, target), own=_apart(alone, target)))
        prefix = f"{name}." if name else ""
        quantized = [linear for linear in new.inputs if prefix + linear in self._wanted]
        for linear in quantized:
            error = _layer(first.get_submodule(linear), second.get_submodule(linear), *new.of(linear))
            self.harm.layers.append(LayerHarm(name=prefix + linear, error=error))
        for linear in new.first_of_each(quantized):
            if linear in old.inputs:
                ratios = [_outliers(seen.inputs[linear]) for seen in (old, new)]
                self.harm.inputs.append(InputHarm(name=prefix + linear, before=ratios[0], after=ratios[1]))


def worst(items: Items, ids: Tensor, decode: Callable[[list[int]], str]) -> Harm:
    """Find the positions of `ids` [samples, tokens] with the largest KL, and the share of KL in the worst hundredth."""
    import numpy as np

    order = np.argsort(-items.kl, kind="stable")
    total = float(items.kl.sum())
    positions = []
    for item in order[:_WORST].tolist():
        sequence = int(items.sequence[item])
        position = item - int(np.searchsorted(items.sequence, sequence))
        row = ids[sequence].tolist()
        positions.append(
            Position(
                sequence=sequence,
                position=position,
                kl=float(items.kl[item]),
                before=decode(row[max(0, position + 1 - _BEFORE) : position + 1]),
                follows=decode([row[position + 1]]),
                original=decode([int(items.best_original[item])]),
                original_chance=float(items.chance_original[item]),
                candidate=decode([int(items.best_candidate[item])]),
                candidate_chance=float(items.chance_candidate[item]),
            )
        )
    top = float(items.kl[order[: max(1, items.n // 100)]].sum())
    return Harm(worst=positions, worst_share=top / total if total > 0 else None)


def _apart(changed: Tensor, target: Tensor) -> float:
    gap, size = (changed - target).double().square().sum(-1), target.double().square().sum(-1)
    return float((gap / size.clamp(min=1e-30)).mean().sqrt())


def _layer(original: nn.Module, candidate: nn.Module, x: Tensor, y: Tensor) -> float:
    from quantkit.model.structure.traced import weight_of

    target = x @ _scaled(weight_of(original).float(), weight_of(candidate).float()).T
    bias = getattr(candidate, "bias", None)
    y = y if bias is None else y - bias.detach()
    return float((y - target).norm() / target.norm().clamp(min=1e-30))


def _scaled(weight: Tensor, like: Tensor) -> Tensor:
    """Scale `weight` to the nearest `diag(r) weight diag(c)` of `like`, both [N, K].

    Least squares give r = (W ∘ L) c / (W ∘ W) c² for a given c, and c likewise for a given r.
    """
    squares, products = weight.square(), weight * like
    rows, columns = weight.new_ones(weight.shape[0]), weight.new_ones(weight.shape[1])

    def fitted(cross: Tensor, size: Tensor, before: Tensor) -> Tensor:
        return (cross / size).where(size > 0, before)

    for _ in range(_ROUNDS):
        rows = fitted(products @ columns, squares @ columns.square(), rows)
        columns = fitted(rows @ products, rows.square() @ squares, columns)
    del products, squares
    return (rows[:, None] * weight).mul_(columns)


def _outliers(x: Tensor) -> float:
    """Return largest over median channel; 1 for an input of zeros."""
    channels = x.abs().amax(0)
    return float(channels.max() / channels.median().clamp(min=1e-30)) if channels.any() else 1.0


class _Watch:
    """Records the inputs of a block's linears, [tokens, K] in the order they run, and their outputs."""

    def __init__(self, block: nn.Module) -> None:
        from quantkit.model.structure.traced import is_linear

        self._linears = {name: module for name, module in block.named_modules() if is_linear(module)}
        self._hooks: list[Any] = []
        self._places: dict[str, tuple[Any, ...]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> _Watch:
        for name, module in self._linears.items():
            self._hooks.append(module.register_forward_hook(self._note(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        import torch

        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0]
            # a router may be a linear by class and return its choices
            if name not in self.inputs and x.numel() and isinstance(output, torch.Tensor):
                self.inputs[name] = x.detach().reshape(-1, x.shape[-1]).float()
                self.outputs[name] = output.detach().reshape(-1, output.shape[-1]).float()
                # the inputs are kept alive, so no other tensor can reuse their memory
                self._places[name] = (x.data_ptr(), tuple(x.shape), x._version)

        return hook

    def of(self, linear: str) -> tuple[Tensor, Tensor]:
        return self.inputs[linear], self.outputs[linear]

    def first_of_each(self, linears: Sequence[str]) -> list[str]:
        return list({self._places[name]: name for name in reversed(linears)}.values())[::-1]


Bytes = Annotated[int, Field(ge=0)]


class Alone(Closed):
    """One layer quantized with all others in high precision: its harm, and the bytes saved."""

    name: str
    harm: Finite
    bytes: Bytes


class MixedPoint(Closed):
    """One point of the curve: layers in high precision, bytes of the weights, measured harm."""

    kept: list[str]
    bytes: Bytes
    harm: Finite
    ci95: Interval | None = None


class MixedSearch(Closed):
    """The search and its choice.

    Args:
        what: harm of a step, with its unit: `KL, nats an image`. Lower is better, 0 is none.
        alone: harm of a single layer, if measured differently; otherwise "".
        scored: scoring data, in words: `256 images of fashion-mnist (tune)`.
        layers: single layers, worst first.
        steps: points by rising bytes; the first keeps only the recipe's layers in high precision.
        chosen: index of the chosen step; None if none meets the limit.
        limit: largest harm that the gate allows; None without a gate.
    """

    what: str
    alone: str = ""
    scored: str
    layers: list[Alone]
    steps: list[MixedPoint] = Field(min_length=1)
    chosen: int | None = Field(default=None, ge=0)
    limit: Finite | None = None

    @model_validator(mode="after")
    def _chosen_is_one(self) -> Self:
        if self.chosen is not None and self.chosen >= len(self.steps):
            raise ValueError(f"step {self.chosen} was chosen of {len(self.steps)}")
        if [step.bytes for step in self.steps] != sorted(step.bytes for step in self.steps):
            raise ValueError("steps stand by rising bytes")
        return self
