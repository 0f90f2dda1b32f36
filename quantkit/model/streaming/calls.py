"""Calls of a model's blocks: recorded once if they do not depend on outputs of blocks, else taken from its own forward.

A transformer is `rest -> block -> block -> ... -> rest`, and a block receives more than hidden states: masks, rotary
tables, a slice of per-layer embeddings, values from an earlier block. `structure/flow.py` finds the kind of a model on
a
few tokens:

    recorded   each block reads the unchanged output of the previous one, and no other value from a block. The model's
               forward runs once per chunk with stand-ins for its blocks, which record their arguments.
    live       all other models. The forward of each chunk is suspended (a greenlet) at each call of a block, and
    resumes
               with the block's output; everything between two blocks is the model's own code (`live.py`).

Tensors of a whole calibration set (hidden states, per-layer embeddings, masks, variables of suspended forwards) are
kept
in unnamed files from `ON_DISK` bytes on, and the system caches their pages: see `Shelf`.
"""

from __future__ import annotations

import inspect
import math
import os
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
from quantkit.bundle.disk import stopping_when_full
from quantkit.errors import InputError
from quantkit.model.streaming.sounds import sounds
from quantkit.model.structure.kinds import hears, is_pair

ON_DISK = 1 << 30
_HIDDEN = "hidden_states"
# bytes of one file of a shelf, smallest tensor to move, alignment
_FILE, _LEAST, _ALIGNED = 1 << 26, 1 << 10, 64


@dataclass(frozen=True)
class Given:
    """Arguments of a block beside hidden states; `name` is their keyword, if it is not `hidden_states`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Given]:
        """Split a block's arguments into hidden states and the rest. Raises InputError (`stream-unsupported`)."""
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
        """Run a block, and return its whole output."""
        if self.name:
            return block(*self.args, **{self.name: hidden}, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)

    def on(self, device: torch.device) -> Given:
        """Put its tensors on a device; returns itself if they are there."""
        if all(leaf.device == device for leaf in self.leaves() if isinstance(leaf, Tensor)):
            return self
        return self.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    def mapped(self, change: Callable[[Any], Any]) -> Given:
        """Apply a function to every value."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return Given(args, kwargs, self.name)

    def leaves(self) -> list[Any]:
        """List all values, in order."""
        return list(tree_flatten((self.args, self.kwargs))[0])

    def row(self, index: int, rows: int) -> Given:
        """Cut tensors with one entry per sequence to one sequence; other values stay."""

        def cut(value: Any) -> Any:
            by_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows and rows > 1
            return value[index : index + 1] if by_row else value

        return self.mapped(cut)


def same(some: Sequence[Given], others: Sequence[Given]) -> bool:
    """Tell whether two lists of calls have equal arguments."""
    seen: dict[tuple[int, int], bool] = {}  # every block receives the same mask: compare it once

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
    except (RuntimeError, ValueError):  # objects that compare tensors element by element
        return False


class Kept:
    """Storage of blocks' arguments on chunks that depend on the text: per-layer embeddings, masks.

    Values equal to those of the first chunk are stored once; from `ON_DISK` bytes on, the rest is kept in files.
    """

    def __init__(self) -> None:
        self._shelf = Shelf()
        self._bytes = 0

    def of(self, chunk: Sequence[Given], first: Sequence[Given] | None) -> list[Given]:
        """Store one chunk's calls, given the `first` chunk's."""
        mine, shape = tree_flatten([(call.args, call.kwargs) for call in chunk])
        theirs, other_shape = tree_flatten([(call.args, call.kwargs) for call in first or ()])
        if shape != other_shape:
            theirs = [None] * len(mine)
        seen: dict[tuple[int, int], Any] = {}  # every block receives the same mask: store it once
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
    """A call of one block on a few tokens: the hidden states and the other arguments."""

    hidden: Tensor
    rest: Given = field(default_factory=Given)

    def __call__(self, block: Callable[..., Any]) -> Tensor:
        """Run a block, and return its hidden states."""
        return primary(self.rest.run(block, self.hidden))

    def shapes(self) -> Call:
        """Drop the values, for a block without weights."""
        return Call(shape_of(self.hidden), self.rest.mapped(shape_of))

    def double(self) -> Call:
        """Return the same in float64."""
        return Call(self.hidden.double(), Given(_double(self.rest.args), _double(self.rest.kwargs), self.rest.name))


def shape_of(value: Any) -> Any:
    """Return a tensor of the same shape and dtype without values; other values stay."""
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
    """Recorded calls: the first block's input, and the arguments of every block on each chunk.

    Args:
        hidden: [samples, tokens, width] float32, input of the first block.
        chunk: sequences per forward.
        given: arguments of each chunk, one per call.
        alone: arguments of each call on one sequence, if equal for all; None if a chunk's can be cut row by row.
        device: device of the blocks; None for that of the hidden states.
    """

    live = False

    def __init__(
        self,
        hidden: Tensor,
        chunk: int,
        arguments: Sequence[Sequence[Given]],
        alone: Sequence[Given] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.hidden, self.chunk = hidden, chunk
        self.device = hidden.device if device is None else device
        self._given, self._alone = arguments, alone

    def call(self, stage: int) -> Call:
        """Return a call on the first chunk, with the hidden states of the first block."""
        return Call(self.hidden[: self.chunk].to(self.device), self._given[0][stage].on(self.device))

    def forward(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on chunk number `part`, with gradients if they are enabled."""
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
        """List blocks' tensor arguments beside hidden states, on the first chunk, in order."""
        return [leaf for rest in self._given[0] for leaf in rest.leaves() if isinstance(leaf, Tensor)]

    @torch.no_grad()
    def run(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on one chunk, [at most chunk, tokens, width]."""
        return self.forward(block, stage, hidden, part)

    def chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """Split `hidden` into chunks, in order."""
        for part in hidden.split(self.chunk):
            yield part.to(self.device)

    @torch.no_grad()
    def run_all(self, block: nn.Module, stage: int, hidden: Tensor) -> Tensor:
        """Run a block on all chunks, [samples, tokens, width]; a large output is on disk."""
        parts = (self.run(block, stage, part, number) for number, part in enumerate(self.chunks(hidden)))
        return gathered(parts, hidden.shape[0], hidden.device)

    def pass_on(self, stage: int, hidden: Tensor) -> Tensor:
        """Return the hidden states for the next call, from the output of this one."""
        return hidden


def unsupported(where: str, value: str) -> InputError:
    """Make the error for a model that cannot run block by block."""
    rule = "a model must run block by block, each on the hidden states of the previous one"
    remedy = "no recipe works on this architecture yet; its ONNX graph can be compiled (docs/models.md)"
    return InputError("stream-unsupported", where, value, rule, remedy)


def primary(output: Any) -> Tensor:
    """Return the hidden states from a block's output: a tensor, or the first of a tuple or mapping."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()))
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def gathered(parts: Iterable[Tensor], samples: int, device: torch.device | None = None) -> Tensor:
    """Join chunks [n, tokens, width] to one tensor; in a file from `ON_DISK` bytes on."""
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
    """Prevent the model's forwards from making a cache, in all its configs.

    The settings at the start are restored at the end, also if overlapping uses end in another order.
    """
    before = [(config, config.use_cache) for config in _caching(model)]
    without_cache(model)
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def without_cache(model: nn.Module) -> None:
    """Prevent caches permanently, for a model of our own; configs of blocks behind stand-ins stay."""
    for config in _caching(model):
        config.use_cache = False


def _caching(model: nn.Module) -> list[Any]:
    modules = (module for module in model.modules() if not isinstance(module, Stand))
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


@dataclass(frozen=True)
class Pictures:
    """Images of some sequences, as the model's processor prepares them for its forward.

    Args:
        rows: `key` of a sequence's ids -> arguments of the forward beside the ids, for this sequence alone.
    """

    rows: Mapping[bytes, Mapping[str, Tensor]] = field(default_factory=dict)

    @staticmethod
    def key(row: Tensor) -> bytes:
        """Return the ids [tokens] of a sequence as bytes."""
        return row.cpu().numpy().tobytes()

    def of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of one sequence, ids [1, tokens]; none for text alone, or for several sequences."""
        known = self.rows.get(self.key(ids[0]), {}) if self.rows and len(ids) == 1 else {}
        return {name: value.to(ids.device) for name, value in known.items()}

    def first(self, ids: Tensor) -> Tensor | None:
        """Return the first sequence with images of ids [samples, tokens], as [1, tokens]."""
        rows = ids.split(1) if self.rows else ()
        return next((row for row in rows if self.key(row[0]) in self.rows), None)


class Sounds(Pictures):
    """Features of the recordings of some sequences; they take the place of the ids in the encoder."""

    def of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return nothing beside `texts`."""
        return {}

    def first(self, ids: Tensor) -> Tensor | None:
        """Return None: every sequence is heard, and all flow alike."""
        return None


NO_PICTURES = Pictures()


def forward(model: nn.Module, ids: Tensor, pictures: Pictures = NO_PICTURES) -> Any:
    """Run the model's own forward on ids [samples, tokens], inside of `uncached`; with images for a single sequence."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(**texts(model, ids, pictures), **options, **pictures.of(ids))


def texts(model: nn.Module, ids: Tensor, pictures: Pictures = NO_PICTURES) -> dict[str, Tensor]:
    """Return a model's inputs for ids [samples, tokens].

    The decoder of an encoder-decoder reads the text that its encoder reads, with the token that begins its own texts in
    place of the first one, so that its answer at a position is the next token, as any decoder's. An encoder of speech
    hears the recording of that text, or noise.
    """
    if not is_pair(model):
        return {"input_ids": ids}
    start = ids.clone()
    start[:, 0] = first_token(model)
    heard = sounds(model, ids, pictures.rows) if hears(model) else {"input_ids": ids}
    return {**heard, "decoder_input_ids": start}


def first_token(model: Any) -> int:
    """Return the first token of texts by a decoder beside an encoder."""
    keys = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    places = (model.config, getattr(model, "generation_config", None))
    stated = (getattr(place, key, None) for key in keys for place in places)
    return next((token for token in stated if isinstance(token, int)), 0)


class Stand(nn.Module):
    """Stand-in for a block.

    `takes` receives its number, the hidden states and the other arguments, and returns the block's output. Other
    attributes
    come from the block.
    """

    def __init__(self, block: nn.Module, index: int, takes: Callable[[int, Tensor, Given], Any]) -> None:
        super().__init__()
        self.__dict__["stands_for"] = block  # not a submodule: its weights are not loaded
        self.index, self.takes = index, takes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass on the arguments for the block."""
        return self.takes(self.index, *Given.of(args, kwargs))


def stand_in(model: nn.Module, paths: Sequence[str], takes: Callable[[int, Tensor, Given], Any]) -> None:
    """Replace every block of `model` by a `Stand`, permanently; they are numbered through all lists."""
    first = 0
    for path in paths:
        blocks = model.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList)
        _replace(model, path, nn.ModuleList(Stand(block, index, takes) for index, block in enumerate(blocks, first)))
        first += len(blocks)


def _replace(model: nn.Module, path: str, blocks: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, blocks)


@contextmanager
def standing_in(model: nn.Module, paths: Sequence[str], takes: Callable[[int, Tensor, Given], Any]) -> Iterator[None]:
    """Replace every block of `model` by a `Stand`, temporarily."""
    lists = {path: model.get_submodule(path) for path in paths}
    stand_in(model, paths, takes)
    try:
        yield
    finally:
        for path, blocks in lists.items():
            _replace(model, path, blocks)


# --- files without a name -----------------------------------------------------------------------------------------


def in_file(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate elements in an unnamed file; it is deleted with the last reference."""
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-") as file, stopping_when_full(folder):
        if count:  # a full disk would end the process later, where a page is written
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)


def filed(tensor: Tensor) -> Tensor:
    """Copy a tensor into an unnamed file; the system drops its pages from memory where others are needed."""
    return in_file(tensor.numel(), tensor.dtype).reshape(tensor.shape).copy_(tensor)


class Shelf:
    """Files for tensors, filled one after the other; a file is deleted with the last tensor in it."""

    def __init__(self) -> None:
        self._file: Tensor | None = None
        self._taken = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into a file; small ones, and those in a file, stay."""
        if tensor.nbytes < _LEAST or is_in_file(tensor):
            return tensor
        file, start = self._room(tensor.nbytes)
        place = file[start : start + tensor.nbytes]
        return place.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)

    def move(self, tensors: Iterable[Tensor], fixed: Collection[int] = ()) -> None:
        """Move the storage of tensors into files, in place: objects stay the same, and views stay views.

        A storage with other users is left, since they would no longer share changes; so is one at a `fixed` address,
        such as a
        parameter.
        """
        for users in _by_storage(tensors):
            storage = users[0].untyped_storage()
            count = storage.nbytes()
            if count < _LEAST or storage.data_ptr() in fixed or is_in_file(users[0]) or not all(map(_can_move, users)):
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
    """List the tensors in the variables of a suspended frame and its callers, with the tensors that they view."""
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
    """Return the bytes of their storages, each once, except those at `fixed` addresses."""
    storages = (users[0].untyped_storage() for users in _by_storage(tensors))
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in fixed)


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            groups.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


def is_in_file(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor lie in a file."""
    return tensor.untyped_storage().filename is not None


def _can_move(tensor: Tensor) -> bool:
    # a lazily conjugated or negated tensor has a flag that its storage lacks
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
