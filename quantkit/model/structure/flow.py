"""Flow of hidden states through a model, found on a few tokens by its own forward, without most weights.

Every block is replaced by a stand-in. The first of each class runs a real block, to learn the form of its output; the
others return their input. Then the forward runs again with different outputs. If a later block now receives other
arguments, or hidden states other than the previous block's output, blocks depend on each other in ways that cannot be
recorded, and the model is live (see `streaming/calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quantkit.errors import InputError
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.model.streaming.calls import (
    NO_PICTURES,
    Given,
    Pictures,
    Stand,
    forward,
    primary,
    same,
    standing_in,
    uncached,
    unsupported,
)
from quantkit.model.structure.traced import blocks_of

# sequences and tokens of the probe
_ROWS, _TOKENS = 2, 8
# change of the outputs in the second run
_MOVED = 0.25


@dataclass(frozen=True)
class Flow:
    """Flow of hidden states.

    Args:
        visits: number of the block of each call, in order; a block may be called several times.
        live: True if the forward itself has to run.
        forms: class of a block -> number of other values in its output tuple; None for a plain tensor.
        batch: dimension of the sequences in hidden states.
    """

    visits: tuple[int, ...]
    live: bool
    forms: dict[type, int | None] = field(default_factory=dict)
    batch: int = 0

    def output(self, block: nn.Module, hidden: Tensor) -> Any:
        """Wrap hidden states like the output of a block of that class."""
        while isinstance(block, Stand):
            block = block.__dict__["stands_for"]
        others = self.forms[type(block)]
        return hidden if others is None else (hidden, *[None] * others)


@torch.no_grad()
def learn(
    model: nn.Module,
    paths: Sequence[str],
    load: Callable[[int], nn.Module],
    ids: Tensor,
    runs: nn.Module | None = None,
    pictures: Pictures = NO_PICTURES,
) -> Flow:
    """Learn the flow of a model, with the arguments of `stream.record`, on a few of `ids`; `load` returns a block with
    weights. If a sequence has images, the flow is learned on that one, whole.

    Raises:
        InputError: `stream-unsupported`, with the error of the model's class; `out-of-memory`.
    """
    few = ids[:_ROWS, :_TOKENS]
    if len(few) < _ROWS:
        few = few.repeat(_ROWS, 1)
    seeing = pictures.first(ids)
    few = few if seeing is None else seeing
    try:
        with uncached(model):
            return _learn(_Runner(model, paths, load, runs or model, few, pictures))
    except InputError:
        raise
    except Exception as problem:  # a class may raise anything on stand-ins
        if is_out_of_memory(problem):
            raise out_of_memory(type(model).__name__, problem) from problem
        text = " ".join(str(problem).split())[:160]
        raise unsupported(type(model).__name__, f"{type(problem).__name__}: {text}") from problem


def _learn(runner: _Runner) -> Flow:
    try:
        runner.run()
        first = runner.noted
        runner.moving = True
        runner.run()
        live = runner.departed or [index for index, _ in first] != [index for index, _ in runner.noted]
        live = live or not same([call for _, call in first], [call for _, call in runner.noted])
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as problem:
        if is_out_of_memory(problem):
            raise
        live = True  # it uses other outputs of blocks than hidden states
    batch = runner.batch() if runner.shape else 0
    live = live or batch != 0
    if live:
        runner.real = True
        runner.run()
    visits, count = tuple(index for index, _ in runner.noted), len(runner.blocks)
    if set(visits) != set(range(count)) or list(visits) != sorted(visits):
        value = f"calls {len(set(visits))} of {count} blocks, or not in their order"
        raise unsupported(type(runner.runs).__name__, value)
    return Flow(visits, live, runner.forms, runner.batch())


class _Runner:
    """Runner of a forward with stand-ins that record their arguments; with `real`, every block runs."""

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        load: Callable[[int], nn.Module],
        runs: nn.Module,
        ids: Tensor,
        pictures: Pictures,
    ) -> None:
        self.pictures = pictures
        self.model, self.paths, self.load, self.runs, self.ids = model, paths, load, runs, ids
        self.blocks = blocks_of(model, paths)
        self.real = self.moving = self.departed = False
        self.forms: dict[type, int | None] = {}
        self.leaves_more: set[type] = set()  # classes that return tensors besides the hidden states
        self.noted: list[tuple[int, Given]] = []
        self.shape: tuple[int, ...] = ()
        self._before: Tensor | None = None
        self._loaded: tuple[int, nn.Module] | None = None

    def run(self) -> None:
        self.noted, self._before, self.departed = [], None, False
        with standing_in(self.model, self.paths, self._takes):
            forward(self.runs, self.ids, self.pictures)

    def batch(self) -> int:
        """Return the dimension of the sequences."""
        if len(self.ids) not in self.shape:
            raise unsupported("hidden states", f"of shape {list(self.shape)} for {len(self.ids)} sequences")
        return self.shape.index(len(self.ids))

    def _takes(self, index: int, hidden: Tensor, rest: Given) -> Any:
        block = self.blocks[index]
        self.noted.append((index, rest))
        self.shape = self.shape or tuple(hidden.shape)
        if any(hasattr(leaf, "get_seq_length") for leaf in rest.leaves()):
            raise unsupported(type(block).__name__, "receives a cache although caching is off")
        values = (*rest.args, *rest.kwargs.values())
        if any(isinstance(value, MutableMapping) and (not isinstance(value, dict) or not value) for value in values):
            self.departed = True  # a block may pass values to another through it
        if not hidden.is_floating_point():
            raise unsupported(type(block).__name__, f"is given {hidden.dtype} for hidden states")
        if self._before is not None and (hidden.shape != self._before.shape or not torch.equal(hidden, self._before)):
            self.departed = True
        if self.real or type(block) not in self.forms:
            returned = rest.run(self._block(index), hidden)
            self.forms[type(block)] = len(returned) - 1 if isinstance(returned, tuple) else None
            if isinstance(returned, tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(returned[1:])):
                self.leaves_more.add(type(block))
            self.departed |= primary(returned).shape != hidden.shape or not isinstance(returned, tuple | Tensor)
            if self.real:
                return returned
        after = hidden
        if self.moving:
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(index), dtype=hidden.dtype)
            after = hidden + _MOVED * hidden.std() * noise.to(hidden.device)
        self._before = after
        others = self.forms[type(block)]
        if others is None:
            return after
        if self.moving and type(block) in self.leaves_more:
            return (after, *rest.run(self._block(index), hidden)[1:])
        return (after, *[None] * others)

    def _block(self, index: int) -> nn.Module:
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = (index, self.load(index))
        return self._loaded[1]
