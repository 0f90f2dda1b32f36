"""Comparison of a streamed model with the model's own forward, as plain transformers loads it.

Two chunks of sequences of different content go through both, in float32. At each block, the hidden states of every
token are compared before and behind it, and after the last one the model's output:

    |streamed - own| / |own| <= 1e-4      (Euclidean norms over the width; of logits, less their mean)

The reference contains no code of quantkit: transformers loads the weights, builds the masks and calls its blocks. If
the model does not fit the memory that a compile needs anyway, its first blocks are compared, as a model of so many
layers. If its class cannot build such a model, all blocks are compared, loaded from disk one by one. That is
`device_map` of `from_pretrained`: accelerate reads each module of a block when its forward begins and drops it at the
end, so each forward reads all weights once; merged experts are converted first, and written into a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit import content, machine
from quantkit.bundle import Check
from quantkit.bundle.disk import is_disk_full
from quantkit.errors import InputError, QuantkitError
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.model.source.open import Source
from quantkit.model.source.places import quiet_loading
from quantkit.model.source.weights import write_tensors
from quantkit.model.streaming.answers import answer
from quantkit.model.streaming.calls import NO_PICTURES, Given, Pictures, forward, primary, texts, uncached, unsupported
from quantkit.model.streaming.stream import LoadedModel, StreamedModel
from quantkit.model.streaming.transforms import Transform
from quantkit.model.structure.flow import Flow
from quantkit.model.structure.traced import blocks_of, hooked

LIMIT = 1e-4
NAME = "stream.own_forward"
SEEING = "stream.own_forward.images"
# sequences of the comparison, sequences per chunk, tokens of a sequence
_ROWS, _CHUNK, _TOKENS = 4, 2, 32
# limit for a block in half precision, in units of its rounding
_HALF = 4


@dataclass(frozen=True)
class Answering:
    """Answers of a model on a few sequences, kept for a later comparison while the model is loaded for another.

    Args:
        like: streamed model of its class.
        ids: [samples, tokens].
        place: file of the answers; None keeps none.
        cached: True to run it with the cache that its config states.
        changes: transforms of its blocks as it runs.
    """

    like: StreamedModel
    ids: Tensor
    place: Path | None = None
    cached: bool = False
    changes: Sequence[Transform] = ()

    @torch.no_grad()
    def run(self, model: nn.Module) -> Tensor:
        """Return a loaded model's answers, float32; it is not used for anything else after that."""
        blocks = enumerate(blocks_of(model, self.like.paths)) if self.changes else ()
        for index, block in blocks:
            for change in self.changes:
                change.block(index, block)
        with nullcontext() if self.cached else uncached(model):
            runs = self.like.runs(model.eval())
            pictures = self.like.pictures
            own = runs(**texts(runs, self.ids)) if self.cached else forward(runs, self.ids, pictures)
            return answer(own).float()

    def keep(self, model: nn.Module) -> None:
        """Write a loaded model's answers."""
        if self.place is not None:
            write_tensors(self.place, {NAME: self.run(model)})

    def kept(self) -> Tensor | None:
        """Read the answers; None if they are not kept."""
        return load_file(self.place)[NAME] if self.place is not None and self.place.is_file() else None


@dataclass(frozen=True)
class Own:
    """Record of the model's own forward.

    Args:
        inputs: hidden states [samples, tokens, width] at each call of a block.
        last: output of the last block.
        output: the model's output.
    """

    inputs: list[Tensor]
    last: Tensor
    output: Any


def demand_equal(model: StreamedModel, ids: Tensor, blocks: int, beside: Answering | None = None) -> Check:
    """Return the check `stream.own_forward` of a model as opened, before any pass has changed it.

    Args:
        ids: [samples, tokens] of different content; a few are used.
        blocks: number of blocks that the model's own forward may hold in memory.
        beside: answers to keep of the model's own forward, if all of it is in memory.

    Raises:
        InputError: `stream-differs`, with the first block that differs; `activations-nonfinite`; `stream-unsupported`;
            `out-of-memory`.
    """
    with _as_unsupported(model.source.architecture):
        return _demand_equal(model, few_of(ids), blocks, beside)


def demand_equal_seeing(model: StreamedModel, row: Tensor, blocks: int) -> Check:
    """Return the check `stream.own_forward.images`, on one sequence [1, tokens] with images; see `demand_equal`."""
    with _as_unsupported(model.source.architecture):
        return _demand_equal(model, row, blocks).model_copy(update={"name": SEEING})


@torch.no_grad()
def demand_equal_in_memory(model: LoadedModel, ids: Tensor) -> None:
    """Check a model in memory likewise, in its own dtype, without changing it.

    Each block receives its input in the model's own forward, so that rounding errors do not add up, and both run on
    chunks of the same size, so that rounding hardly differs. Parts behind the blocks are left out: no pass uses them. A
    module that is one block is its own forward.
    """
    if not model.paths:
        return
    architecture = type(model.model).__name__
    with _as_unsupported(architecture):
        few = few_of(ids)
        calls = model.begin(few, _CHUNK)
        parts = [_watched(model.model, model.paths, model.flow, part, model.model) for part in few.split(calls.chunk)]
        expected = [torch.cat(hidden) for hidden in zip(*(part.inputs for part in parts), strict=True)]
        expected.append(torch.cat([part.last for part in parts]))
        names = [model.block_names[index] for index in model.visits]
        half = expected[-1].dtype.itemsize < torch.float32.itemsize
        limit = _HALF * torch.finfo(expected[-1].dtype).eps if half else LIMIT
        _held(calls.hidden, expected[0], architecture, _before(names, 0), limit)
        for stage, index in enumerate(model.visits):
            hidden = calls.pass_on(stage, calls.run_all(model.load(index), stage, expected[stage]))
            _held(hidden, expected[stage + 1], architecture, _before(names, stage + 1), limit)


@contextmanager
def _as_unsupported(architecture: str) -> Iterator[None]:
    """Turn errors of a class on a few sequences, run whole or by blocks, into errors of ours."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as problem:
        if is_disk_full(problem):
            raise
        if is_out_of_memory(problem):
            raise out_of_memory(architecture, problem) from problem
        text = " ".join(str(problem).split())[:160]
        raise unsupported(architecture, f"{type(problem).__name__}: {text}") from problem


def few_of(ids: Tensor) -> Tensor:
    """Return two chunks of short sequences with different content from `ids` [samples, tokens].

    Conversations may share a system prompt, so the sequences start at the first difference. A few long sequences are
    cut
    into several.
    """
    length = ids.shape[1]
    if len(ids) < _ROWS and length >= 2 * _TOKENS:
        ids = ids[:, : length - length % _TOKENS].reshape(-1, _TOKENS)
    ids = ids[:_ROWS]
    apart = (ids != ids[:1]).any(dim=0).nonzero()
    start = int(apart[0]) if len(apart) and int(apart[0]) > _TOKENS // 2 else 0
    start = max(0, min(start, ids.shape[1] - _TOKENS))
    return ids[:, start : start + _TOKENS]


def _demand_equal(model: StreamedModel, few: Tensor, blocks: int, beside: Answering | None = None) -> Check:
    count, architecture = len(model.block_names), model.source.architecture
    fits = blocks >= count
    # a config has one number of blocks for each of two stacks
    whole = fits or len(model.paths) > 1 or not model.source.can_be_cut(blocks)
    blocks = count if whole else blocks
    with ExitStack() as stack:
        placed = stack.enter_context(on_disk(model.skeleton, model.paths)) if whole and not fits else None
        cut = None if whole else blocks
        own = own_forward(
            model.source,
            model.paths,
            model.flow,
            few,
            cut,
            model.runs,
            placed,
            beside if fits else None,
            model.pictures,
        )
    stages = [stage for stage, index in enumerate(model.visits) if index < blocks]
    names = [model.block_names[index] for index in model.visits]
    worst, ends = 0.0, model.ends()
    calls = model.begin(few, _CHUNK)
    hidden, before = calls.hidden, -1
    for stage in stages:
        index = model.visits[stage]
        worst = max(worst, _held(hidden, own.inputs[stage], architecture, _before(names, stage)))
        if index != before:
            block = model.load(index)
        put_out, before = calls.run_all(block, stage, hidden), index
        if stage == stages[-1]:
            worst = max(worst, _held(put_out, own.last, architecture, _before(names, stage + 1)))
        hidden = put_out if stage == stages[-1] and not whole else calls.pass_on(stage, put_out)
    if whole or not calls.live:  # the parts behind the blocks do not depend on their number, except in a live model
        calls.hidden = hidden
        answers = model.answers_of(calls, few)
        # a decoder's answers in two parts, as in scoring
        half = few.shape[1] // 2
        parts = [slice(0, half), slice(half, None)] if model.source.kind == "decoder" else [slice(None)]
        output = answer(own.output).float()
        for row in range(len(few)):
            streamed, expected = _centered(torch.cat([answers(row, part) for part in parts])), _centered(output[row])
            worst = max(worst, _held(streamed, expected, architecture, "the part behind the last block"))
    del ends
    return Check(name=NAME, value=worst, limit=LIMIT, ok=True)


def own_forward(
    source: Source,
    paths: Sequence[str],
    flow: Flow,
    ids: Tensor,
    blocks: int | None,
    runs: Any,
    placed: Mapping[str, object] | None = None,
    beside: Answering | None = None,
    pictures: Pictures = NO_PICTURES,
) -> Own:
    """Run the model as plain `from_pretrained` loads it, or its first `blocks`, on `ids` [samples, tokens] in one
    batch.

    `runs` returns the part of the model to run; `placed` says where its blocks are, if not in memory; `beside` keeps
    its answers too.
    """
    with quiet_loading():
        model = source.load(blocks, placed)
        own = _watched(model, paths, flow, ids, runs(model), pictures)
        if beside is not None:
            beside.keep(model)
    del model
    machine.let_go()
    return own


@torch.no_grad()
def _watched(
    model: nn.Module, paths: Sequence[str], flow: Flow, ids: Tensor, runs: nn.Module, pictures: Pictures = NO_PICTURES
) -> Own:
    """Record a model's own forward with temporary hooks."""
    inputs: list[Tensor] = []
    last: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(Given.of(args, kwargs)[0].movedim(flow.batch, 0).detach().clone())

    def note_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        last[:] = [primary(output).movedim(flow.batch, 0).detach().clone()]

    blocks = blocks_of(model, paths)
    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(note_output) for block in blocks]
    with hooked(hooks), uncached(model):
        output = forward(runs, ids, pictures)
    return Own(inputs, last[0], output)


def _before(names: Sequence[str], stage: int) -> str:
    """Name the source of the hidden states of call number `stage`."""
    return names[stage - 1] if stage else "the part before the first block"


def _held(streamed: Tensor, own: Tensor, architecture: str, where: str, limit: float = LIMIT) -> float:
    """Return the difference at the worst token; refuse one larger than rounding, and states that are not finite."""
    if not bool(torch.isfinite(own).all()):
        value, rule = "its own forward gives NaN or infinite values", "a model's states are finite numbers"
        remedy = "look at what transformers writes with it: weights may be damaged, or need another dtype"
        raise InputError("activations-nonfinite", f"{architecture}: {where}", value, rule, remedy)
    streamed, worst = streamed.to(own.device), float("inf")
    if streamed.shape == own.shape:
        size = own.double().norm(dim=-1)
        apart = (streamed.double() - own.double()).norm(dim=-1) / size.clamp(min=1e-6 * float(size.max()) + 1e-30)
        worst = float(apart.max()) if bool(apart.isfinite().all()) else worst
    if worst <= limit:
        return worst
    raise InputError(
        "stream-differs",
        f"{architecture}: {where}",
        f"differs from the model's own forward by {worst:.1e}",
        f"a model run block by block must equal its own forward to {limit:.1g}",
        "no recipe is right on this architecture yet (docs/models.md); please report it",
    )


def _centered(logits: Tensor) -> Tensor:
    """Subtract the mean of logits, on which probabilities do not depend."""
    return logits.float() - logits.float().mean(dim=-1, keepdim=True)


@contextmanager
def on_disk(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield options of `from_pretrained` that leave the blocks on disk; the folder is deleted at the end."""
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="offloaded-") as place:
        yield {"device_map": places(model, paths), "offload_folder": place}


def places(model: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """Map each module or parameter to `cpu` or `disk`: the blocks on disk, everything else in memory."""
    placed: dict[str, str] = {}

    def look(module: nn.Module, prefix: str) -> None:
        kept = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set  # others are in no file
        placed.update({f"{prefix}{name}": "cpu" for name in sorted(kept)})
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if full in paths:
                placed.update({f"{full}.{block}": "disk" for block, _ in child.named_children()})
            elif any(path.startswith(f"{full}.") for path in paths):
                look(child, f"{full}.")
            else:
                placed[full] = "cpu"

    look(model, "")
    return placed
