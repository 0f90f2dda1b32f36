"""Everything that can be refused is refused here, before the first block is touched: open, lay out, check, load.

request -> opened model -> model as passes of scope `model` will have it -> layers, steps, token sets
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.bundle import Decision
from quantkit.errors import InputError, one
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.model.device import CPU
from quantkit.model.sizes.assigned import EXPERTS, EXPERTS_KEPT, UNTIED, takes_head
from quantkit.model.source import pretrained
from quantkit.model.structure.kinds import model_graph
from quantkit.passes import NOTE, ModelOutcome, decision, pass_of
from quantkit.pipeline import estimate
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.layers import about, account, lay_out
from quantkit.pipeline.blocks.opened import Prepared, Sets
from quantkit.pipeline.request import Request, default_out, for_target, with_own_runtime
from quantkit.planning.support import caveats, demand_kind, spelt_out, with_remedy
from quantkit.plugins.outside import demand_returned
from quantkit.recipe import Recipe

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.work import PassRun


def prepare(request: Request, *, whole: bool = True, write: bool = True, seen: Sets | None = None) -> Prepared:
    """Open and check everything a compile needs.

    Args:
        whole: whether every weight is read, and looked at for NaN and infinity; a rehearsal has no time for that, nor
            for the hash of the files.
        write: whether the model writes what it is calibrated on, which takes minutes: a dry run counts it alone.
        seen: what calibrates and what scores; None loads what the recipe names.

    Raises:
        InputError: anything that would make it fail later.
    """
    from quantkit.model.source.files import MODULES, pools
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.model.structure.names import obstacles
    from quantkit.model.structure.traced import has_interface
    from quantkit.pipeline.blocks.work import PassRun, check_order, looks_at_data

    recipe = request.recipe
    source = open_model(request.model, trust_remote_code=request.trust_remote_code, hashed=whole)
    said, named = "", str((source.config.get("architectures") or [""])[0])
    if named != source.architecture and named.endswith("ForCausalLM") and pools(source.path):
        other = "a copy of the folder without that file is a decoder, which llama.cpp pools as it is told"
        said = f"an encoder, as {MODULES} pools {named} ({other})"
    demand_kind(recipe, request.target, (source.kind,), source.ref, said)
    if recipe.scheme.kv_cache is not None and source.kind != "decoder":
        raise InputError(
            "cache-unknown",
            where=source.ref,
            value=one(source.kind),
            rule="only a decoder has a KV cache",
            remedy="--set scheme.kv_cache=null",
        )
    if source.kind == "network":
        raise model_graph(source.architecture, source.ref)
    request = with_own_runtime(request, source.kind)
    added = len(request.recipe.export) > len(recipe.export)
    recipe = request.recipe
    stream = StreamedModel(source)
    largest: dict[str, float] = {}
    if whole:  # finite, every one of them: now, not hours later
        held = source.weights.largest(dict.fromkeys(stream.files.values()))
        largest = {name: held[file] for name, file in stream.files.items()}
    if recipe.passes:
        _demand_equal_experts(stream)
    steps = [PassRun(pass_of(step), step.settings) for step in recipe.passes]
    check_order(steps)
    begun = time.process_time()
    stream, taken = _transformed(stream, steps, recipe.seed)
    cpu_seconds = time.process_time() - begun
    original, source = source, stream.source
    layers = lay_out(recipe, stream.skeleton, stream.block_names, source.dtype, head=stream.head, largest=largest)
    for each in steps:
        each.run.accepts({name: columns for name, (_, columns) in layers.inside.items()}, each.settings)
    partly = looks_at_data(steps) and recipe.calibration.experts == "keep"
    asked = replace(
        layers.asked(partly=partly, cache=recipe.scheme.kv_cache),
        obstacles=obstacles(stream.skeleton, stream.files),
        stacked=[each.where for each in layers.decisions if each.code in (EXPERTS, EXPERTS_KEPT)],
        untraced="" if has_interface(stream.skeleton) else type(stream.skeleton).__name__,
        source=source,
        largest=largest,
    )
    request, settled = for_target(request, asked)
    recipe = request.recipe
    _demand_exports(recipe, asked)
    experts = bool(asked.merged or asked.stacked)
    decisions = [*request.taken, *request.support.decisions(source.kind, experts), *taken, *layers.decisions]
    if recipe.passes:
        decisions += about(account(stream, layers.schemes, decisions, head=takes_head(recipe)))
    looks = looks_at_data(steps, layers.activations.values(), recipe.scheme.kv_cache)
    if not source.trust_remote_code and pretrained.offers_code(source.path):
        reason = "the model's own code is not trusted: it stays behind, and what goes along does not name it"
        decisions.append(decision("open", NOTE, "auto_map", reason))
    calibration, scoring = seen or tokens.load(
        recipe, source, calibrate=looks, decisions=decisions, write=whole and write
    )
    if added:
        reason = f"added: a checkpoint of 8-bit integers is computed in floats on {request.target.name}, a graph is not"
        decisions.append(decision("export", NOTE, "onnx", reason))
    decisions += [decision("export", NOTE, name, reason) for name, reason in settled.items()]
    for name in request.left_out:
        reason = f"no runtime of {request.target.name} reads it with all that the recipe stores: "
        reason += ", ".join(request.target.runtimes)
        decisions.append(decision("export", NOTE, name, reason))
    decisions += [decision("export", NOTE, "checkpoint", said) for said in caveats(recipe, request.target)]
    notes = calibration.notes if calibration else ()
    where = tokens.public(recipe.calibration.set)
    decisions += [decision("calibrate", NOTE, where, note) for note in notes]
    out = request.out or default_out(source.name, recipe.name, resume=request.resume)
    found = Prepared(
        request, original, source, stream, layers, steps, calibration, scoring, out, decisions, cpu_seconds
    )
    return found if request.device == CPU else _on_device(found)


def _on_device(prepared: Prepared) -> Prepared:
    """On the device that was asked for, if a block fits on it. Raises InputError (`device-absent`, `device-memory`)."""
    device, said = estimate.chosen_device(prepared)
    decisions = [*prepared.decisions, decision("device", NOTE, device.name, said)]
    found = replace(prepared, device=device, decisions=decisions)
    return replace(found, stream=found.placed(prepared.stream))


def _transformed(stream: StreamedModel, steps: list[PassRun], seed: int) -> tuple[StreamedModel, list[Decision]]:
    """The model as passes of scope `model` will have it, and what they decided."""
    from quantkit.model.source.open import untied
    from quantkit.model.streaming.stream import StreamedModel

    decisions: list[Decision] = []
    for step in steps:
        if step.run.scope != "model":
            continue
        returned = step.run.transform(stream, step.settings, seed)
        outcome = demand_returned(returned, ModelOutcome, step.run, "transform")
        decisions += outcome.decisions
        if outcome.transform is None:
            continue
        source = untied(stream.source, stream.files) if outcome.unties else stream.source
        if source is not stream.source:
            before, after = stream.source.weights.total_bytes(), source.weights.total_bytes()
            reason = f"it will differ from the embedding that it was tied to: {after - before} bytes more"
            decisions.append(decision(step.run.name, UNTIED, stream.head or "head", reason, before, after))
            made = StreamedModel(source)
            made.transforms = stream.transforms
            stream = made
        stream.transforms.append(outcome.transform)
    return stream, decisions


def _demand_equal_experts(stream: StreamedModel) -> None:
    """Prove on the first block with experts that they are what their linears make of them; the others are of its class.

    Raises:
        InputError: `architecture-unsupported`.
    """
    from quantkit.model.structure import experts

    for index, name in enumerate(stream.block_names):
        if experts.found_in(stream.blocks[index]):
            experts.demand_equal(stream.load(index), name)
            return


def _demand_exports(recipe: Recipe, asked: LayerSpec) -> None:
    """Refuse what an export cannot hold; the remedy is for all of them at once. Raises InputError, as `accepts`."""
    problems: list[InputError] = []
    for step in recipe.export:
        try:
            load_exporter(step.name).accepts(step.settings, asked)
        except InputError as problem:
            problems.append(problem)
    if not problems:
        return
    out = {found[1]: each for each in problems if (found := re.match(r"leave `(\w+)` out", each.remedy))}
    first = next((each for each in problems if each not in out.values()), problems[0])
    if out and first not in out.values():
        first = with_remedy(first, f"{next(iter(out.values())).remedy}, and {first.remedy}")
    left = [step for step in recipe.export if step.name not in list(out)[1:]]
    raise spelt_out(first, recipe.model_copy(update={"export": left}))
