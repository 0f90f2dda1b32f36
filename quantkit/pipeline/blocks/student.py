"""Student: a finished model that learns the answers of the original, block by block.

A forward goes from block to block; a backward runs each block again with gradients, from the last one, so one is in
memory at a time. Quantized weights are their values times (1 + d), so formats need no derivative. Inputs that a runtime
quantizes are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.formats.base import layout
from quantkit.model import finished
from quantkit.model.streaming.answers import PULLED, Answers, Head
from quantkit.model.structure.traced import is_transposed
from quantkit.planning.compiling import WHOLE

if TYPE_CHECKING:
    from quantkit.exporters.values import Values


@dataclass(frozen=True)
class Trainable:
    """A block that runs with leaves in place of parameters: by their names in it, those and what they were made of."""

    module: nn.Module
    scaled: dict[str, Tensor]
    leaves: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return functional_call(self.module, self.leaves, args, kwargs)


class Student:
    """A finished model of which scales and norm gains are trained on the answers of the original.

    Args:
        values: the finished model.
        original: the original's answers for ids [samples, tokens].
        ids: the same ids.
        half: whether products are computed in bfloat16.

    Attributes:
        trained: linear, or name of a norm gain -> d, in the shape of its scale or gain.
    """

    def __init__(self, values: Values, original: Answers, ids: Tensor, *, half: bool) -> None:
        self.values, self.stream, self._original, self._half = values, values.stream, original, half
        self._ids = ids.to(self.stream.device)
        self.tokens = ids.shape[1]
        self._calls, self._kept = self.stream.begin(ids, 1), dict[int, nn.Module]()
        self.stages = list(enumerate(self.stream.visits))
        size = 4 * sum(value.numel() for block in self.stream.blocks for value in block.parameters())
        self._keeps = size <= WHOLE and self.stream.device.type == "cpu"
        self._scales = {
            name: values.quantized(name, codes=False).scale.to(self.stream.device)
            for name in values.schemes
            if name != self.stream.head
        }
        shapes = {name: scale.shape for name, scale in self._scales.items()}
        shapes |= {
            name: self.stream.skeleton.get_parameter(name).shape for name in self.stream.files if self._is_gain(name)
        }
        self.trained = {
            name: torch.zeros(shape, device=self.stream.device, requires_grad=True) for name, shape in shapes.items()
        }
        self._rest = self.stream.rest()
        self._gains = {
            name: self.stream.value(self._rest, name).clone()
            for name in self.stream.rest_names()
            if name in self.trained
        }
        self._head = Head(self._rest, self.stream.paths, self.stream.flow, self.stream.runs(self._rest))

    def _is_gain(self, name: str) -> bool:
        """Tell whether a parameter is a norm's gain: a weight of one dimension."""
        try:
            parameter = self.stream.skeleton.get_parameter(name)
        except AttributeError:  # a buffer
            return False
        return name.endswith(".weight") and parameter.dim() == 1 and parameter.is_floating_point()

    def scale(self, linear: str) -> Tensor:
        """Return a linear's trained scale as it is stored."""
        before = self._scales[linear]
        return (before.float() * (1 + self.trained[linear].detach())).to(before.dtype)

    def gain(self, name: str, before: Tensor, *, stored: bool) -> Tensor:
        """Return a trained gain, from its value before; rounded as in files if it is `stored`."""
        gain = before.float() + self.trained[name] * before.float().abs().mean()
        return gain.detach().to(getattr(torch, self.stream.source.dtype)).float() if stored else gain

    def _weight(self, linear: str, before: Tensor, *, stored: bool) -> Tensor:
        """Return a trained weight, from its values before, in the same layout."""
        scheme, scale = self.values.schemes[linear], self._scales[linear].float()
        factor = 1 + self.trained[linear]
        if stored:
            factor = torch.where(scale == 0, 1.0, self.scale(linear).float() / scale)
        turned = is_transposed(self.stream.skeleton.get_submodule(linear))
        matrix = before.T if turned else before
        columns = matrix.shape[1]
        matrix = nn.functional.pad(matrix, (0, scheme.padding(columns)))
        parts = layout.split(matrix, scheme) * layout.against(factor, (matrix.shape[0], matrix.shape[1]), scheme)
        matrix = parts.reshape(matrix.shape)[:, :columns]
        return matrix.T if turned else matrix

    def block(self, index: int, *, stored: bool = False) -> Trainable:
        """Load a block with its trained parameters, as leaves of their own unless as they are `stored`."""
        module = self._kept.get(index) or self.stream.load(index)
        if self._keeps:
            self._kept[index] = module
        prefix, scaled = f"{self.stream.block_names[index]}.", dict[str, Tensor]()
        for name, before in module.named_parameters():
            full = prefix + name
            if full in self.trained:
                scaled[name] = self.gain(full, before.detach(), stored=stored)
            elif (linear := full.removesuffix(".weight")) in self.trained:
                scaled[name] = self._weight(linear, before.detach(), stored=stored)
        narrow = torch.bfloat16 if self._half else torch.float32
        leaves = {
            name: value.detach().to(narrow if value.dim() > 1 else torch.float32).requires_grad_(not stored)
            for name, value in scaled.items()
        }
        return Trainable(module, scaled, leaves)

    def states(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the hidden states before the first block, each [1, tokens, width]."""
        return [self._calls.hidden[row : row + 1] for row in rows]

    def forward(
        self,
        rows: Sequence[int],
        hidden: list[Tensor],
        stages: Iterable[tuple[int, int]],
        *,
        stored: bool = True,
        note: Callable[[list[Tensor]], object] = lambda _: None,
    ) -> list[Tensor]:
        """Pass hidden states of some sequences through stages, each with its block; `note` is given those before."""
        for stage, index in stages:
            note(hidden)
            hidden = self.through(self.block(index, stored=stored), stage, hidden, rows)
        return hidden

    @torch.no_grad()
    def through(self, run: Trainable, stage: int, hidden: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Pass hidden states of some sequences through one stage."""
        with self._narrow():
            return [self._row(run, stage, one, row).to(one) for one, row in zip(hidden, rows, strict=True)]

    def _row(self, run: Trainable, stage: int, hidden: Tensor, row: int) -> Tensor:
        return self._calls.pass_on(stage, self._calls.forward_row(run, stage, hidden, row))  # type: ignore[arg-type]

    def _narrow(self) -> torch.autocast:
        return torch.autocast(self.stream.device.type, torch.bfloat16, enabled=self._half)

    def _loss(self, logits: Tensor, row: int, part: slice) -> Tensor:
        """Sum KL(original || logits) over some positions of a sequence."""
        with torch.no_grad():
            original = self._original(row, part).float().log_softmax(-1)
        return nn.functional.kl_div(logits.float().log_softmax(-1), original, log_target=True, reduction="sum")

    def _settle(self, *, stored: bool) -> list[Tensor]:
        """Put trained gains outside of the blocks in place, and return them."""
        places: list[Tensor] = []
        for name, before in self._gains.items():
            place = self._rest.get_parameter(name)
            place.data.copy_(self.gain(name, before, stored=stored).detach())
            places.append(place.requires_grad_(not stored))
        return places

    def learn(self, rows: Sequence[int]) -> float:
        """Add the gradients of the loss of some sequences to those of `trained`, and return the loss."""
        inputs: list[list[Tensor]] = []
        hidden = self.forward(rows, self.states(rows), self.stages, stored=False, note=inputs.append)
        places = self._settle(stored=False)
        total, pulls, others = self.pulls(rows, hidden, places)
        for (name, before), gradient in zip(self._gains.items(), others, strict=True):
            self._add(self.gain(name, before, stored=False), gradient)
        for stage, index in reversed(self.stages):
            run = self.block(index)
            pulls, sums = self.back(run, stage, inputs.pop(), rows, pulls, list(run.leaves.values()))
            for value, gradient in zip(run.scaled.values(), sums, strict=True):
                self._add(value, gradient)
        return total

    def pulls(
        self, rows: Sequence[int], hidden: Sequence[Tensor], places: Sequence[Tensor] = ()
    ) -> tuple[float, list[Tensor], list[Tensor]]:
        """Return the loss of some sequences, its gradients by their last hidden states, and by parameters outside."""
        total, share = 0.0, 1 / (len(rows) * self.tokens)
        pulls, sums = [], [torch.zeros_like(one) for one in places]
        for one, row in zip(hidden, rows, strict=True):

            def loss(logits: Tensor, part: slice, row: int = row) -> Tensor:
                nonlocal total
                value = self._loss(logits, row, part) * share
                total += float(value.detach())
                return value

            with self._narrow():
                pull, *others = Answers(self._head, self._ids[row : row + 1], one).pull(0, loss, places)
            pulls.append(pull)
            for sum_, other in zip(sums, others, strict=True):
                sum_.add_(other)
        return total, pulls, sums

    def back(
        self,
        run: Trainable,
        stage: int,
        hidden: Sequence[Tensor],
        rows: Sequence[int],
        pulls: Sequence[Tensor],
        leaves: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients by a stage's hidden states, and the sums of those by leaves, float32."""
        sums, before = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves], []
        for one, row, pull in zip(hidden, rows, pulls, strict=True):
            start = one.detach().requires_grad_(True)
            with torch.enable_grad(), self._narrow():
                end = self._row(run, stage, start, row)
            how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            first, *gradients = torch.autograd.grad(end, [start, *leaves], pull.to(end), **how)
            before.append(first)
            for sum_, gradient in zip(sums, gradients, strict=True):
                sum_.add_(gradient)
        return before, sums

    def stored(self) -> dict[str, Tensor]:
        """Return trained scales and gains by the names of stored results, in their stored dtypes."""
        dtype = getattr(torch, self.stream.source.dtype)
        gains = {
            name: self.gain(name, self.stream.tensor(name), stored=True).to("cpu", dtype)
            for name in self.trained
            if name not in self._scales
        }
        return gains | {finished.scale_key(name): self.scale(name).cpu() for name in self._scales}

    @staticmethod
    def _add(value: Tensor, gradient: Tensor) -> None:
        """Pass a gradient on to what a trained value was made of."""
        torch.autograd.backward(value, gradient.to(value))

    def score(self, rows: Sequence[int]) -> list[float]:
        """Return the loss of some sequences, nats a token, with everything as it is stored."""
        hidden = self.forward(rows, self.states(rows), self.stages)
        self._settle(stored=True)
        return self.losses(rows, hidden)

    @torch.no_grad()
    def losses(self, rows: Sequence[int], hidden: Sequence[Tensor]) -> list[float]:
        """Return the loss of some sequences, nats a token, from their last hidden states."""
        losses = []
        for one, row in zip(hidden, rows, strict=True):
            answers, tokens = Answers(self._head, self._ids[row : row + 1], one), self.tokens
            with self._narrow():
                parts = [slice(start, min(start + PULLED, tokens)) for start in range(0, tokens, PULLED)]
                losses.append(sum(float(self._loss(answers(0, part), row, part)) for part in parts) / tokens)
        return losses
