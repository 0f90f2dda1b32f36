"""How a model calls its blocks: noted once where nothing depends on what blocks put out, else asked of its own forward.

A transformer is `rest -> block -> block -> ... -> rest`, and a block is given more than hidden states: masks, rotary
tables, a slice of per-layer embeddings, what an earlier block has left for it. `structure/flow.py` finds out, on a few
tokens, of which kind a model is:

    recorded   the next block reads what the last one put out, unchanged, and nothing else that any block made. The
               model's forward runs once for each chunk with stand-ins for its blocks, which note what they are given.
    live       all others. The forward of each chunk is suspended (a greenlet) where it calls a block, and goes on with
               what the block has put out; whatever stands between two blocks is the model's own code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from quantkit.errors import InputError
from quantkit.model.streaming.shelf import Shelf, in_file

# hidden states of a whole calibration set from this many bytes on lie in a file, and memory stays bounded
ON_DISK = 1 << 30
_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class Given:
    """What a block is given besides hidden states.

    Args:
        args: positional, those after the hidden states if these are positional.
        name: of the hidden states, where they are given by another name than `hidden_states`.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Given]:
        """The hidden states out of a block's arguments, and the others. Raises InputError (`stream-unsupported`)."""
        kwargs = dict(kwargs)
        if _HIDDEN in kwargs:
            return kwargs.pop(_HIDDEN), cls(args, kwargs)
        if args and isinstance(args[0], Tensor):
            return args[0], cls(args[1:], kwargs)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2:
                return kwargs.pop(name), cls(args, kwargs, name)
        raise unsupported("a block", "is given no hidden states")

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Any:
        """Whatever the block returns."""
        if self.name:
            return block(*self.args, **{self.name: hidden}, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)

    def on(self, device: torch.device) -> Given:
        """With its tensors there; where they are already, as it is."""
        if all(leaf.device == device for leaf in self.leaves() if isinstance(leaf, Tensor)):
            return self
        args, kwargs = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        return Given(args, kwargs, self.name)

    def leaves(self) -> list[Any]:
        """All values, in order."""
        found: list[Any] = tree_flatten((self.args, self.kwargs))[0]
        return found

    def row(self, index: int, rows: int) -> Given:
        """Of one sequence of `rows`: tensors that have one entry a sequence are cut, others stay."""

        def cut(value: Any) -> Any:
            by_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows and rows > 1
            return value[index : index + 1] if by_row else value

        return Given(tree_map(cut, self.args), tree_map(cut, self.kwargs), self.name)


def same(some: Sequence[Given], others: Sequence[Given]) -> bool:
    """Whether two lists of calls are given equal values."""
    seen: dict[tuple[int, int], bool] = {}  # a mask is given to every block: it is compared once

    def equal(one: Any, other: Any) -> bool:
        key = (id(one), id(other))
        if key not in seen:
            seen[key] = _equal(one, other)
        return seen[key]

    mine, shape = tree_flatten([(each.args, each.kwargs) for each in some])
    theirs, other_shape = tree_flatten([(each.args, each.kwargs) for each in others])
    return bool(shape == other_shape) and all(map(equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # objects that hold tensors and compare them element by element
        return False


class Kept:
    """What blocks are given on chunks whose text matters to it: per-layer embeddings, masks. What is as on the first
    chunk is kept once; of the rest, what does not fit below `ON_DISK` bytes lies in files, as hidden states do."""

    def __init__(self) -> None:
        self._shelf = Shelf()
        self._bytes = 0

    def of(self, given: Sequence[Given], first: Sequence[Given] | None) -> list[Given]:
        """One chunk's, call by call, with `first` of the first chunk."""
        mine, shape = tree_flatten([(each.args, each.kwargs) for each in given])
        theirs, other_shape = tree_flatten([(each.args, each.kwargs) for each in first or ()])
        if shape != other_shape:
            theirs = [None] * len(mine)
        seen: dict[tuple[int, int], Any] = {}  # a mask is given to every block: it is kept once
        kept = []
        for one, other in zip(mine, theirs, strict=True):
            key = (id(one), id(other))
            if key not in seen:
                seen[key] = self._kept(one, other) if isinstance(one, Tensor) else one
            kept.append(seen[key])
        pairs = tree_unflatten(kept, shape)
        return [Given(args, kwargs, each.name) for each, (args, kwargs) in zip(given, pairs, strict=True)]

    def _kept(self, one: Tensor, other: Any) -> Tensor:
        if isinstance(other, Tensor) and _equal(one, other):
            return other
        self._bytes += one.numel() * one.itemsize
        return one if self._bytes < ON_DISK else self._shelf.copy(one)


@dataclass(frozen=True)
class Call:
    """How to run one block on a few tokens: the hidden states and the other arguments."""

    hidden: Tensor
    given: Given = field(default_factory=Given)

    def __call__(self, block: Callable[..., Any]) -> Tensor:
        """The block's output."""
        return primary(self.given.run(block, self.hidden))

    def shapes(self) -> Call:
        """The same without values, for a block whose parameters have none."""
        args, kwargs = tree_map(shape_of, (self.given.args, self.given.kwargs))
        return Call(shape_of(self.hidden), Given(args, kwargs, self.given.name))

    def double(self) -> Call:
        """The same in float64."""
        given = Given(_double(self.given.args), _double(self.given.kwargs), self.given.name)
        return Call(self.hidden.double(), given)


def shape_of(value: Any) -> Any:
    """A tensor that has shape and dtype alone; whatever else is as it is."""
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        made = {key: _double(inner) for key, inner in value.items()}
        return made if isinstance(value, dict) else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return type(value)(_double(inner) for inner in value)
    return value


class Calls:
    """Recorded: the first block's input, and what every block is given on each chunk.

    Args:
        hidden: [samples, tokens, width] float32, the first block's input.
        chunk: sequences per forward.
        given: of each chunk, one a call.
        alone: of each call on one sequence, where that is the same for all; None: a chunk's can be cut row by row.
        device: where blocks run; hidden states of everything may lie elsewhere. None: where they lie.
    """

    live = False

    def __init__(
        self,
        hidden: Tensor,
        chunk: int,
        given: Sequence[Sequence[Given]],
        alone: Sequence[Given] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.hidden = hidden
        self.device = hidden.device if device is None else device
        self.chunk = chunk
        self._given = given
        self._alone = alone

    def call(self, stage: int) -> Call:
        """A call as on the first chunk, with the hidden states that the first block is given."""
        return Call(self.hidden[: self.chunk].to(self.device), self._given[0][stage].on(self.device))

    def forward(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """The block's output on chunk number `part`, with gradients where those are enabled."""
        return primary(self._given[part][stage].on(self.device).run(block, hidden.to(self.device)))

    def forward_row(self, block: nn.Module, stage: int, hidden: Tensor, row: int) -> Tensor:
        """The same on one sequence [1, tokens, width], number `row` of all."""
        if self._alone is not None:
            return primary(self._alone[stage].on(self.device).run(block, hidden.to(self.device)))
        part, index = divmod(row, self.chunk)
        rows = min(self.chunk, self.hidden.shape[0] - part * self.chunk)
        given = self._given[part][stage].row(index, rows).on(self.device)
        return primary(given.run(block, hidden.to(self.device)))

    def tensors(self) -> list[Tensor]:
        """All that blocks are given besides hidden states, on the first chunk, in order."""
        return [leaf for given in self._given[0] for leaf in given.leaves() if isinstance(leaf, Tensor)]

    @torch.no_grad()
    def run(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """The block's output on one chunk, [at most chunk, tokens, width]."""
        return self.forward(block, stage, hidden, part)

    def chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """`hidden` in forwards' worth, in the order of their numbers."""
        for part in hidden.split(self.chunk):
            yield part.to(self.device)

    @torch.no_grad()
    def run_all(self, block: nn.Module, stage: int, hidden: Tensor) -> Tensor:
        """The block's output on everything, [samples, tokens, width]; on disk if it is large."""
        parts = (self.run(block, stage, part, number) for number, part in enumerate(self.chunks(hidden)))
        return gathered(parts, hidden.shape[0], hidden.device)

    def pass_on(self, stage: int, hidden: Tensor) -> Tensor:
        """What the next call is given as hidden states, of what this one has put out."""
        return hidden


def unsupported(where: str, value: str) -> InputError:
    """The error for a model that cannot be run block by block."""
    return InputError(
        "stream-unsupported",
        where=where,
        value=value,
        rule="a model runs block by block, each on the hidden states of the one before",
        remedy="no recipe works on this architecture yet; the ONNX graph of it can be compiled (docs/models.md)",
    )


def primary(output: Any) -> Tensor:
    """The hidden states out of what a block returns: a tensor, or a tuple or mapping that begins with it."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()))
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def gathered(parts: Iterable[Tensor], samples: int, device: torch.device | None = None) -> Tensor:
    """Chunks [n, tokens, width] as one tensor [samples, tokens, width]; from `ON_DISK` bytes on, in a file.

    The file has no name: it is gone when nothing refers to it any more.

    Args:
        device: where it is to lie, which is the CPU if all of it does not fit beside a block; None: where its parts do.
    """
    whole: Tensor | None = None
    start = 0
    for part in parts:
        if whole is None:
            if part.shape[0] == samples:
                return part if device is None else part.to(device)
            whole = _room((samples, *part.shape[1:]), part.dtype, device or part.device)
        whole[start : start + part.shape[0]] = part
        start += part.shape[0]
    assert whole is not None
    return whole


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < ON_DISK:
        return torch.empty(shape, dtype=dtype, device=device)
    return in_file(count, dtype).reshape(shape)


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """Within it no forward of the model makes a cache, whichever of its classes would by its config.

    What is put back is what was there when it began: one is left before another that began earlier is.
    """
    before = [(config, config.use_cache) for config in _caching(model)]
    without_cache(model)
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def without_cache(model: nn.Module) -> None:
    """The same for good, for a model that is nobody else's. A stand-in's config is its block's, which is not asked."""
    for config in _caching(model):
        config.use_cache = False


def _caching(model: nn.Module) -> list[Any]:
    modules = (module for module in model.modules() if not isinstance(module, Stand))
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


def forward(model: nn.Module, ids: Tensor) -> Any:
    """What the model's own forward gives for ids [samples, tokens]; `uncached` has to be around it."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids, **options)


class Stand(nn.Module):
    """Stands where a block stands; `takes` is handed what the block is given and gives what it returns.

    Args:
        block: whatever a model asks of a block besides calling it, this answers.
        takes: (number, hidden states, other arguments) -> the block's output.
    """

    def __init__(self, block: nn.Module, index: int, takes: Callable[[int, Tensor, Given], Any]) -> None:
        super().__init__()
        self.__dict__["stands_for"] = block  # not a submodule: its weights are not there
        self.index = index
        self.takes = takes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the block is called."""
        return self.takes(self.index, *Given.of(args, kwargs))


def stand_in(model: nn.Module, path: str, takes: Callable[[int, Tensor, Given], Any]) -> None:
    """Put a `Stand` in the place of every block of `model`, for good."""
    parent, _, leaf = path.rpartition(".")
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    stands = nn.ModuleList(Stand(block, index, takes) for index, block in enumerate(blocks))
    setattr(model.get_submodule(parent), leaf, stands)


@contextmanager
def standing_in(model: nn.Module, path: str, takes: Callable[[int, Tensor, Given], Any]) -> Iterator[None]:
    """Within it every block of `model` is a `Stand`."""
    parent, _, leaf = path.rpartition(".")
    blocks = model.get_submodule(path)
    stand_in(model, path, takes)
    try:
        yield
    finally:
        setattr(model.get_submodule(parent), leaf, blocks)
