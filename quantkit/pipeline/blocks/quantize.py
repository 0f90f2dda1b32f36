"""Take the blocks through the passes, one at a time, each committed before the next; then the language-model head.

A head is a product like those of a graph (`passes/assign.py`). It is larger than any other, and its one input is the
output of the final norm. It is solved last, on the outputs of the quantized blocks. A piece of its rows is solved at a
time, so that only a few of its floats are in memory beside its codes.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.bundle import Build, LayerEntry
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics.gradients import collect
from quantkit.calibrate.statistics.parts import Share
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.errors import GateError, InputError
from quantkit.exporters import load_exporter
from quantkit.formats import QuantTensor
from quantkit.model import finished
from quantkit.model.device import half_pays
from quantkit.model.source.weights import write_tensors
from quantkit.model.structure.traced import weight_of
from quantkit.passes import GRADIENTS
from quantkit.passes.assign import assigner, in_pieces
from quantkit.passes.solvers.moments import Moments
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.prepared import Prepared
from quantkit.pipeline.blocks.work import PassRun, Rare, Worked, work
from quantkit.pipeline.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.model.streaming.answers import Answers
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.layers import Layers

# a few tokens are enough to trace a block and to prove its folds
_PROBE = (2, 12)
# seconds between two commits of blocks, and of the hidden states behind the last: all that a killed compile loses
_EVERY = 30.0


def _head_moments(prepared: Prepared, head: str, worked: Worked) -> Moments | None:
    """Return the moments of the head's inputs; None where the pass that gives it its codes needs none.

    Args:
        worked: the last block.

    Raises InputError: `activations-nonfinite`; the pass's.
    """
    stream, passes = prepared.stream, _passes(prepared.steps)
    chosen = assigner(passes)
    if chosen is None:
        return None
    columns = int(stream.skeleton.get_parameter(f"{head}.weight").shape[1])
    moments = chosen.brought(head, columns, passes[chosen.name])
    needs = chosen.needs_with(passes[chosen.name])
    if moments is not None or prepared.calibration is None or not needs:
        return moments
    if worked.hidden is None or worked.calls is None:
        return None
    ids, ranks = prepared.calibration.ids, prepared.ranks
    share = None if ranks is None else Share(ranks, len(ids), device=prepared.device.torch)
    ids = ids if share is None else ids[share.rows]
    after = stream.answers_of(worked.calls, ids, worked.hidden)
    before: Answers | None = None
    if "original_inputs" in needs and worked.original is not None and worked.originals is not None:
        before = stream.answers_of(worked.originals, ids, worked.original)

    def added(seen: InputStats, rows: Iterable[int]) -> InputStats:
        for index in rows:
            seen.add(after.given(head, index)[None], None if before is None else before.given(head, index)[None])
        return seen

    if share is None:
        return moments_of_sums(added(InputStats(name=head), range(len(ids))), head)
    lots = (added(InputStats(name=head, part=part), rows) for part, rows in share.by_part(1))
    return moments_of_sums(share.summed(head, (), lots), head)


def _passes(steps: Sequence[PassRun]) -> dict[str, Any]:
    """Name of each pass -> its settings, as `passes.assign` takes them."""
    return {step.run.name: step.settings for step in steps}


def moments_of_sums(seen: InputStats, name: str = "") -> Moments:
    """Return the moments of one product's inputs for its solver; errors name the product."""
    hessian = seen.hessian.double()
    cross = None if seen.drift is None else (hessian + seen.drift.double())[None]
    return Moments(hessian[None], cross, tuple(half.double()[None] for half in seen.halves), name=name)


def quantize_head(
    stream: StreamedModel, layers: Layers, passes: Mapping[str, Any], moments: Moments | None = None
) -> tuple[QuantTensor, LayerEntry]:
    """Choose the codes of the head `layers.head`, by its scheme there; with its entry in the manifest.

    The embedding that a head may share its weight with stays as it is; only the product that makes the logits uses the
    codes.

    Args:
        passes: of the recipe, name -> settings.
        moments: of its inputs.
    """
    assert layers.head is not None
    if stream.transforms:
        weight = weight_of(stream.rest().get_submodule(layers.head))
    else:
        # as stored: half the memory of float32 where it is large
        weight = stream.source.weights.read(stream.files[f"{layers.head}.weight"], stream.device)
    with torch.no_grad():
        tensor, error = in_pieces(weight, moments, layers.schemes[layers.head], passes)
    return tensor, layers.entry(layers.head, tensor, error)


def quantize(prepared: Prepared, build: Build, progress: Progress) -> None:
    """Put all uncommitted blocks through the passes, then the parts outside the blocks.

    The next block is read during work on one (on a CPU into the system's cache of files, which costs no memory), and
    the one before is written; never more than one.

    Args:
        build: folder where `block-0000`, ..., `head` and `rest` are committed; with ranks, by the first one.
    """
    from quantkit.model.device import Lane
    from quantkit.model.streaming.stream import CachedAhead, ReadAhead

    recipe, device, layers = prepared.request.recipe, prepared.device, prepared.layers
    count, ranks = len(prepared.stream.block_names), prepared.ranks
    start, leads = sum(key.startswith("block-") for key in build.done()), ranks is None or ranks.leads
    headless = layers.head is None or "head" in build.done()
    if ranks is not None:
        start, headless = ranks.agree([start, headless])[0]
    if start == count:
        if leads:
            _finish_tower(prepared, build)
            _finish_rest(prepared, build)
        return
    sequences = max((step.settings.gradients for step in prepared.steps if GRADIENTS in step.needs), default=0)
    if sequences:
        _collect_gradients(prepared, build, sequences, progress)
    begun = time.process_time()
    kept = next((index for index in range(start - 1, -1, -1) if _hidden_files(build, index)), None)
    states: dict[str, Tensor] = {}
    if kept is not None:
        states = {name: value.to(device.place) for name, value in _states(prepared, build, kept).items()}
    generator = torch.Generator().manual_seed(recipe.seed)
    progress.at("quantize", start / count, f"block {start + 1} of {count}")
    keeping = _Keeping(start if kept is None else kept, _EVERY)
    with ExitStack() as stack:
        lanes = [stack.enter_context(Lane(device.torch)) for _ in range(2)]
        written: Future[None] | None = None
        for worked in work(
            (CachedAhead if device.is_cpu else ReadAhead)(prepared.stream, lanes[0]),
            prepared.steps,
            layers.schemes,
            prepared.calibration.ids if prepared.calibration else None,
            probe_ids=torch.randint(0, tokens.vocabulary(prepared.source), _PROBE, generator=generator),
            widest=layers.widest,
            dtype=getattr(torch, prepared.source.dtype),
            seed=recipe.seed,
            activations=layers.activations,
            cache=recipe.scheme.kv_cache,
            fuses=any(load_exporter(step.name).fuses for step in recipe.export),
            tensors=any(
                load_exporter(step.name).stores == "tensors" and step.options.get("readers") != "vllm"
                for step in recipe.export
            ),
            chunk=device.chunk,
            start=start,
            begun=0 if kept is None else kept + 1,
            hidden=states.pop("hidden", None),
            original=states.pop("original", None),
            rare=Rare(recipe.calibration.expert_tokens, recipe.calibration.experts),
            finished=_finished(prepared, build),
            gradients=functools.partial(_gradients, build) if sequences else None,
            ranks=ranks,
        ):
            index = worked.block.index
            now = time.process_time()
            if written is not None:
                written.result()
            if index == count - 1 and not headless:
                # before its last block is, or a resume would have nothing to calibrate it on
                _finish_head(prepared, build, worked, progress, leads=leads)
            keep = keeping.after(worked)
            seconds, others = now - begun, dict[Path, str]()
            if ranks is not None:
                seconds, keep, others = _together(prepared, ranks, build, worked, seconds, keep)
            if leads:
                written = lanes[1].submit(_commit, prepared, build, worked, seconds, keep, others)
            begun = now
            del worked  # its block goes as soon as it is written
            progress.at("quantize", (index + 1) / count, f"block {min(index + 2, count)} of {count}")
        if written is not None:
            written.result()
    if leads:
        build.sync()
        _finish_tower(prepared, build)
        _finish_rest(prepared, build)


def _gradients_file(build: Build, index: int) -> Path:
    return build.steps / f"gradients-{index:04}.safetensors"


def _gradients(build: Build, index: int) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = load_file(_gradients_file(build, index))
    return gradients


def _collect_gradients(prepared: Prepared, build: Build, sequences: int, progress: Progress) -> None:
    """Commit the gradients of the original model on the first sequences of the calibration set, a file a block."""
    assert prepared.calibration is not None
    if "gradients" in build.done():
        return
    progress.at("quantize", 0.0, "gradients")
    begun, files, hashes = time.process_time(), dict[Path, Path](), dict[Path, str]()

    def write(index: int, gradients: Mapping[str, Tensor]) -> None:
        final, place = _gradients_file(build, index), build.temporary(f"gradients-{index:04}.safetensors")
        if place in files:  # a block that runs again
            before = load_file(place)
            gradients = {name: torch.cat((before[name], value)) for name, value in gradients.items()}
        hashes[place], files[place] = write_tensors(place, gradients), final

    ids, half = prepared.calibration.ids[:sequences], half_pays(prepared.stream.device.type)
    collect(prepared.stream, ids, prepared.request.recipe.seed, write, half=half)
    build.commit("gradients", {"cpu_seconds": time.process_time() - begun}, files, hashes=hashes)


class _Keeping:
    """Choice of the blocks at which all blocks so far are committed, with the hidden states for a resume.

    Args:
        last: block whose states were kept last.
        every: least seconds between two commits. Syncing, and writing the states, may take longer than a block; a
            resume repeats the blocks since.
    """

    def __init__(self, last: int, every: float) -> None:
        self._last, self._every, self._at = last, every, time.monotonic()

    def after(self, worked: Worked) -> tuple[bool, int]:
        """Tell whether to commit after a block, and the block whose states its own replace."""
        if time.monotonic() - self._at < self._every:
            return False, self._last
        before, self._last, self._at = self._last, worked.block.index, time.monotonic()
        return True, before


def _hidden_files(build: Build, index: int) -> list[Path]:
    """List the files of the hidden states behind a block: one, or one of each rank."""
    return sorted(build.steps.glob(f"hidden-{index:04}*.safetensors"))


def _states(prepared: Prepared, build: Build, index: int) -> dict[str, Tensor]:
    """Read the hidden states behind a block; with ranks, those of this rank's parts, whichever rank wrote them."""
    if prepared.ranks is None or prepared.calibration is None:
        return dict(load_file(_hidden_files(build, index)[0]))
    share = Share(prepared.ranks, len(prepared.calibration.ids))
    parts: dict[str, dict[int, Tensor]] = {}
    for file in _hidden_files(build, index):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                name, _, part = key.partition(".")
                if int(part) in share.parts:
                    parts.setdefault(name, {})[int(part)] = tensors.get_tensor(key)
    return {name: torch.cat([of[part] for part in share.parts if part in of]) for name, of in parts.items()}


def _together(
    prepared: Prepared, ranks: Ranks, build: Build, worked: Worked, seconds: float, keep: tuple[bool, int]
) -> tuple[float, tuple[bool, int], dict[Path, str]]:
    """Agree on a finished block, and write this rank's hidden states behind it where the first rank says so.

    Returns:
        processor seconds of all ranks; whether to commit, and the block before, as the first rank says; files of all
            ranks with their sha256.

    Raises GateError: `ranks-differ`, codes that are not the same everywhere; Stopped: `rank-lost`.
    """
    digest = 0
    for tensor in worked.block.tensors.values():
        digest = zlib.crc32(tensor.codes.contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest)
    told = ranks.agree([digest, seconds, *keep])
    seconds = sum(of for _, of, *_ in told)
    if len({digest for digest, *_ in told}) > 1:
        rule = "ranks compute the same codes from the same sums"
        raise GateError("ranks-differ", worked.block.name, "codes differ between ranks", rule, "please report it")
    (*_, kept, before), files = told[0], dict[Path, str]()
    if not kept or worked.hidden is None or prepared.calibration is None or worked.calls is None or worked.calls.live:
        return seconds, (kept, before), files
    share = Share(ranks, len(prepared.calibration.ids))
    outputs: dict[str, Tensor] = {}
    sizes = [share.size(part) for part in share.parts]
    for name, whole in (("hidden", worked.hidden), ("original", worked.original)):
        parts = () if whole is None else whole.split(sizes)
        outputs |= {f"{name}.{part}": value for part, value in zip(share.parts, parts, strict=False)}
    place = build.temporary(f"hidden-{ranks.number}.safetensors")
    for number, sha256 in enumerate(ranks.agree(write_tensors(place, outputs))):
        files[build.temporary(f"hidden-{number}.safetensors")] = sha256
    return seconds, (kept, before), files


def _commit(
    prepared: Prepared,
    build: Build,
    worked: Worked,
    cpu_seconds: float,
    keep: tuple[bool, int],
    others: Mapping[Path, str],
) -> None:
    """Write one block, and the hidden states behind it; `others`: those of ranks, which are written."""
    block = worked.block
    result = build.temporary("block.safetensors")
    named = {block.full_name(name): tensor for name, tensor in block.tensors.items()}
    scales, cache = block.input_scales(), block.cache_scales()
    hashes = {result: finished.save(result, named, _changed(prepared, worked), scales, cache)}
    files, remove = {result: build.steps / f"block-{block.index:04}.safetensors"}, []
    if keep[0] and worked.hidden is not None:
        outputs = {"hidden": worked.hidden, "original": worked.original}
        kept = build.temporary("hidden.safetensors")
        if prepared.ranks is None:
            written = write_tensors(kept, {name: value for name, value in outputs.items() if value is not None})
            others = {kept: written}
        for place, sha256 in others.items():
            hashes[place] = sha256
            files[place] = build.steps / place.name.replace("hidden", f"hidden-{block.index:04}", 1)
        remove = _hidden_files(build, keep[1]) if keep[1] != block.index else []
    record = {**_record(prepared, worked), "cpu_seconds": cpu_seconds}
    build.commit(f"block-{block.index:04}", record, files, remove=remove, hashes=hashes, sync=keep[0])


def _finished(prepared: Prepared, build: Build) -> Callable[[int], nn.Module]:
    """Give blocks by their numbers, as they were committed; nothing is opened before the first is asked for."""

    @functools.cache
    def running() -> StreamedModel:
        return prepared.placed(prepared.values(build).running())

    return lambda index: running().load(index)


def _finish_head(prepared: Prepared, build: Build, worked: Worked, progress: Progress, *, leads: bool) -> None:
    """Commit the head's codes, chosen on the outputs of the last block; ranks that do not lead give their sums."""
    layers = prepared.layers
    assert layers.head is not None
    progress.at("quantize", 1.0, layers.head)
    begun = time.process_time()
    moments = _head_moments(prepared, layers.head, worked)
    if not leads:
        return
    tensor, entry = quantize_head(prepared.stream, layers, _passes(prepared.steps), moments)
    result = build.temporary("head.safetensors")
    digest = finished.save(result, {entry.name: tensor}, {})
    taken = [] if moments is None else [decision.as_dict() for decision in moments.decisions]
    seconds = time.process_time() - begun
    record = {"layers": [entry.model_dump(mode="json")], "decisions": taken, "cpu_seconds": seconds}
    build.commit("head", record, {result: build.steps / "head.safetensors"}, hashes={result: digest})


def _finish_tower(prepared: Prepared, build: Build) -> None:
    """Commit the codes of a tower's linears, rounded to nearest: no text reaches them."""
    layers, stream, begun = prepared.layers, prepared.stream, time.process_time()
    names = [name for name in layers.schemes if name in layers.tower]
    if not names or "tower" in build.done():
        return
    tensors, entries = {}, []
    for name in names:
        weight = stream.source.weights.read(stream.files[f"{name}.weight"], stream.device)
        tensors[name], error = in_pieces(weight, None, layers.schemes[name], {})
        entries.append(layers.entry(name, tensors[name], error).model_dump(mode="json"))
    result = build.temporary("tower.safetensors")
    digest = finished.save(result, tensors, {})
    record = {"layers": entries, "cpu_seconds": time.process_time() - begun}
    build.commit("tower", record, {result: build.steps / "tower.safetensors"}, hashes={result: digest})


def _finish_rest(prepared: Prepared, build: Build) -> None:
    """Commit the parts outside the blocks after changes by passes of scope `model`."""
    stream = prepared.stream
    if not stream.transforms or "rest" in build.done():
        return
    dtype = getattr(torch, prepared.source.dtype)
    model = stream.rest()
    changed: dict[str, Tensor] = {}
    by_file: dict[str, Tensor] = {}
    for name in stream.rest_names():
        value = stream.value(model, name).to(dtype)
        if stream.files[name] in by_file and not torch.equal(by_file[stream.files[name]], value):
            rule, remedy = "tied tensors are stored once", "the pass has to say that it unties"
            what = "a pass changed one of two tied tensors"
            raise InputError("tied-apart", where=name, value=what, rule=rule, remedy=remedy)
        by_file[stream.files[name]] = value
        if not torch.equal(value, stream.tensor(name).to(dtype)):
            changed[name] = value.contiguous()
    result = build.temporary("rest.safetensors")
    digest = finished.save(result, {}, changed)
    build.commit("rest", {}, {result: build.steps / "rest.safetensors"}, hashes={result: digest})


def _changed(prepared: Prepared, worked: Worked) -> dict[str, Tensor]:
    """Return the block's parameters after changes by folds, in the dtype of the file."""
    stream = prepared.stream
    dtype = getattr(torch, prepared.source.dtype)
    quantized = {f"{name}.weight" for name in worked.block.tensors}
    changed = {}
    for name, value in worked.block.module.named_parameters():
        full = worked.block.full_name(name)
        if name not in quantized and full in stream.files:
            stored = value.detach().to(dtype)
            if not torch.equal(stored, stream.tensor(full).to(dtype)):
                changed[full] = stored
    return changed


def _record(prepared: Prepared, worked: Worked) -> dict[str, Any]:
    """Return the journal's record of a block: its layers, the fused operators, the decisions."""
    layers, block = [], worked.block
    for name, tensor in block.tensors.items():
        full = block.full_name(name)
        error = worked.errors.get(full)
        entry = prepared.layers.entry(
            full, tensor, None if error is None else float(error), block.input_scales().get(full)
        )
        layers.append(entry.model_copy(update={"routed": worked.routed.get(full)}).model_dump(mode="json"))
    return {
        "layers": layers,
        "fusions": [[block.full_name(name) for name in members] for members in block.fusions],
        "decisions": [decision.as_dict() for decision in worked.decisions],
    }
