"""One block in memory at a time: a model's forward pass, cut at its decoder or encoder layers.

A transformer is `rest -> block 0 -> block 1 -> ... -> rest`. The skeleton (no weights) runs once with every block
replaced by a stand-in, which notes how the model calls its blocks (masks, rotary tables, per-layer options) and hands
the hidden states through (`calls.py`). From then on blocks are loaded, run on all hidden states and dropped, one after
the other, so memory is one block plus activations whatever the model's size. Which module holds the blocks is found,
not listed: the `ModuleList` of like children that owns most of the parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit import machine
from quantkit.errors import InputError
from quantkit.model.device import Lane
from quantkit.model.source.open import Source
from quantkit.model.streaming.calls import (
    Calls,
    Given,
    Kept,
    Shelf,
    forward,
    gathered,
    same,
    stand_in,
    standing_in,
    uncached,
)
from quantkit.model.streaming.transforms import Transform
from quantkit.model.structure.flow import Flow, learn
from quantkit.model.structure.names import match_names
from quantkit.model.structure.traced import find_blocks, find_head

CPU = torch.device("cpu")
# what a live model gives for one sequence is held in a file from so many bytes on: 256 tokens of 262,144 logits
ANSWERS_ON_DISK = 1 << 28
# texts that go through a block at once
_TOGETHER = 32


class BlockStream(Protocol):
    """What the pipeline needs of a model: its blocks by number, and how they are called."""

    block_names: list[str]

    @property
    def visits(self) -> tuple[int, ...]:
        """The number of the block that each call is to, in order; known once a forward has begun."""

    def load(self, index: int) -> nn.Module:
        """Load block `index` with its weights, float32, eval mode."""

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute the hidden states [samples, tokens, width] before block 0, and note how each block is called."""


class Whole(BlockStream, Protocol):
    """What a pass of scope `model` needs of a model: what lies outside its blocks, too."""

    @property
    def path(self) -> str:
        """Of the `ModuleList` of blocks; empty where the whole model is the block."""

    @property
    def beside(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor of its files that no parameter of it holds: a draft head's, a tower's."""

    def rest(self) -> nn.Module:
        """Load the model with weights everywhere but in its blocks: a copy, which may be changed."""


class ReadAhead:
    """A stream whose next block is on its way when one is asked for; two blocks are on the device at a time."""

    def __init__(self, stream: BlockStream, lane: Lane) -> None:
        self.block_names, self.begin = stream.block_names, stream.begin
        self._stream, self._lane = stream, lane
        self._coming: tuple[int, Future[nn.Module]] | None = None

    @property
    def visits(self) -> tuple[int, ...]:
        """As of the stream."""
        return self._stream.visits

    def load(self, index: int) -> nn.Module:
        """Load block `index`; the one after it is on its way from here on, where a block is done again too."""
        coming, self._coming = self._coming, None
        here = coming is not None and coming[0] == index
        block = (coming[1] if coming and here else self._lane.submit(self._stream.load, index)).result()
        self._lane.taken([*block.parameters(), *block.buffers()])
        if coming is not None and coming[0] == index + 1:
            self._coming = coming
        elif index + 1 < len(self.block_names):
            self._coming = index + 1, self._lane.submit(self._stream.load, index + 1)
        return block


@torch.no_grad()
def record(
    model: nn.Module,
    path: str,
    flow: Flow,
    ids: Tensor,
    chunk: int,
    runs: nn.Module | None = None,
    place: torch.device | None = None,
) -> Calls:
    """Note how a model calls its blocks on `ids` [samples, tokens], without running them; of a live model, let its own
    forwards begin, which `model` is then for.

    Args:
        model: with weights everywhere but in its blocks.
        path: of the `ModuleList` of blocks.
        chunk: sequences per forward. Where blocks are given what depends on the text, and that cannot be told apart by
            sequence, it becomes 1.
        runs: the part of the model whose forward runs; all of it by default.
        place: where hidden states of all sequences lie; where the model does by default.
    """
    if flow.live:
        from quantkit.model.streaming.live import LiveCalls

        return LiveCalls(model, path, flow.visits, ids, flow.batch, runs)
    notes: list[list[Given]] = []

    def parts(size: int) -> Iterator[Tensor]:
        kept = Kept()
        for part in ids.split(size):
            hidden, calls = _record(model, path, flow, part, runs or model)
            alike = bool(notes) and same(notes[0], calls)
            notes.append(notes[0] if alike else kept.of(calls, notes[0] if notes else None))
            yield hidden

    hidden = gathered(parts(chunk), ids.shape[0], place)
    first = notes[0] if min(chunk, len(ids)) == 1 else _record(model, path, flow, ids[:1], runs or model)[1]
    other = first if len(ids) == 1 else _record(model, path, flow, ids[1:2], runs or model)[1]
    full = len(ids) // chunk
    if same(first, other) and all(note is notes[0] for note in notes[:full]):
        return Calls(hidden, chunk, notes, first, device=ids.device)
    rows = min(chunk, len(ids))
    if chunk == 1 or same([call.row(0, rows) for call in notes[0]], first):
        return Calls(hidden, chunk, notes, device=ids.device)
    notes.clear()
    return Calls(gathered(parts(1), ids.shape[0], place), 1, notes, device=ids.device)


class _AllRecorded(Exception):
    """Ends a forward where what was looked for is known: what follows is not needed."""


def _record(model: nn.Module, path: str, flow: Flow, ids: Tensor, runs: nn.Module) -> tuple[Tensor, list[Given]]:
    blocks = list(model.get_submodule(path).children())
    noted: list[tuple[Tensor, Given]] = []

    def takes(index: int, hidden: Tensor, rest: Given) -> Any:
        noted.append((hidden, rest))
        if len(noted) == len(flow.visits):
            raise _AllRecorded
        return flow.output(blocks[index], hidden)

    with uncached(model), standing_in(model, path, takes), suppress(_AllRecorded):
        forward(runs, ids)
    return noted[0][0].clone(), [rest for _, rest in noted]


def put_on(device: torch.device, module: nn.Module, kept: Container[str] = ()) -> None:
    """Move parameters and buffers that have values there, but those named in `kept`."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if not value.is_meta and value.device != device and name not in kept:
            set_tensor(module, name, value.detach().to(device))


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
        files: parameter -> tensor of the files, where that is known already. Parameters that the skeleton ties may have
            tensors of their own here; each then loads its own.
        device: where blocks, and what lies around them, are loaded and run.
        place: where hidden states of many sequences lie; None: on the device.
    """

    def __init__(
        self,
        source: Source,
        files: Mapping[str, str] | None = None,
        device: torch.device = CPU,
        place: torch.device | None = None,
    ) -> None:
        self.source, self.device, self.place = source, device, place
        self.skeleton: nn.Module = source.skeleton()
        self.path = find_blocks(self.skeleton)
        blocks = self.skeleton.get_submodule(self.path)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = blocks
        self.block_names = [f"{self.path}.{index}" for index in range(len(blocks))]
        self.files = match_names(source.weights, self.skeleton) if files is None else dict(files)
        used = set(self.files.values())
        self.beside = {name: entry.shape for name, entry in source.weights.entries.items() if name not in used}
        self._flow: Flow | None = None
        self._headed = source.kind == "decoder"
        self.transforms: list[Transform] = []

    def on(self, device: torch.device, place: torch.device | None = None) -> StreamedModel:
        """Return the same model, loaded and run there; `place` as of the class."""
        other = copy.copy(self)
        other.device, other.place, other.transforms = device, place, list(self.transforms)
        return other

    def with_head(self) -> StreamedModel:
        """Return the same model, giving the logits of an encoder's class, where that makes any."""
        other = self.on(self.device, self.place)
        other._flow, other._headed = self.flow, True
        return other

    # --- as what runs it is scored: `runtimes.Scored` -----------------------------------------------------------------

    ways: Mapping[str, float] = MappingProxyType({})
    prompt_rows, headed = 0, False
    together = None  # all its blocks are read each time
    settings: Mapping[str, Any] = MappingProxyType({"dtype": "float32"})

    @property
    def where(self) -> dict[str, str]:
        """The device that it runs on, for rows."""
        if self.device.type == "cuda":
            return machine.gpu(torch.cuda.get_device_name(self.device))
        return machine.device()

    def scores(self, ids: Tensor, at_once: int | None = None) -> Answers:
        """Compute logits of ids [n, T], at the positions of one sequence each time."""
        return self.answers(ids)

    def encode(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Compute the last hidden states [n, T, width] float32 of texts of one length, ids [n, T]."""
        with torch.inference_mode():
            states: NDArray[Any] = self.answers(torch.from_numpy(ids), chunk=_TOGETHER).all().float().cpu().numpy()
        return states

    def logits(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[Any]:
        """Compute what it gives; of `with_head` the logits of its class."""
        return self.encode(ids)

    @property
    def flow(self) -> Flow:
        """Which way hidden states go through it; learned when it is first asked for."""
        return self._learn(self.rest()) if self._flow is None else self._flow

    @property
    def visits(self) -> tuple[int, ...]:
        """The number of the block that each call is to, in order."""
        return self.flow.visits

    @property
    def head(self) -> str | None:
        """The linear that makes a decoder's logits, by its name in the skeleton; None for other models."""
        return find_head(self.skeleton) if self.source.kind == "decoder" else None

    def tensor(self, name: str) -> Tensor:
        """Read a parameter by its name in the skeleton, its floats in float32, onto the device."""
        value: Tensor = self.source.weights.read(self.files[name], self.device)
        return value.float() if value.is_floating_point() else value

    def load(self, index: int) -> nn.Module:
        """Load block `index` with its weights, in eval mode."""
        block: nn.Module = copy.deepcopy(self.blocks[index])
        prefix = self.block_names[index] + "."
        for name, _ in [*block.named_parameters(), *block.named_buffers()]:
            if prefix + name in self.files:  # a class may draw a parameter's values even on the meta device
                set_tensor(block, name, self.tensor(prefix + name))
        put_on(self.device, block)
        for transform in self.transforms:
            transform.block(index, block)
        return block.eval()

    def rest_names(self) -> list[str]:
        """List the parameters outside the blocks, as the skeleton names them; tied ones under each of their names."""
        return [name for name in self.files if not name.startswith(f"{self.path}.")]

    def rest(self) -> nn.Module:
        """Load the model with weights everywhere but in its blocks. The caller drops it when done."""
        blocks = self.skeleton.get_submodule(self.path)
        model = copy.deepcopy(self.skeleton, {id(blocks): blocks})
        loaded: dict[str, Tensor] = {}
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
        """Return the part of `model` that is scored: a decoder with its head, else what gives hidden states."""
        base = getattr(model, "base_model", None)
        return base if not self._headed and isinstance(base, nn.Module) else model

    def _learn(self, model: nn.Module) -> Flow:
        if self._flow is None:
            size = self.source.config.get("vocab_size")
            # the first ids are mostly padding and the like, by which some classes count positions
            ids = torch.arange(5, 21).reshape(2, 8).remainder(size if isinstance(size, int) else 16)
            self._flow = learn(model, self.path, self.load, ids.to(self.device), self.runs(model))
        return self._flow

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute the hidden states before block 0 for `ids` [samples, tokens], and note how each block is called."""
        model = self.rest()
        return record(model, self.path, self._learn(model), ids.to(self.device), chunk, self.runs(model), self.place)

    @torch.no_grad()
    def through(self, ids: Tensor, chunk: int = 4) -> Calls:
        """Run all blocks on `ids` [samples, tokens], one in memory; `hidden` of the result is the last one's output."""
        calls = self.begin(ids, chunk)
        hidden, before = calls.hidden, -1
        for stage, index in enumerate(self.visits):
            if index != before:
                block = self.load(index)
            hidden, before = calls.pass_on(stage, calls.run_all(block, stage, hidden)), index
        calls.hidden = hidden
        return calls

    def run(self, ids: Tensor, chunk: int = 4) -> Tensor:
        """Return the last block's output for `ids` [samples, tokens]: [samples, tokens, width], one block in memory."""
        return self.through(ids, chunk).hidden

    def answers(self, ids: Tensor, chunk: int = 4) -> Answers:
        """Run the whole model on `ids` [samples, tokens], `chunk` sequences per forward."""
        return self.answers_of(self.through(ids, chunk), ids)

    def answers_of(self, calls: Calls | None, ids: Tensor, hidden: Tensor | None = None) -> Answers:
        """Return what the model gives for `ids` [samples, tokens], once all blocks have run.

        `calls`: None: they are not live. `hidden`: the last block's output; None: that of the calls.
        """
        ids = ids.to(self.device)
        if calls is not None and calls.live:
            return Answers(calls, ids)
        if calls is not None and hidden is None:
            hidden = calls.hidden
        model = self.rest()
        return Answers(Head(model, self.path, self._learn(model), self.runs(model)), ids, hidden)


class Head:
    """What follows the last block: final norm and language-model head, run on hidden states.

    The model's own forward runs with a single stand-in block that returns the hidden states it is given, so that final
    norms, logit scales and soft caps are whatever the model's class makes of them.

    Args:
        model, path, flow, runs: as of `record`; the model is ours from here on.
    """

    def __init__(self, model: nn.Module, path: str, flow: Flow, runs: nn.Module | None = None) -> None:
        assert not flow.live, "what follows the blocks of a live model is its own forward"
        self.model, self.runs = model, runs or model
        self._plays = torch.empty(0)
        blocks = list(model.get_submodule(path).children())

        def takes(index: int, hidden: Tensor, _: Given) -> Any:
            return flow.output(blocks[index], hidden if index else self._plays)

        stand_in(model, path, takes)

    @torch.no_grad()
    def __call__(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Compute logits [samples, tokens, vocabulary], or an encoder's last hidden states, of the last block's."""
        self._plays = hidden
        with uncached(self.model):
            return answer(forward(self.runs, ids))


def answer(output: Any) -> Tensor:
    """Take logits out of what a model gives, those of spans side by side, or its last hidden states."""
    if hasattr(output, "start_logits"):
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


class Answers:
    """What a model gives for some ids [samples, tokens]: logits, or an encoder's last hidden states.

    Of a live model a sequence's are computed once, all of them, when its first part is asked for, and held until those
    of another are: in a file where they are many, since two models are compared. So they are where hidden states are
    not of one token each (a prompt of the model's own before the text, several streams, patches), because what follows
    the blocks then needs all of them.

    Args:
        of: a head, or the calls of a live model that have gone through all blocks.
        ids: [samples, tokens].
        hidden: the last block's output, for a head.
    """

    def __init__(self, of: Head | Calls, ids: Tensor, hidden: Tensor | None = None) -> None:
        self._of, self._ids, self._hidden = of, ids, hidden
        self._held: tuple[int, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, index: int, part: slice = slice(None)) -> Tensor:
        """Return those of some positions of one sequence: [P, vocabulary or width]."""
        if isinstance(self._of, Head):
            assert self._hidden is not None
            row, ids = self._hidden[index : index + 1], self._ids[index : index + 1]
            if row.shape[1] == ids.shape[1]:
                return self._of(row[:, part].to(ids.device), ids[:, part])[0]
        if self._held is None or self._held[0] != index:
            self._held = None  # before the next ones are made
            whole = self._whole(index)
            large = not whole.is_cuda and whole.nbytes >= ANSWERS_ON_DISK
            self._held = index, Shelf().copy(whole[0]) if large else whole[0]
        return self._held[1][part]

    @torch.no_grad()
    def given(self, linear: str, index: int) -> Tensor:
        """Return what a linear behind the blocks is given for a sequence, [tokens, K]; of a live model, once each."""
        inputs: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0])
            raise _AllRecorded

        hook = self._of.model.get_submodule(linear).register_forward_pre_hook(note)  # type: ignore[union-attr]
        try:
            with suppress(_AllRecorded):
                self._whole(index)
        finally:
            hook.remove()
        return inputs[0].reshape(-1, inputs[0].shape[-1])

    def _whole(self, index: int) -> Tensor:
        """Return those of all positions of one sequence, [1, tokens, vocabulary or width]."""
        if isinstance(self._of, Head):
            assert self._hidden is not None
            return self._of(self._hidden[index : index + 1].to(self._ids.device), self._ids[index : index + 1])
        return answer(self._of.finish(index))  # type: ignore[attr-defined]

    def all(self) -> Tensor:
        """Return all of them, [samples, tokens, vocabulary or width]."""
        return torch.stack([self(index) for index in range(len(self._ids))])


class LoadedModel:
    """An `nn.Module` with its weights, quantized in place by whoever works on its blocks. A transformer's stack of like
    layers is the blocks; all else is one block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.path = ""
        self.beside: Mapping[str, tuple[int, ...]] = {}
        # how a transformer hands hidden states from layer to layer is known; what another module does is not
        if "input_ids" in inspect.signature(model.forward).parameters:
            with suppress(InputError):
                self.path = find_blocks(model)
        self._blocks = list(self.model.get_submodule(self.path).children()) if self.path else [self.model]
        self.block_names = [f"{self.path}.{index}" for index in range(len(self._blocks))] if self.path else [""]
        self.flow = Flow(tuple(range(len(self._blocks))), False)

    @property
    def visits(self) -> tuple[int, ...]:
        """The number of the block that each call is to, in order; known once a forward has begun."""
        return self.flow.visits

    def load(self, index: int) -> nn.Module:
        """Return the block itself, not a copy."""
        return self._blocks[index]

    def rest(self) -> nn.Module:
        """Copy what lies outside the blocks."""
        blocks = self.model.get_submodule(self.path)
        return copy.deepcopy(self.model, {id(blocks): blocks})

    def apply(self, transform: Transform) -> None:
        """Transform every part, in place."""
        for index in range(len(self.block_names)):
            transform.block(index, self.load(index))
        transform.rest(self.model)

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Compute hidden states before block 0 for `ids` [samples, tokens]; of a single block, `ids` is its input."""
        if not self.path:
            nothing = [Given()]
            return Calls(ids, chunk, [nothing for _ in ids.split(chunk)], nothing)
        self.flow = learn(self.model, self.path, self.load, ids)
        return record(self.rest() if self.flow.live else self.model, self.path, self.flow, ids, chunk)
