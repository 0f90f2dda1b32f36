"""What the passes see of real life: the inputs of each shared input, while a block runs on the calibration set.

A run is *staged*: when execution reaches the first linear of a shared input, its statistics are complete and the pass
may change the linears before they run, so that what follows in the block already sees quantized linears. If all
sequences fit into one forward, the forward simply pauses there, and one run serves all stages and yields the block's
output as well. Else every stage replays the block up to its point, chunk by chunk, so that memory stays bounded.

Sums are deterministic: a fixed number of partials, in a fixed order, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.stream import Calls
from quantkit.model.structure import SharedInput

# columns of a Hessian that are summed at a time; only the part on and above the diagonal is
_PANEL = 256


class InputStats:
    """The inputs of one shared input, as sums over two halves: every other sequence, so that chunks do not matter.

    Args:
        inputs: chunks [sequences, tokens, K] in order; or [tokens, K], of which every other token counts as a sequence.
        name: of the shared input, for errors.
    """

    def __init__(self, inputs: Iterable[Tensor] = (), name: str = "") -> None:
        self._name = name
        self.tokens = 0
        self._halves: list[Tensor] = []
        self._counts = [0, 0]
        self._sequences = 0
        self._hessian: Tensor | None = None
        self._sum = torch.zeros(0, dtype=torch.float64)
        self._absmax = torch.zeros(0)
        for part in inputs:
            self.add(part)

    def add(self, part: Tensor) -> None:
        """Add a chunk [sequences, tokens, K] or [tokens, K].

        Raises:
            InputError: `activations-nonfinite`.
        """
        # sums of half-precision products lose what they are for
        part = part.float()
        width = part.shape[-1]
        if not self._halves:
            self._halves = [torch.zeros(width, width) for _ in range(2)]
            self._sum, self._absmax = self._sum.new_zeros(width), self._absmax.new_zeros(width)
        for half in range(2):
            piece = part[(half + self._sequences) % 2 :: 2].reshape(-1, width)
            for left in range(0, width, _PANEL):
                panel = self._halves[half][left : left + _PANEL, left:]
                panel.addmm_(piece[:, left : left + _PANEL].T, piece[:, left:])
            self._counts[half] += piece.shape[0]
        self.tokens += part.numel() // width
        self._sequences += part.shape[0]
        # a square is finite if its root is, and there are far fewer of them
        if not all(bool(torch.isfinite(half.diagonal()).all()) for half in self._halves):
            raise InputError(
                "activations-nonfinite",
                where=self._name,
                value=f"{int((~torch.isfinite(part)).sum())} NaN or infinite inputs",
                rule="calibration needs finite activations",
                remedy="check the model with another text, or leave this layer in high precision",
            )
        self._hessian = None
        flat = part.reshape(-1, width)
        self._sum += flat.sum(dim=0).double()
        if flat.shape[0]:
            low, high = torch.aminmax(flat, dim=0)
            self._absmax = torch.maximum(self._absmax, torch.maximum(-low, high))

    @property
    def absmax(self) -> Tensor:
        """`max |x_k|` over all tokens, [K] float32."""
        return self._absmax

    @property
    def mean(self) -> Tensor:
        """The mean input, [K] float32."""
        return (self._sum / max(self.tokens, 1)).float()

    @property
    def hessian(self) -> Tensor:
        """`Xᵀ X / tokens`, [K, K] float32."""
        if self._hessian is None:
            upper = (self._halves[0] + self._halves[1]).triu_()
            self._hessian = upper.add_(upper.triu(1).T).div_(self.tokens)
        return self._hessian

    @property
    def noise(self) -> float:
        """How much of the Hessian beside its diagonal is chance: 0..1, the best share to take off.

            λ = sum of the variances of r_ij / sum of r_ij²,   i ≠ j,   estimated as  ¼ ||R₁ - R₂||² / ||R||²

        with R₁, R₂ the correlations in two halves of the tokens and R in all of them. (Schäfer and Strimmer, "A
        Shrinkage Approach to Large-Scale Covariance Matrix Estimation", 2005, for shrinking towards the diagonal.)
        """
        if min(self._counts) == 0:
            return 1.0
        size = self.hessian.diagonal().clamp(min=0).sqrt()
        size = torch.where(size > 0, size, torch.inf)
        both, apart = 0.0, 0.0
        for left in range(0, size.numel(), _PANEL):
            rows = slice(left, left + _PANEL)
            scale = size[rows].unsqueeze(1) * size[left:]
            first, second = (
                (half[rows, left:] / count / scale).triu_(1)
                for half, count in zip(self._halves, self._counts, strict=True)
            )
            apart += float((first - second).square().sum())
            both += float((self.hessian[rows, left:] / scale).triu_(1).square().sum())
        return min(1.0, apart / 4 / both) if both > 0 else 1.0


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
                    visit(group, InputStats([args[0]], group.name))

            return hook

        hooks = [self.module.get_submodule(group.name).register_forward_pre_hook(pause(group)) for group in self.groups]
        try:
            self.outputs = self.calls.run(self.module, self.index, self.hidden)
        finally:
            for hook in hooks:
                hook.remove()

    def _replaying(self, visit: Visit) -> None:
        for group in self.groups:
            sums = InputStats(name=group.name)

            def catch(_: nn.Module, args: tuple[Tensor, ...], sums: InputStats = sums) -> None:
                sums.add(args[0])
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
