"""One block in memory at a time: a model's forward pass, cut at its decoder or encoder layers.

A transformer is `rest -> block 0 -> block 1 -> ... -> rest`. The skeleton (no weights) runs once with every block
replaced by a recorder, which notes how the model calls its blocks (masks, rotary tables, per-layer options) and hands
the hidden states through. From then on blocks are loaded, run on all hidden states and dropped, one after the other, so
memory is one block plus activations whatever the model's size. Which module holds the blocks is found, not listed: the
`ModuleList` of like children that owns most of the parameters.
"""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit import content
from quantkit.errors import InputError
from quantkit.model.open import Source, parameter_names

# hidden states of a whole calibration set from this many bytes on lie in a file, and memory stays bounded
ON_DISK = 1 << 30


class BlockStream(Protocol):
    """What the pipeline needs of a model: its blocks by number, and how they are called."""

    block_names: list[str]

    def load(self, index: int) -> nn.Module:
        """Block `index` with its weights, float32, eval mode."""

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Hidden states [samples, tokens, width] before block 0, and how each block is called."""


class Whole(BlockStream, Protocol):
    """What a pass of scope `model` needs of a model: what lies outside its blocks, too."""

    @property
    def path(self) -> str:
        """Of the `ModuleList` of blocks; empty where the whole model is the block."""

    def rest(self) -> nn.Module:
        """The model with weights everywhere but in its blocks: a copy, which may be changed."""


class Transform(Protocol):
    """An exact change of the whole model, made as its parts load: a rotation, an untying, a permutation."""

    def block(self, index: int, block: nn.Module) -> None:
        """Change a block in place."""

    def rest(self, model: nn.Module) -> None:
        """Change what lies outside the blocks in place."""


@dataclass
class Calls:
    """The first block's input, and the other arguments of every block.

    Args:
        hidden: [samples, tokens, width] float32.
        chunk: sequences per forward.
        arguments: batch size -> one (args, kwargs) a block: for chunks, for what is left over, and for 1.
    """

    hidden: Tensor
    chunk: int
    arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)

    def forward(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """The block's output on one chunk or one sequence, with gradients where those are enabled."""
        args, kwargs = self.arguments[hidden.shape[0]][index]
        return primary(block(hidden, *args, **kwargs))

    @torch.no_grad()
    def run(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """The block's output on one chunk, [at most chunk, tokens, width]."""
        return self.forward(block, index, hidden)

    def chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """`hidden` in forwards' worth."""
        yield from hidden.split(self.chunk)

    @torch.no_grad()
    def run_all(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """The block's output on everything, [samples, tokens, width]; on disk if it is large."""
        return gathered((self.run(block, index, part) for part in self.chunks(hidden)), hidden.shape[0])


def primary(output: Any) -> Tensor:
    """The hidden states out of what a block returns: a tensor, or a tuple that begins with it."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def gathered(parts: Iterable[Tensor], samples: int) -> Tensor:
    """Chunks [n, tokens, width] as one tensor [samples, tokens, width]; from `ON_DISK` bytes on, in a file.

    The file has no name: it is gone when nothing refers to it any more.
    """
    whole: Tensor | None = None
    start = 0
    for part in parts:
        if whole is None:
            if part.shape[0] == samples:
                return part
            whole = _room((samples, *part.shape[1:]), part.dtype)
        whole[start : start + part.shape[0]] = part
        start += part.shape[0]
    assert whole is not None
    return whole


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if count * dtype.itemsize < ON_DISK:
        return torch.empty(shape, dtype=dtype)
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-") as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).reshape(shape)


def find_blocks(model: nn.Module) -> str:
    """The path of the `ModuleList` whose children are the blocks, such as `model.layers`.

    Raises:
        InputError: `blocks-not-found`.
    """
    best, most = "", 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if len({type(child) for child in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > most:
                best, most = path, size
    if not best:
        raise InputError(
            "blocks-not-found",
            where=type(model).__name__,
            value="no list of like layers",
            rule="a transformer is a stack of blocks",
        )
    return best


def find_head(model: nn.Module) -> str | None:
    """The path of the linear that makes logits, such as `lm_head`; None where a model names no such linear."""
    named = getattr(model, "get_output_embeddings", None)
    head = named() if named is not None else None
    if not isinstance(head, nn.Linear):
        return None
    return next((path for path, module in model.named_modules() if module is head), None)


class _Recorder(nn.Module):
    """Stands where a block stands, notes how it is called and returns its input in the block's way."""

    def __init__(self, block: nn.Module, as_tuple: bool) -> None:
        super().__init__()
        self.__dict__["stands_for"] = block  # not a submodule: its weights are not there
        self.as_tuple = as_tuple
        self.hidden: Tensor | None = None
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call; the hidden states go through unchanged."""
        if "hidden_states" in kwargs:
            hidden = kwargs.pop("hidden_states")
        else:
            hidden, args = args[0], args[1:]
        self.hidden, self.call = hidden, (args, kwargs)
        return (hidden,) if self.as_tuple else hidden


class _AllRecorded(Exception):
    """Ends the skeleton's forward after the last block: what follows is not needed."""


class _LastRecorder(_Recorder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        raise _AllRecorded


def record_calls(
    model: nn.Module, path: str, ids: Tensor, *, as_tuple: bool, count: int | None = None
) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Run a model whose blocks need no weights and note how each is called.

    Args:
        model: everything but the blocks has its weights.
        path: of the `ModuleList` of blocks.
        ids: [samples, tokens].
        as_tuple: whether blocks return a tuple (else a tensor).
        count: how many blocks to note; None is all.

    Returns:
        the hidden states before block 0, and (args, kwargs) of each block.
    """
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent)
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    chosen = list(blocks)[:count]
    recorders = [_Recorder(block, as_tuple) for block in chosen[:-1]] + [_LastRecorder(chosen[-1], as_tuple)]
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    setattr(owner, leaf, nn.ModuleList(recorders))
    try:
        model(input_ids=ids, **options)
    except _AllRecorded:
        pass
    finally:
        setattr(owner, leaf, blocks)
    assert recorders[0].hidden is not None
    return recorders[0].hidden.clone(), [recorder.call for recorder in recorders]


@torch.no_grad()
def returns_tuple(model: nn.Module, path: str, first: nn.Module, ids: Tensor) -> bool:
    """Whether the blocks return a tuple: run `first`, block 0 with its weights, on a few tokens."""
    few = ids[:1, :4]
    hidden, calls = record_calls(model, path, few, as_tuple=False, count=1)
    args, kwargs = calls[0]
    return isinstance(first(hidden, *args, **kwargs), tuple)


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or buffer, by its dotted name, in the place of one without data."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


class StreamedModel:
    """A model on disk, block by block.

    Args:
        source: an opened model.
        dtype: what it is computed in.
        prepare: changes the skeleton before names are matched, e.g. to the layout of a quantized checkpoint.
        files: parameter -> tensor of the files, where that is known already. Parameters that the skeleton ties may have
            tensors of their own here; each then loads its own.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype = torch.float32,
        prepare: Callable[[nn.Module], None] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.skeleton: nn.Module = source.skeleton()
        if prepare is not None:
            prepare(self.skeleton)
        self.path = find_blocks(self.skeleton)
        blocks = self.skeleton.get_submodule(self.path)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = blocks
        self.block_names = [f"{self.path}.{index}" for index in range(len(blocks))]
        self.files = parameter_names(source, self.skeleton) if files is None else dict(files)
        self.as_tuple = False
        self.transforms: list[Transform] = []

    @property
    def head(self) -> str | None:
        """The linear that makes a decoder's logits, by its name in the skeleton; None for other models."""
        return find_head(self.skeleton) if self.source.kind == "decoder" else None

    def tensor(self, name: str) -> Tensor:
        """A parameter by its name in the skeleton, in the compute dtype."""
        value: Tensor = self.source.weights.read(self.files[name])
        return value.to(self.dtype) if value.is_floating_point() else value

    def load(self, index: int) -> nn.Module:
        """Block `index` with its weights, in eval mode."""
        block: nn.Module = copy.deepcopy(self.blocks[index])
        prefix = self.block_names[index] + "."
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            if value.is_meta:
                set_tensor(block, name, self.tensor(prefix + name))
        for transform in self.transforms:
            transform.block(index, block)
        block.eval()
        return block

    def rest_names(self) -> list[str]:
        """The parameters outside the blocks, as the skeleton names them; tied ones under each of their names."""
        return [name for name in self.files if not name.startswith(f"{self.path}.")]

    def rest(self) -> nn.Module:
        """The model with weights everywhere but in its blocks. The caller drops it when done."""
        blocks = self.skeleton.get_submodule(self.path)
        model = copy.deepcopy(self.skeleton, {id(blocks): blocks})
        loaded: dict[str, Tensor] = {}
        for name in self.rest_names():
            file = self.files[name]
            if file not in loaded:
                loaded[file] = self.tensor(name)
            set_tensor(model, name, loaded[file])
        for transform in self.transforms:
            transform.rest(model)
        return model.eval()

    def value(self, model: nn.Module, name: str) -> Tensor:
        """A parameter or buffer of `model` by its name."""
        parent, _, leaf = name.rpartition(".")
        found: Tensor = getattr(model.get_submodule(parent), leaf)
        return found.detach()

    def _learn(self, model: nn.Module, ids: Tensor) -> None:
        self.as_tuple = returns_tuple(model, self.path, self.load(0), ids)

    def learn_calls(self, ids: Tensor) -> None:
        """Find out what blocks return, without running the model: for who only needs its head."""
        self._learn(self.rest(), ids)

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Hidden states before block 0 for `ids` [samples, tokens], and how each block is called."""
        model = self.rest()
        self._learn(model, ids)
        calls = Calls(hidden=torch.empty(0), chunk=chunk)

        def parts() -> Iterator[Tensor]:
            for part in ids.split(chunk):
                hidden, arguments = record_calls(model, self.path, part, as_tuple=self.as_tuple)
                calls.arguments.setdefault(part.shape[0], arguments)
                yield hidden.to(self.dtype)

        calls.hidden = gathered(parts(), ids.shape[0])
        if 1 not in calls.arguments:
            calls.arguments[1] = record_calls(model, self.path, ids[:1], as_tuple=self.as_tuple)[1]
        return calls

    @torch.no_grad()
    def run(self, ids: Tensor, chunk: int = 4) -> Tensor:
        """The last block's output for `ids` [samples, tokens]: [samples, tokens, width], one block in memory."""
        calls = self.begin(ids, chunk)
        hidden = calls.hidden
        for index in range(len(self.block_names)):
            hidden = calls.run_all(self.load(index), index, hidden)
        return hidden


class Head:
    """What follows the last block: final norm and language-model head, run on hidden states.

    The model's own forward runs with a single stand-in block that returns the hidden states it is given, so that final
    norms, logit scales and soft caps are whatever the model's class makes of them.
    """

    def __init__(self, model: nn.Module, path: str, *, as_tuple: bool) -> None:
        parent, _, leaf = path.rpartition(".")
        blocks = model.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList)
        stands = list(blocks)
        self.player = _Player(stands[0], as_tuple)
        through = [_Recorder(block, as_tuple) for block in stands[1:]]
        setattr(model.get_submodule(parent), leaf, nn.ModuleList([self.player, *through]))
        self.model = model

    @torch.no_grad()
    def __call__(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [samples, tokens, vocabulary] (or the encoder's last hidden states) for the last block's output."""
        self.player.plays = hidden
        output = self.model(input_ids=ids)
        answer: Tensor = output.logits if hasattr(output, "logits") else output[0]
        return answer


class _Player(_Recorder):
    plays: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.plays,) if self.as_tuple else self.plays
