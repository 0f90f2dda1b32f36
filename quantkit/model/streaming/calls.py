"""How a model calls its blocks: noted once where nothing depends on what blocks put out, else asked of its own forward.

A transformer is `rest -> block -> block -> ... -> rest`, and a block is given more than hidden states: masks, rotary
tables, a slice of per-layer embeddings, what an earlier block has left for it. `structure/flow.py` finds out, on a few
tokens, of which kind a model is:

    recorded   the next block reads what the last one put out, unchanged, and nothing else that any block made. The
               model's forward runs once for each chunk with stand-ins for its blocks, which note what they are given.
    live       all others. The forward of each chunk is suspended (a greenlet) where it calls a block, and goes on with
               what the block has put out; whatever stands between two blocks is the model's own code (`live.py`).

Tensors of a whole calibration set (hidden states, per-layer embeddings, masks, what a forward that stands still holds
in its variables) lie in files without a name from `ON_DISK` bytes on, and the system has their pages in memory as it
can: see `Shelf`.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from quantkit import content
from quantkit.errors import InputError

ON_DISK = 1 << 30
_HIDDEN = "hidden_states"
# bytes of one file of a shelf; and what is smaller than this stays where it is
_FILE, _LEAST, _ALIGNED = 1 << 26, 1 << 10, 64


@dataclass(frozen=True)
class Given:
    """What a block is given besides hidden states; `name` is theirs, where it is another than `hidden_states`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Given]:
        """Take the hidden states out of a block's arguments. Raises InputError (`stream-unsupported`)."""
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
        """Run a block; whatever it returns."""
        if self.name:
            return block(*self.args, **{self.name: hidden}, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)

    def on(self, device: torch.device) -> Given:
        """Put its tensors on a device; where they are there already, it is itself."""
        if all(leaf.device == device for leaf in self.leaves() if isinstance(leaf, Tensor)):
            return self
        return self.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    def mapped(self, change: Callable[[Any], Any]) -> Given:
        """Change every value."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return Given(args, kwargs, self.name)

    def leaves(self) -> list[Any]:
        """List all values, in order."""
        return list(tree_flatten((self.args, self.kwargs))[0])

    def row(self, index: int, rows: int) -> Given:
        """Cut tensors that have one entry for each of `rows` sequences to one sequence; others stay."""

        def cut(value: Any) -> Any:
            by_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows and rows > 1
            return value[index : index + 1] if by_row else value

        return self.mapped(cut)


def same(some: Sequence[Given], others: Sequence[Given]) -> bool:
    """Tell whether two lists of calls are given equal values."""
    seen: dict[tuple[int, int], bool] = {}  # a mask is given to every block: it is compared once

    def equal(one: Any, other: Any) -> bool:
        key = (id(one), id(other))
        if key not in seen:
            seen[key] = _equal(one, other)
        return seen[key]

    mine, shape = tree_flatten([(call.args, call.kwargs) for call in some])
    theirs, other_shape = tree_flatten([(call.args, call.kwargs) for call in others])
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

    def of(self, chunk: Sequence[Given], first: Sequence[Given] | None) -> list[Given]:
        """Keep one chunk's calls, with `first` of the first chunk."""
        mine, shape = tree_flatten([(call.args, call.kwargs) for call in chunk])
        theirs, other_shape = tree_flatten([(call.args, call.kwargs) for call in first or ()])
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
        return [Given(args, kwargs, call.name) for call, (args, kwargs) in zip(chunk, pairs, strict=True)]

    def _kept(self, one: Tensor, other: Any) -> Tensor:
        if isinstance(other, Tensor) and _equal(one, other):
            return other
        self._bytes += one.nbytes
        return one if self._bytes < ON_DISK else self._shelf.copy(one)


@dataclass(frozen=True)
class Call:
    """How to run one block on a few tokens: the hidden states and the other arguments."""

    hidden: Tensor
    given: Given = field(default_factory=Given)

    def __call__(self, block: Callable[..., Any]) -> Tensor:
        """Run a block."""
        return primary(self.given.run(block, self.hidden))

    def shapes(self) -> Call:
        """Drop the values, for a block whose parameters have none."""
        return Call(shape_of(self.hidden), self.given.mapped(shape_of))

    def double(self) -> Call:
        """Return the same in float64."""
        return Call(self.hidden.double(), Given(_double(self.given.args), _double(self.given.kwargs), self.given.name))


def shape_of(value: Any) -> Any:
    """Return a tensor that has shape and dtype alone; whatever else is as it is."""
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        doubled = {key: _double(inner) for key, inner in value.items()}
        return doubled if isinstance(value, dict) else type(value)(doubled)  # type: ignore[call-arg]
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
        self.hidden, self.chunk = hidden, chunk
        self.device = hidden.device if device is None else device
        self._given, self._alone = given, alone

    def call(self, stage: int) -> Call:
        """Return a call as on the first chunk, with the hidden states that the first block is given."""
        return Call(self.hidden[: self.chunk].to(self.device), self._given[0][stage].on(self.device))

    def forward(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on chunk number `part`, with gradients where those are enabled."""
        return primary(self._given[part][stage].on(self.device).run(block, hidden.to(self.device)))

    def forward_row(self, block: nn.Module, stage: int, hidden: Tensor, row: int) -> Tensor:
        """Run a block likewise on one sequence [1, tokens, width], number `row` of all."""
        if self._alone is not None:
            rest = self._alone[stage]
        else:
            part, index = divmod(row, self.chunk)
            rest = self._given[part][stage].row(index, min(self.chunk, self.hidden.shape[0] - part * self.chunk))
        return primary(rest.on(self.device).run(block, hidden.to(self.device)))

    def tensors(self) -> list[Tensor]:
        """List all that blocks are given besides hidden states, on the first chunk, in order."""
        return [leaf for rest in self._given[0] for leaf in rest.leaves() if isinstance(leaf, Tensor)]

    @torch.no_grad()
    def run(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on one chunk, [at most chunk, tokens, width]."""
        return self.forward(block, stage, hidden, part)

    def chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """Cut `hidden` into forwards' worth, in the order of their numbers."""
        for part in hidden.split(self.chunk):
            yield part.to(self.device)

    @torch.no_grad()
    def run_all(self, block: nn.Module, stage: int, hidden: Tensor) -> Tensor:
        """Run a block on everything, [samples, tokens, width]; the output is on disk if it is large."""
        parts = (self.run(block, stage, part, number) for number, part in enumerate(self.chunks(hidden)))
        return gathered(parts, hidden.shape[0], hidden.device)

    def pass_on(self, stage: int, hidden: Tensor) -> Tensor:
        """Return what the next call is given as hidden states, of what this one has put out."""
        return hidden


def unsupported(where: str, value: str) -> InputError:
    """Make the error for a model that cannot be run block by block."""
    rule = "a model runs block by block, each on the hidden states of the one before"
    remedy = "no recipe works on this architecture yet; the ONNX graph of it can be compiled (docs/models.md)"
    return InputError("stream-unsupported", where, value, rule, remedy)


def primary(output: Any) -> Tensor:
    """Return the hidden states out of what a block returns: a tensor, or a tuple or mapping that begins with it."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()))
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def gathered(parts: Iterable[Tensor], samples: int, device: torch.device | None = None) -> Tensor:
    """Gather chunks [n, tokens, width] in one tensor; from `ON_DISK` bytes on, in a file."""
    whole: Tensor | None = None
    start = 0
    for part in parts:
        if whole is None:
            if part.shape[0] == samples:
                return part if device is None else part.to(device)
            shape, place = (samples, *part.shape[1:]), device or part.device
            if place.type == "cpu" and math.prod(shape) * part.itemsize >= ON_DISK:
                whole = in_file(math.prod(shape), part.dtype).reshape(shape)
            else:
                whole = torch.empty(shape, dtype=part.dtype, device=place)
        whole[start : start + part.shape[0]] = part
        start += part.shape[0]
    assert whole is not None
    return whole


# --- stand-ins ----------------------------------------------------------------------------------------------------


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """Let no forward of the model make a cache, whichever of its classes would by its config.

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
    """Do the same for good, for a model that is nobody else's; the configs of blocks behind stand-ins are left."""
    for config in _caching(model):
        config.use_cache = False


def _caching(model: nn.Module) -> list[Any]:
    modules = (module for module in model.modules() if not isinstance(module, Stand))
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


def forward(model: nn.Module, ids: Tensor) -> Any:
    """Run the model's own forward on ids [samples, tokens]; `uncached` has to be around it."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids, **options)


class Stand(nn.Module):
    """Stands where a block stands: `takes` is handed its number, the hidden states and the other arguments, and gives
    what the block returns; whatever else a model asks of a block, `block` answers.
    """

    def __init__(self, block: nn.Module, index: int, takes: Callable[[int, Tensor, Given], Any]) -> None:
        super().__init__()
        self.__dict__["stands_for"] = block  # not a submodule: its weights are not there
        self.index, self.takes = index, takes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the block would be called with."""
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
    """Put a `Stand` in the place of every block of `model`, as long as it lasts."""
    parent, _, leaf = path.rpartition(".")
    blocks = model.get_submodule(path)
    stand_in(model, path, takes)
    try:
        yield
    finally:
        setattr(model.get_submodule(parent), leaf, blocks)


# --- files without a name -----------------------------------------------------------------------------------------


def in_file(count: int, dtype: torch.dtype) -> Tensor:
    """Make room for so many elements in a file without a name: it is gone when nothing refers to it any more."""
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-") as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)


class Shelf:
    """Files that tensors are put into, one after the other; a file is gone when no tensor in it is left."""

    def __init__(self) -> None:
        self._file: Tensor | None = None
        self._taken = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into a file; a small one, and what lies in one, stays as it is."""
        if tensor.nbytes < _LEAST or _is_in_file(tensor):
            return tensor
        file, start = self._room(tensor.nbytes)
        place = file[start : start + tensor.nbytes]
        return place.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)

    def move(self, tensors: Iterable[Tensor], fixed: Collection[int] = ()) -> None:
        """Move what tensors hold into files, in place: each stays the object that it is, and views stay views.

        What somebody else has a view of too is left: a change of one would not be seen in the other any more. So is
        what lies at `fixed` addresses, such as parameters.
        """
        for users in _by_storage(tensors):
            storage = users[0].untyped_storage()
            count = storage.nbytes()
            if count < _LEAST or storage.data_ptr() in fixed or _is_in_file(users[0]) or not all(map(_can_move, users)):
                continue
            if torch._C._storage_Use_Count(storage._cdata) != len(users) + 1:  # ours, while we look
                continue
            file, start = self._room(count)
            file[start : start + count] = torch.empty(0, dtype=torch.uint8).set_(storage)
            for user in users:
                offset = start // user.itemsize + user.storage_offset()
                place = torch.empty(0, dtype=user.dtype)
                user.data = place.set_(file.untyped_storage(), offset, user.shape, user.stride())

    def _room(self, size: int) -> tuple[Tensor, int]:
        if self._file is None or self._taken + size > len(self._file):
            self._file, self._taken = in_file(max(size, _FILE), torch.uint8), 0
        start = self._taken
        self._taken = -(-(start + size) // _ALIGNED) * _ALIGNED
        return self._file, start


def held(frame: FrameType | None) -> list[Tensor]:
    """List the tensors in the variables of a frame that stands still and of its callers, with what they view."""
    tensors: dict[int, Tensor] = {}
    while frame is not None:
        for leaf in tree_flatten(list(frame.f_locals.values()))[0]:
            viewed = leaf
            while isinstance(viewed, Tensor):
                tensors[id(viewed)] = viewed
                viewed = viewed._base
        frame = frame.f_back
    return list(tensors.values())


def size(tensors: Iterable[Tensor], fixed: Collection[int] = ()) -> int:
    """Count the bytes that they hold, wherever that is, each once; without what lies at `fixed` addresses."""
    storages = (users[0].untyped_storage() for users in _by_storage(tensors))
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in fixed)


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            groups.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


def _is_in_file(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def _can_move(tensor: Tensor) -> bool:
    # one that is conjugated or negated when it is read says so in itself, and not by what it holds
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
