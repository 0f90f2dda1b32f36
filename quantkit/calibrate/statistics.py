"""What the passes see of real life: the inputs of each shared input, while a block runs on the calibration set.

A run is *staged*: when execution reaches the first linear of a shared input, its statistics are complete and the pass
may change the linears before they run, so that what follows in the block already sees quantized linears. If all
sequences fit into one forward, the forward simply pauses there, and one run serves all stages and yields the block's
output as well. Else every stage replays the block up to its point, chunk by chunk, so that memory stays bounded.

Sums are deterministic: a fixed number of partials, in a fixed order, whatever the number of threads that add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.stream import Calls
from quantkit.model.structure import SharedInput

PARTIALS = 8


class InputStats:
    """The inputs of one shared input, as sums.

    Args:
        inputs: chunks [tokens, K], in order.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._inputs = list(inputs)
        self._hessian: Tensor | None = None
        self.tokens = sum(part.shape[0] for part in self._inputs)

    @property
    def hessian(self) -> Tensor:
        """`Xᵀ X / tokens`, [K, K] float32."""
        if self._hessian is None:
            total: Tensor | None = None
            for part in self._inputs:
                for piece in part.tensor_split(PARTIALS):
                    total = piece.T @ piece if total is None else total.addmm_(piece.T, piece)
            assert total is not None
            self._hessian = total / self.tokens
        return self._hessian

    @property
    def mean_abs(self) -> Tensor:
        """`mean |x|` of each input, [K]."""
        return sum((part.abs().sum(0) for part in self._inputs), torch.zeros(())) / self.tokens

    def sample(self, rows: int) -> Tensor:
        """Evenly spread inputs, [at most rows, K]."""
        every = torch.cat(self._inputs)
        if every.shape[0] <= rows:
            return every
        return every[torch.linspace(0, every.shape[0] - 1, rows).long()]


class _SumStats(InputStats):
    """The same when inputs come chunk by chunk and are not kept: only the Hessian and the mean."""

    def __init__(self) -> None:
        super().__init__([])
        self._total: Tensor | None = None
        self._absolute: Tensor | None = None
        self._kept: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        for piece in part.tensor_split(PARTIALS):
            self._total = piece.T @ piece if self._total is None else self._total.addmm_(piece.T, piece)
        absolute = part.abs().sum(0)
        self._absolute = absolute if self._absolute is None else self._absolute + absolute
        self._kept.append(part[:: max(1, part.shape[0] // 256)].clone())
        self.tokens += part.shape[0]

    @property
    def hessian(self) -> Tensor:
        assert self._total is not None
        return self._total / self.tokens

    @property
    def mean_abs(self) -> Tensor:
        assert self._absolute is not None
        return self._absolute / self.tokens

    def sample(self, rows: int) -> Tensor:
        every = torch.cat(self._kept)
        return every if every.shape[0] <= rows else every[torch.linspace(0, every.shape[0] - 1, rows).long()]


class _Reached(Exception):
    """Ends a replay at the shared input it was for."""


Visit = Callable[[SharedInput, InputStats], None]


@dataclass
class Stats:
    """A block together with what it is run on.

    Args:
        module: the block.
        groups: its shared inputs, in the order they run.
        calls: how the block is called.
        index: the block's number.
        hidden: [samples, tokens, width], the block's input.
        outputs: the block's output, once a staged run has ended; passes that change weights afterwards reset it.
    """

    module: nn.Module
    groups: tuple[SharedInput, ...]
    calls: Calls
    index: int
    hidden: Tensor
    outputs: Tensor | None = None

    @torch.no_grad()
    def staged(self, visit: Visit) -> None:
        """Run the block on everything; at each shared input call `visit(group, statistics)` before its linears run.

        Raises:
            InputError: `activations-nonfinite`, naming the linear.
        """
        self.outputs = None
        if self.hidden.shape[0] <= self.calls.chunk:
            self._pausing(visit)
        else:
            self._replaying(visit)

    def settled(self) -> Tensor:
        """The block's output with its present weights, [samples, tokens, width]."""
        if self.outputs is None:
            self.outputs = self.calls.run_all(self.module, self.index, self.hidden)
        return self.outputs

    def _pausing(self, visit: Visit) -> None:
        waiting = {group.name: group for group in self.groups}

        def pause(group: SharedInput) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                if waiting.pop(group.name, None) is not None:
                    visit(group, InputStats([_rows(args[0], group)]))

            return hook

        hooks = [self.module.get_submodule(group.name).register_forward_pre_hook(pause(group)) for group in self.groups]
        try:
            self.outputs = self.calls.run(self.module, self.index, self.hidden)
        finally:
            for hook in hooks:
                hook.remove()

    def _replaying(self, visit: Visit) -> None:
        for group in self.groups:
            sums = _SumStats()

            def catch(
                _: nn.Module, args: tuple[Tensor, ...], sums: _SumStats = sums, group: SharedInput = group
            ) -> None:
                sums.add(_rows(args[0], group))
                raise _Reached

            hook = self.module.get_submodule(group.name).register_forward_pre_hook(catch)
            try:
                for part in self.calls.chunks(self.hidden):
                    try:
                        self.calls.run(self.module, self.index, part)
                    except _Reached:
                        continue
            finally:
                hook.remove()
            if sums.tokens:  # as when pausing: what nothing reaches is not visited
                visit(group, sums)
        self.outputs = self.calls.run_all(self.module, self.index, self.hidden)


def _rows(inputs: Tensor, group: SharedInput) -> Tensor:
    # sums of half-precision products lose what they are for
    rows = inputs.reshape(-1, inputs.shape[-1]).float()
    if not bool(torch.isfinite(rows).all()):
        raise InputError(
            "activations-nonfinite",
            where=group.name,
            value=f"{int((~torch.isfinite(rows)).sum())} NaN or infinite inputs",
            rule="calibration needs finite activations",
            remedy="check the model with another text, or leave this layer in high precision",
        )
    return rows
