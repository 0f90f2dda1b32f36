"""Streaming of a model: its forward pass, cut at its decoder or encoder layers, with one block in memory at a time.

A transformer is `rest -> block 0 -> block 1 -> ... -> rest`. The skeleton (no weights) runs once with a stand-in for
every block, which records the model's calls (masks, rotary tables, per-layer options) and passes hidden states through
(`calls.py`). Then blocks are loaded, run on all hidden states and dropped, one after the other, so memory is one block
plus activations for a model of any size. The module of blocks is found, not listed: the `ModuleList` of like children
with most of the parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit import machine
from quantkit.errors import InputError
from quantkit.model.device import Lane
from quantkit.model.sizes.architecture import BLOCK_SHARE, EXPERTS_IN_MEMORY
from quantkit.model.source import pretrained
from quantkit.model.source.open import Source
from quantkit.model.streaming.answers import Answers, Ended, Head
from quantkit.model.streaming.calls import (
    NO_PICTURES,
    Calls,
    Given,
    Kept,
    Pictures,
    filed,
    forward,
    gathered,
    same,
    standing_in,
    uncached,
    unsupported,
)
from quantkit.model.streaming.transforms import Transform
from quantkit.model.structure.experts import Expert
from quantkit.model.structure.flow import Flow, learn
from quantkit.model.structure.names import match_names
from quantkit.model.structure.traced import blocks_of, find_head, find_stacks, is_inside, is_linear, names_of

CPU = torch.device("cpu")
# texts per forward of a block
_TOGETHER = 32


class BlockStream(Protocol):
    """Interface of a model for the pipeline: its blocks by number, and their calls."""

    block_names: list[str]

    @property
    def visits(self) -> tuple[int, ...]:
        """Number of the block of each call, in order; known once a forward has begun."""

    def load(self, index: int) -> nn.Module:
        """Load block `index` with its weights, float32, eval mode."""

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute the hidden states [samples, tokens, width] before block 0, and record each block's call."""


class Whole(BlockStream, Protocol):
    """Interface of a model for passes of scope `model`: also its parts outside of the blocks."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the `ModuleList`s of blocks; empty if the whole model is the block."""

    @property
    def beside(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor of its files without a parameter: a draft head's, a tower's."""

    def rest(self) -> nn.Module:
        """Load the model with weights everywhere except in its blocks: a copy, which may be changed."""


class ReadAhead:
    """Stream that loads the next block ahead; two blocks are on the device at a time."""

    def __init__(self, stream: BlockStream, lane: Lane) -> None:
        self.block_names, self.begin = stream.block_names, stream.begin
        self._stream, self._lane = stream, lane
        self._coming: tuple[int, Future[nn.Module]] | None = None

    @property
    def visits(self) -> tuple[int, ...]:
        """Visits of the stream."""
        return self._stream.visits

    def load(self, index: int) -> nn.Module:
        """Return block `index`, and start loading the next one."""
        coming, self._coming = self._coming, None
        here = coming is not None and coming[0] == index
        block = (coming[1] if coming and here else self._lane.submit(self._stream.load, index)).result()
        self._lane.taken([*block.parameters(), *block.buffers()])
        if coming is not None and coming[0] == index + 1:
            self._coming = coming
        elif index + 1 < len(self.block_names):
            self._coming = index + 1, self._lane.submit(self._stream.load, index + 1)
        return block


class CachedAhead:
    """Stream of a CPU that has the system cache the next block's files: another block in memory might not fit."""

    def __init__(self, stream: StreamedModel, lane: Lane) -> None:
        self.block_names, self.begin = stream.block_names, stream.begin
        self._stream, self._lane = stream, lane

    @property
    def visits(self) -> tuple[int, ...]:
        """Visits of the stream."""
        return self._stream.visits

    def load(self, index: int) -> nn.Module:
        """Return block `index`, while the files of the next one are read."""
        if index + 1 < len(self.block_names):
            self._lane.submit(self._stream.cache, index + 1)
        return self._stream.load(index)


@torch.no_grad()
def record(
    model: nn.Module,
    paths: Sequence[str],
    flow: Flow,
    ids: Tensor,
    chunk: int,
    runs: nn.Module | None = None,
    place: torch.device | None = None,
    pictures: Pictures = NO_PICTURES,
) -> Calls:
    """Record a model's calls of its blocks on `ids` [samples, tokens]; for a live model, start its forwards and take it
    over.

    Args:
        model: model with weights everywhere except in its blocks.
        paths: paths of the `ModuleList`s of blocks.
        flow: its flow of hidden states.
        chunk: sequences per forward. It becomes 1 if arguments depend on the text and cannot be split by sequence.
        runs: part of the model to run; by default all of it.
        place: device of all sequences' hidden states; by default the model's.
        pictures: images of some sequences; `chunk` is then 1.
    """
    if flow.live:
        from quantkit.model.streaming.live import LiveCalls

        return LiveCalls(model, paths, flow.visits, ids, flow.batch, runs, pictures)
    chunk = chunk if pictures.first(ids) is None else 1
    notes: list[list[Given]] = []

    def parts(size: int) -> Iterator[Tensor]:
        kept = Kept()
        for part in ids.split(size):
            hidden, calls = _record(model, paths, flow, part, runs or model, pictures)
            alike = bool(notes) and same(notes[0], calls)
            notes.append(notes[0] if alike else kept.of(calls, notes[0] if notes else None))
            yield hidden

    hidden = gathered(parts(chunk), ids.shape[0], place)
    first = notes[0] if min(chunk, len(ids)) == 1 else _record(model, paths, flow, ids[:1], runs or model, pictures)[1]
    other = first if len(ids) == 1 else _record(model, paths, flow, ids[1:2], runs or model, pictures)[1]
    full = len(ids) // chunk
    if same(first, other) and all(note is notes[0] for note in notes[:full]):
        return Calls(hidden, chunk, notes, first, device=ids.device)
    rows = min(chunk, len(ids))
    if chunk == 1 or same([call.row(0, rows) for call in notes[0]], first):
        return Calls(hidden, chunk, notes, device=ids.device)
    notes.clear()
    return Calls(gathered(parts(1), ids.shape[0], place), 1, notes, device=ids.device)


def _record(
    model: nn.Module, paths: Sequence[str], flow: Flow, ids: Tensor, runs: nn.Module, pictures: Pictures
) -> tuple[Tensor, list[Given]]:
    blocks = blocks_of(model, paths)
    noted: list[tuple[Tensor, Given]] = []

    def takes(index: int, hidden: Tensor, rest: Given) -> Any:
        noted.append((hidden, rest))
        if len(noted) == len(flow.visits):
            raise Ended
        return flow.output(blocks[index], hidden)

    with uncached(model), standing_in(model, paths, takes), suppress(Ended):
        forward(runs, ids, pictures)
    return noted[0][0].clone(), [rest for _, rest in noted]


def put_on(device: torch.device, module: nn.Module, kept: Container[str] = ()) -> None:
    """Move parameters and buffers with values to a device, except those named in `kept`."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if not value.is_meta and value.device != device and name not in kept:
            set_tensor(module, name, value.detach().to(device))


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer, by its dotted name."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def weights_in_files(block: nn.Module) -> set[str]:
    """Name the weights of a block's linears, or of its experts alone, if together they are too large for the memory."""
    every = {path: module for path, module in block.named_modules() if isinstance(module, nn.Linear)}
    experts = [path for path in every if isinstance(block.get_submodule(path.rpartition(".")[0]), Expert)]
    for paths, most in ((list(every), machine.memory_limit() // BLOCK_SHARE), (experts, EXPERTS_IN_MEMORY)):
        if 4 * sum(every[path].out_features * every[path].in_features for path in paths) > most:
            return {f"{path}.weight" for path in paths}
    return set()


class StreamedModel:
    """A model on disk, block by block.

    Args:
        source: the opened model.
        files: parameter -> tensor of the files, if known. Parameters that the skeleton ties may have separate tensors
            here.
        device: device of the blocks and the other parts.
        place: device of the hidden states of many sequences; None for the same.

    Attributes:
        meanwhile: function of (stage, block), called for each block as `through` runs it.
        pictures: images of some sequences of a calibration set.
    """

    meanwhile: Callable[[int, nn.Module], object] | None = None
    pictures: Pictures = NO_PICTURES

    def __init__(
        self,
        source: Source,
        files: Mapping[str, str] | None = None,
        device: torch.device = CPU,
        place: torch.device | None = None,
    ) -> None:
        self.source, self.device, self.place = source, device, place
        self.skeleton: nn.Module = source.skeleton()
        self.paths = find_stacks(self.skeleton)
        if len(self.paths) > 1:
            pretrained.with_generation(self.skeleton, source.path)
        self.blocks = blocks_of(self.skeleton, self.paths)
        self.block_names = names_of(self.skeleton, self.paths)
        self.files = match_names(source.weights, self.skeleton) if files is None else dict(files)
        used = set(self.files.values())
        self.beside = {name: entry.shape for name, entry in source.weights.entries.items() if name not in used}
        self._flow: Flow | None = None
        self._seeing: Flow | None = None
        self._headed = source.kind == "decoder"
        self.transforms: list[Transform] = []
        # values outside of the blocks that models of `ends` hold
        self._held: WeakValueDictionary[tuple[str, torch.device], Tensor] = WeakValueDictionary()

    def on(self, device: torch.device, place: torch.device | None = None) -> StreamedModel:
        """Return the same model on another device; `place` as for the class."""
        other = copy.copy(self)
        other.device, other.place, other.transforms = device, place, list(self.transforms)
        return other

    def with_head(self) -> StreamedModel:
        """Return the same model with the logits of an encoder's class, if it has any."""
        other = self.on(self.device, self.place)
        other._flow, other._headed = self.flow, True
        return other

    def as_it_runs(self) -> StreamedModel:
        """Return the model with inputs and cache rounded as its source states; itself where they are floats."""
        quantization = self.source.quantization
        if quantization is None:
            return self
        how = quantization.run_time(self.linears(), self.files)
        other = self.on(self.device, self.place)
        other.transforms += how.transforms(self.block_names, getattr(torch, quantization.scales))
        return other if len(other.transforms) > len(self.transforms) else self

    def linears(self) -> list[str]:
        """List the linears in its blocks, by full names."""
        inside = zip(self.block_names, self.blocks, strict=True)
        return [f"{name}.{path}" for name, block in inside for path, one in block.named_modules() if is_linear(one)]

    # --- as what runs it is scored: `runtimes.Scored` -----------------------------------------------------------------

    ways: Mapping[str, float] = MappingProxyType({})
    prompt_rows, headed = 0, False
    together = None  # reads all its blocks each time
    settings: Mapping[str, Any] = MappingProxyType({"dtype": "float32"})

    @property
    def where(self) -> dict[str, str]:
        """Device for rows."""
        if self.device.type == "cuda":
            return machine.gpu(torch.cuda.get_device_name(self.device))
        return machine.device()

    def scores(self, ids: Tensor, at_once: int | None = None) -> Answers:
        """Return logits of ids [n, T], by positions of one sequence at a time."""
        return self.answers(ids)

    def encode(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the last hidden states [n, T, width] float32 of texts of one length, ids [n, T]."""
        with torch.inference_mode():
            states: NDArray[Any] = self.answers(torch.from_numpy(ids), chunk=_TOGETHER).all().float().cpu().numpy()
        return states

    def logits(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return its output; after `with_head` the logits of its class."""
        return self.encode(ids)

    @property
    def flow(self) -> Flow:
        """Flow of hidden states; learned at the first use."""
        return self._learn(self.ends()) if self._flow is None else self._flow

    @property
    def visits(self) -> tuple[int, ...]:
        """Number of the block of each call, in order."""
        return self.flow.visits

    @property
    def head(self) -> str | None:
        """Name of the linear for a decoder's logits in the skeleton; None for other models."""
        return find_head(self.skeleton) if self.source.kind == "decoder" else None

    def tensor(self, name: str) -> Tensor:
        """Read a parameter by its name in the skeleton, floats as float32, to the device."""
        value: Tensor = self.source.weights.read(self.files[name], self.device)
        return value.float() if value.is_floating_point() else value

    def load(self, index: int) -> nn.Module:
        """Load block `index` with its weights, in eval mode."""
        # the config is only read, and a copy takes milliseconds
        configs = {id(one): one for part in self.blocks[index].modules() if (one := vars(part).get("config"))}
        block: nn.Module = copy.deepcopy(self.blocks[index], configs)
        prefix = self.block_names[index] + "."
        apart = weights_in_files(block) if self.device.type == "cpu" else set[str]()
        for name, _ in [*block.named_parameters(), *block.named_buffers()]:
            if prefix + name in self.files:  # a class may draw a parameter's values even on the meta device
                value = self.tensor(prefix + name)
                set_tensor(block, name, filed(value) if name in apart else value)
        put_on(self.device, block)
        for transform in self.transforms:
            transform.block(index, block)
        return block.eval()

    def cache(self, index: int) -> None:
        """Have the system read the files of block `index`, as far as it has room."""
        block, prefix = self.blocks[index], self.block_names[index] + "."
        names = (prefix + name for name, _ in [*block.named_parameters(), *block.named_buffers()])
        self.source.weights.cache(self.files[name] for name in names if name in self.files)

    def rest_names(self) -> list[str]:
        """List the parameters outside of the blocks by their names in the skeleton; tied ones under each name."""
        return [name for name in self.files if not is_inside(name, self.paths)]

    def rest(self) -> nn.Module:
        """Load the model with weights everywhere except in its blocks; the caller drops it."""
        return self._rest({})

    def ends(self) -> nn.Module:
        """Return `rest` to run it only: its tensors are read once for all of these that are alive together."""
        if self.transforms:
            return self.rest()
        values = {file: value for (file, device), value in self._held.items() if device == self.device}
        model = self._rest(values)
        self._held.update({(file, self.device): value for file, value in values.items()})
        vars(model)["holds"] = values
        return model

    def _rest(self, loaded: dict[str, Tensor]) -> nn.Module:
        """Load the model likewise, but for tensors of files that are loaded; the others are added to these."""
        model = copy.deepcopy(self.skeleton, {id(block): block for block in self.blocks})
        for name in self.rest_names():
            file = self.files[name]
            if file not in loaded:
                loaded[file] = self.tensor(name)
            set_tensor(model, name, loaded[file])
        put_on(self.device, model)
        for transform in self.transforms:
            transform.rest(model)
        return model.eval()

    def value(self, model: nn.Module, name: str) -> Tensor:
        """Return a parameter or buffer of `model` by its name."""
        parent, _, leaf = name.rpartition(".")
        value: Tensor = getattr(model.get_submodule(parent), leaf)
        return value.detach()

    def runs(self, model: nn.Module) -> nn.Module:
        """Return the part of `model` to score: a decoder with its head, else the part up to the hidden states."""
        base = getattr(model, "base_model", None)
        return base if not self._headed and isinstance(base, nn.Module) else model

    def _learn(self, model: nn.Module) -> Flow:
        if self._flow is None:
            size = self.source.config.get("vocab_size")
            # skips the first ids, mostly padding and special tokens, from which some classes count positions
            ids = torch.arange(5, 21).reshape(2, 8).remainder(size if isinstance(size, int) else 16)
            self._flow = learn(model, self.paths, self.load, ids.to(self.device), self.runs(model))
        return self._flow

    def _learn_seeing(self, model: nn.Module, row: Tensor) -> Flow:
        """Learn the flow on a sequence with images [1, tokens]: a class may add them between two blocks."""
        if self._seeing is None:
            self._seeing = learn(model, self.paths, self.load, row, self.runs(model), self.pictures)
            if self._seeing.visits != self._learn(model).visits:
                raise unsupported(self.source.architecture, "calls its blocks in another order where there are images")
        return self._seeing

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute the hidden states before block 0 for `ids` [samples, tokens], and record each block's call."""
        model, ids, seeing = self.ends(), ids.to(self.device), self.pictures.first(ids)
        flow = self._learn(model) if seeing is None else self._learn_seeing(model, seeing.to(self.device))
        return record(model, self.paths, flow, ids, chunk, self.runs(model), self.place, self.pictures)

    @torch.no_grad()
    def through(self, ids: Tensor, chunk: int = 4) -> Calls:
        """Run all blocks on `ids` [samples, tokens], one in memory; `hidden` of the result is the last output.

        The next block is read meanwhile: to a GPU, or from the disk.
        """
        calls = self.begin(ids, chunk)
        hidden, before = calls.hidden, -1
        with ExitStack() as stack:
            ahead = CachedAhead if self.device.type == "cpu" else ReadAhead
            blocks = ahead(self, stack.enter_context(Lane(self.device)))
            for stage, index in enumerate(self.visits):
                if index != before:
                    block = blocks.load(index)
                if self.meanwhile is not None:
                    self.meanwhile(stage, block)
                hidden, before = calls.pass_on(stage, calls.run_all(block, stage, hidden)), index
        calls.hidden = hidden
        return calls

    def run(self, ids: Tensor, chunk: int = 4) -> Tensor:
        """Return the last block's output for `ids` [samples, tokens]: [samples, tokens, width], with one block in
        memory.
        """
        return self.through(ids, chunk).hidden

    def answers(self, ids: Tensor, chunk: int = 4) -> Answers:
        """Run the whole model on `ids` [samples, tokens], `chunk` sequences per forward."""
        ends = self.ends()
        answers = self.answers_of(self.through(ids, chunk), ids)
        del ends  # both of these have read what it holds
        return answers

    def answers_of(self, calls: Calls | None, ids: Tensor, hidden: Tensor | None = None) -> Answers:
        """Return the model's answers for `ids` [samples, tokens], once all blocks have run.

        `calls` is None for calls that are not live; `hidden` is the last block's output, None for that of the calls.
        """
        ids = ids.to(self.device)
        if calls is not None and calls.live:
            return Answers(calls, ids)
        if calls is not None and hidden is None:
            hidden = calls.hidden
        model = self.ends()
        return Answers(Head(model, self.paths, self._learn(model), self.runs(model)), ids, hidden)


class LoadedModel:
    """An `nn.Module` with its weights, quantized in place.

    The blocks are a transformer's stack of like layers; any other module is one block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.paths: tuple[str, ...] = ()
        self.beside: Mapping[str, tuple[int, ...]] = {}
        # only transformers are known to pass hidden states from layer to layer
        if "input_ids" in inspect.signature(model.forward).parameters:
            with suppress(InputError):
                self.paths = find_stacks(model)
        self._blocks = blocks_of(model, self.paths) if self.paths else [self.model]
        self.block_names = names_of(model, self.paths) if self.paths else [""]
        self.flow = Flow(tuple(range(len(self._blocks))), False)

    @property
    def visits(self) -> tuple[int, ...]:
        """Number of the block of each call, in order; known once a forward has begun."""
        return self.flow.visits

    def load(self, index: int) -> nn.Module:
        """Return the block itself, not a copy."""
        return self._blocks[index]

    def rest(self) -> nn.Module:
        """Copy the parts outside of the blocks."""
        return copy.deepcopy(self.model, {id(block): block for block in self._blocks})

    def apply(self, transform: Transform) -> None:
        """Transform every part, in place."""
        for index in range(len(self.block_names)):
            transform.block(index, self.load(index))
        transform.rest(self.model)

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute hidden states before block 0 for `ids` [samples, tokens]; for a single block, `ids` is its input."""
        if not self.paths:
            nothing = [Given()]
            return Calls(ids, chunk, [nothing for _ in ids.split(chunk)], nothing)
        self.flow = learn(self.model, self.paths, self.load, ids)
        return record(self.rest() if self.flow.live else self.model, self.paths, self.flow, ids, chunk)
