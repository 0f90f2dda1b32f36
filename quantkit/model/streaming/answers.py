"""Answers of a streamed model: its head on hidden states, and logits by positions of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.streaming.calls import Calls, Given, Shelf, forward, stand_in, uncached
from quantkit.model.structure.flow import Flow
from quantkit.model.structure.traced import blocks_of

# bytes from which on a live model's answers for one sequence are kept in a file: 256 tokens of 262,144 logits
ANSWERS_ON_DISK = 1 << 28
# positions of which the head's gradient is taken at a time: three times 134 MB for 262,144 logits
PULLED = 128


class Ended(Exception):
    """Signal that ends a forward early."""


class Head:
    """Part behind the last block: final norm and language-model head, run on hidden states.

    The model's own forward runs with stand-ins that return the given hidden states, so that final norms, logit scales
    and
    soft caps come from the model's class.

    Args:
        model, paths, flow, runs: as for `record`; takes over the model.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], flow: Flow, runs: nn.Module | None = None) -> None:
        assert not flow.live, "a live model ends in its own forward"
        self.model, self.runs = model, runs or model
        self._plays = torch.empty(0)
        blocks = blocks_of(model, paths)

        def takes(index: int, hidden: Tensor, _: Given) -> Any:
            return flow.output(blocks[index], hidden if index else self._plays)

        stand_in(model, paths, takes)

    def __call__(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return logits [samples, tokens, vocabulary], or an encoder's last hidden states, from the last block's
        output; with gradients if they are enabled.
        """
        self._plays = hidden
        with uncached(self.model):
            return answer(forward(self.runs, ids))


def answer(output: Any) -> Tensor:
    """Return the logits in a model's output, those of spans side by side, or its last hidden states."""
    if hasattr(output, "start_logits"):
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


class Answers:
    """A model's answers for ids [samples, tokens]: logits, or an encoder's last hidden states.

    A live model's answers for a sequence are computed whole at the first request, and kept until another sequence is
    requested: in a file if they are large, since two models are compared. The same holds if hidden states are not one
    per
    token (a prompt of the model's own, several streams, patches), because the head then needs all of them.

    Args:
        of: a head, or the calls of a live model after all blocks.
        ids: [samples, tokens].
        hidden: output of the last block, for a head.
    """

    def __init__(self, of: Head | Calls, ids: Tensor, hidden: Tensor | None = None) -> None:
        self._of, self._ids, self._hidden = of, ids, hidden
        self._held: tuple[int, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, index: int, part: slice = slice(None)) -> Tensor:
        """Return the answers at some positions of one sequence: [P, vocabulary or width]."""
        if isinstance(self._of, Head):
            assert self._hidden is not None
            row, ids = self._hidden[index : index + 1], self._ids[index : index + 1]
            if row.shape[1] == ids.shape[1]:
                return self._of(row[:, part].to(ids.device), ids[:, part])[0]
        if self._held is None or self._held[0] != index:
            self._held = None  # free the old ones first
            whole = self._whole(index)
            large = not whole.is_cuda and whole.nbytes >= ANSWERS_ON_DISK
            self._held = index, Shelf().copy(whole[0]) if large else whole[0]
        return self._held[1][part]

    @torch.enable_grad()
    def pull(
        self, index: int, loss: Callable[[Tensor, slice], Tensor], beside: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a loss by a sequence's last hidden states, [1, tokens, width], and by parameters.

        Args:
            loss: function of logits [P, vocabulary] and of their positions to the sum of their losses.
            beside: parameters of the head.
        """
        assert isinstance(self._of, Head) and self._hidden is not None
        whole, ids = self._hidden[index : index + 1], self._ids[index : index + 1]
        tokens = ids.shape[1]
        step = PULLED if whole.shape[1] == tokens else tokens
        parts, sums = [], [torch.zeros_like(one) for one in beside]
        for start in range(0, tokens, step):
            part = slice(start, min(start + step, tokens))
            row = whole if step == tokens else whole[:, part]
            hidden = row.to(ids.device).detach().requires_grad_(True)
            value = loss(self._of(hidden, ids[:, part])[0], part)
            first, *others = torch.autograd.grad(value, [hidden, *beside])
            parts.append(first)
            sums = [one + other for one, other in zip(sums, others, strict=True)]
        return torch.cat(parts, dim=1), *sums

    @torch.no_grad()
    def given(self, linear: str, index: int) -> Tensor:
        """Return the input of a linear behind the blocks for a sequence, [tokens, K]; for a live model, once each."""
        inputs: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0])
            raise Ended

        hook = self._of.model.get_submodule(linear).register_forward_pre_hook(note)  # type: ignore[union-attr]
        try:
            with suppress(Ended):
                self._whole(index)
        finally:
            hook.remove()
        return inputs[0].reshape(-1, inputs[0].shape[-1])

    def _whole(self, index: int) -> Tensor:
        """Return the answers at all positions of one sequence, [1, tokens, vocabulary or width]."""
        if isinstance(self._of, Head):
            assert self._hidden is not None
            return self._of(self._hidden[index : index + 1].to(self._ids.device), self._ids[index : index + 1])
        return answer(self._of.finish(index))  # type: ignore[attr-defined]

    def all(self) -> Tensor:
        """Return all answers, [samples, tokens, vocabulary or width]."""
        return torch.stack([self(index) for index in range(len(self._ids))])
