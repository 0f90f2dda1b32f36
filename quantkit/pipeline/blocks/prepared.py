"""Open, lay out, check and load a request: all refusals happen here, before the first block is touched.

request -> opened model -> model after passes of scope `model` -> layers, steps, token sets -> device
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import exporters
from quantkit.bundle import HEARS, SEES, Build, Decision
from quantkit.calibrate import PARTS
from quantkit.errors import InputError, one
from quantkit.exporters import LayerSpec, load_exporter, without
from quantkit.model.device import AUTO, CPU, ComputeDevice, present
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.model.source import pretrained
from quantkit.model.source.files import file_sha256
from quantkit.model.structure import built
from quantkit.model.structure.kinds import model_graph
from quantkit.model.structure.traced import has_interface, other_state
from quantkit.passes import GRADIENTS, NOTE, UNGRADED, ModelOutcome, decision, pass_of
from quantkit.pipeline import baseline, subject
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.layers import Layers, about, account, lay_out
from quantkit.pipeline.estimate import PROCESSORS, has_timer, lies
from quantkit.pipeline.request import Request, default_out, for_target, runs_here, with_own_runtime
from quantkit.planning.assigned import (
    EXPERTS,
    EXPERTS_KEPT,
    LEFT_OUT,
    ROLES,
    SYMMETRIC,
    TOWER,
    UNTIED,
    assign_sizes,
    takes_head,
)
from quantkit.planning.compiling import CompileSpec, Compiling, predict, timed
from quantkit.planning.fit import fit
from quantkit.planning.support import caveats, demand_kind, spelt_out, with_remedy
from quantkit.plugins.outside import demand_returned
from quantkit.recipe import ExportStep, PassStep, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantkit.calibrate.ranks import Ranks
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.exporters.values import Values
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.work import PassRun

# what calibrates (None where no pass looks at data), and what scores
Sets = tuple["TokenSet | None", "TokenSet"]
# weights of a model of speech are rounded to nearest, without recordings
ROUNDED = "rounded-without-audio"
# statistics that ranks add
_SHARED = frozenset({"hessian", "mean_square", "mean", "original_inputs", "weight_errors"})
# packages that a bundle's content depends on
_PACKAGES = ("python", "torch", "transformers", "compressed-tensors", "safetensors", "numpy")
_GRAPH = ("onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class Prepared:
    """An opened and checked request; nothing has been written.

    Attributes:
        original: model as opened.
        source: same model, with a tied tensor untied if a pass of scope `model` will change one of the two alone.
        cpu_seconds: processor seconds that passes of scope `model` took to plan their changes.
        device: device of the computation; `stream` is there.
        training: sequences for a pass of scope `answers`, then those that it holds out.
        ranks: ranks that share the work on each block; None for one process.
    """

    request: Request
    original: Source
    source: Source
    stream: StreamedModel
    layers: Layers
    steps: list[PassRun]
    calibration: TokenSet | None
    scoring: TokenSet
    out: Path
    decisions: list[Decision]
    cpu_seconds: float = 0.0
    device: ComputeDevice = field(default_factory=ComputeDevice)
    training: TokenSet | None = None
    ranks: Ranks | None = None

    def unchanged(self) -> StreamedModel:
        """Return the model as it was opened, without what passes of scope `model` make of it."""
        from quantkit.model.streaming.stream import StreamedModel

        if not self.stream.transforms:
            return self.stream
        model = self.placed(StreamedModel(self.original))
        model.pictures = self.stream.pictures
        return model

    def placed(self, stream: StreamedModel) -> StreamedModel:
        """Move a model to where this compile computes."""
        return stream.on(self.device.torch, self.device.place)

    def values(self, build: Build, *, written: bool = False) -> Values:
        """Read all committed values in the form for exporters.

        Args:
            written: True to write files from them and compare those with other libraries: on the processor.
        """
        from quantkit.exporters.values import Values
        from quantkit.model.finished import Finished
        from quantkit.model.streaming.stream import CPU as PROCESSOR

        # recovered scales and gains replace those before
        names = ("block-*", "head", "tower", "rest", "recovered")
        files = [path for name in names for path in sorted(build.steps.glob(f"{name}.safetensors"))]
        cache = self.request.recipe.scheme.kv_cache
        stream = self.stream.on(PROCESSOR) if written and not self.device.is_cpu else self.stream
        done = Finished(files, self.layers.schemes, self.layers.activations, cache)
        values = Values.of_results(self.source, stream, done)
        return values if self.device.is_cpu else replace(values, device=self.device.torch)

    @property
    def is_timed(self) -> bool:
        """True if the result will be timed: some part of it can be, and the target is this machine."""
        request = self.request
        able = request.speed and bool(self.layers.schemes)
        return able and runs_here(request.target) and has_timer(request.recipe)


def fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Return all inputs of a bundle's content."""
    matrices = (step.settings.model_dump().get("imatrix") for step in prepared.steps)
    return subject.fingerprint(
        prepared.request,
        (*_PACKAGES, *_GRAPH),
        model=prepared.source.ref,
        source=prepared.source.sha256,
        files=[file_sha256(Path(file)) for file in matrices if file],
        calibration=prepared.calibration.sha256 if prepared.calibration else None,
        scoring=prepared.scoring.sha256,
        **({"training": prepared.training.sha256} if prepared.training else {}),
        **({"sums": f"in {PARTS} parts"} if prepared.ranks else {}),
        **prepared.device.as_dict(),
    )


def prepare(
    request: Request,
    *,
    whole: bool = True,
    write: bool = True,
    seen: Sets | None = None,
    ranks: Ranks | None = None,
) -> Prepared:
    """Open and check everything a compile needs.

    Args:
        whole: whether every weight is read, and looked at for NaN and infinity; a rehearsal has no time for that, nor
            for the hash of the files.
        write: whether the model writes what it is calibrated on, which takes minutes: a dry run counts it alone.
        seen: what calibrates and what scores; None loads what the recipe names.
        ranks: ranks that share the work on each block; None for one process.

    Raises InputError: anything that would make it fail later.
    """
    from quantkit.model.source.merged import open_merged
    from quantkit.model.streaming.calls import Sounds
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.model.structure.names import apart, obstacles
    from quantkit.pipeline.blocks.work import PassRun, check_order, looks_at_data

    recipe = request.recipe
    trusted = request.trust_remote_code
    source = open_merged(request.model, request.adapters, trust_remote_code=trusted, hashed=whole)
    _demand_purpose(request, source)
    request, rounded = _without_data(request, source)
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
    steps, ungraded = _without_gradients(stream, steps)
    original, source = source, stream.source
    hindering, single = obstacles(stream.skeleton, stream.files), apart(stream.skeleton)

    def laid(recipe: Recipe) -> tuple[Layers, LayerSpec]:
        layers = lay_out(recipe, stream.skeleton, stream.block_names, source.dtype, head=stream.head, largest=largest)
        partly = looks_at_data(steps) and recipe.calibration.experts == "keep"
        asked = replace(
            _asked(layers, stream.skeleton, recipe, partly=partly, decodes=source.kind == "decoder"),
            obstacles=hindering,
            apart=single,
            source=source,
            largest=largest,
        )
        return layers, asked

    layers, asked = laid(recipe)
    for step in steps:
        step.run.accepts({name: columns for name, (_, columns) in layers.inside.items()}, step.settings)
    recipe, left_out = _without_unable(recipe, asked)
    recipe, evened = _with_symmetric(recipe, asked)
    request = replace(request, recipe=recipe)
    if evened:
        layers, asked = laid(recipe)
    request, settled = for_target(request, asked)
    recipe = request.recipe
    _demand_exports(recipe, asked)
    no_graph = bool(asked.merged or asked.stacked or asked.stateful) or source.sees
    support = request.support.decisions(source.kind, no_graph)
    decisions = [*request.taken, *rounded, *left_out, *evened, *support, *taken, *ungraded, *layers.decisions]
    if source.sees:
        own = len(layers.tower & layers.schemes.keys())
        reason = f"{own} of its linears are rounded to nearest, as an override says" if own else TOWER
        decisions.append(decision("open", NOTE, SEES, reason))
    if source.hears:
        decisions.append(decision("open", NOTE, HEARS, "its decoder writes what the encoder hears"))
    if source.quantization is not None:
        decisions.append(decision("open", NOTE, "weights", source.quantization.note(source.name)))
    if recipe.passes:
        decisions += about(account(stream, layers.schemes, decisions, head=takes_head(recipe)))
    if not source.trust_remote_code and pretrained.offers_code(source.path):
        reason = "the model's own code is not trusted: it stays behind, and what goes along does not name it"
        decisions.append(decision("open", NOTE, "auto_map", reason))
    looks = looks_at_data(steps, layers.activations.values(), recipe.scheme.kv_cache)
    calibration, scoring = seen or tokens.load(
        recipe, source, calibrate=looks, decisions=decisions, write=whole and write, whole=False
    )
    if calibration is not None and calibration.pictures is not None:
        stream.pictures = calibration.pictures
    if source.hears and scoring.pictures is not None:
        stream.pictures = Sounds({**stream.pictures.rows, **scoring.pictures.rows})
    tokens.unheard(source, scoring, decisions)
    notes = list(settled.items())
    if added:
        reason = f"added: a checkpoint of 8-bit integers is computed in floats on {request.target.name}, a graph is not"
        notes.insert(0, ("onnx", reason))
    reason = f"no runtime of {request.target.name} reads it with all that the recipe stores: "
    notes += [(name, reason + ", ".join(request.target.runtimes)) for name in request.left_out]
    notes += [("checkpoint", caveat) for caveat in caveats(recipe, request.target)]
    decisions += [decision("export", NOTE, name, reason) for name, reason in notes]
    where = tokens.public(recipe.calibration.set)
    decisions += [decision("calibrate", NOTE, where, note) for note in (calibration.notes if calibration else ())]
    if scoring.lengths is not None:
        decisions += [decision("score", NOTE, where, note) for note in scoring.notes]
    out = request.out or default_out(source.name, recipe.name, resume=request.resume)
    training = _training(stream, layers, recipe, steps, scoring) if seen is None else None
    prepared = Prepared(
        request, original, source, stream, layers, steps, calibration, scoring, out, decisions, cpu_seconds
    )
    prepared = replace(prepared, training=training, ranks=ranks)
    if ranks is not None:
        prepared.decisions.append(_demand_shared(prepared, ranks))
    if request.device == CPU:
        return prepared
    device, why = chosen_device(prepared)
    prepared = replace(prepared, device=device, decisions=[*decisions, decision("device", NOTE, device.name, why)])
    return replace(prepared, stream=prepared.placed(stream))


def _demand_shared(prepared: Prepared, ranks: Ranks) -> Decision:
    """Refuse work of one process alone, and note how ranks add.

    Raises InputError: `ranks-unsupported`, `ranks-count`.
    """
    activations, cache = prepared.layers.activations.values(), prepared.request.recipe.scheme.kv_cache
    asking = next((step.run.name for step in prepared.steps if step.needs - _SHARED), "")
    fixed = any(not scheme.dynamic for scheme in activations) or (cache is not None and not cache.dynamic)
    graded = next((step.run.name for step in prepared.steps if step.needs - _SHARED == {GRADIENTS}), "")
    value = f"pass {asking}" if asking else "fixed scales of inputs or of the KV cache" if fixed else ""
    if value:
        rule, remedy = f"ranks share sums: {', '.join(sorted(_SHARED))}", "the same command without torchrun"
        remedy = f"--set {graded}.gradients=0, or {remedy}" if graded else remedy
        raise InputError("ranks-unsupported", "torchrun", value + " with gradients" * bool(graded), rule, remedy)
    sequences = len(prepared.calibration.ids) if prepared.calibration else PARTS
    if ranks.count > sequences:
        rule, remedy = "each rank has a sequence", f"at most {1 << sequences.bit_length() - 1} ranks"
        value = f"{ranks.count} ranks, {sequences} sequences"
        raise InputError("ranks-count", "calibration.samples", value, rule, remedy)
    reason = f"statistics are sums in {PARTS} parts: the same content on any number of ranks with as many threads each"
    return decision("calibrate", NOTE, "ranks", reason)


def _demand_purpose(request: Request, source: Source) -> None:
    """Refuse a model of another kind than the recipe is for. Raises InputError `model-kind`, `cache-unknown`."""
    from quantkit.model.source.files import MODULES, pools

    remark, named = "", str((source.config.get("architectures") or [""])[0])
    if named != source.architecture and named.endswith("ForCausalLM") and pools(source.path):
        other = "a copy of the folder without that file is a decoder, which llama.cpp pools as it is told"
        remark = f"an encoder, as {MODULES} pools {named} ({other})"
    demand_kind(request.recipe, request.target, (source.kind,), source.ref, remark)
    alone = source.kind == "decoder" and not source.has_encoder
    if request.recipe.scheme.kv_cache is not None and not alone:
        rule, remedy = "only a decoder alone has a KV cache of one kind", "--set scheme.kv_cache=null"
        value = one(source.kind) + (" beside an encoder" if source.has_encoder else "")
        raise InputError("cache-unknown", where=source.ref, value=value, rule=rule, remedy=remedy)
    if source.kind == "network":
        raise model_graph(source.architecture, source.ref)


def _without_data(request: Request, source: Source) -> tuple[Request, list[Decision]]:
    """Round to nearest where a pass looks at data, and a model of speech has no recordings."""
    from quantkit.calibrate.tokens.heard import hears_set
    from quantkit.passes.rtn import Rtn

    recipe, names = request.recipe, [step.name for step in request.recipe.passes]
    if not source.hears or hears_set(recipe.calibration.set):
        return request, []
    if not any(pass_of(step).needs_with(step.settings) for step in recipe.passes):
        return request, []
    reason = "no recordings to calibrate on (--calibration FOLDER of WAV files): weights are rounded to nearest"
    taken = decision("calibrate", ROUNDED, "passes", reason, ", ".join(names), Rtn.name)
    nearest = PassStep(name=Rtn.name, settings=Rtn.Settings(range="mse"))
    return replace(request, recipe=recipe.model_copy(update={"passes": [nearest]})), [taken]


def _without_gradients(stream: StreamedModel, steps: list[PassRun]) -> tuple[list[PassRun], list[Decision]]:
    """Let passes do without gradients where the model has none, or an earlier pass changes what they are taken of."""
    asking = next((number for number, step in enumerate(steps) if GRADIENTS in step.needs), None)
    if asking is None:
        return steps, []
    before = next((step.run.name for step in steps[:asking] if step.run.scope == "block"), "")
    if stream.source.kind != "decoder" or stream.source.has_encoder:
        reason = "only a decoder alone answers with one distribution a token"
    elif stream.flow.live:
        reason = "its blocks read more than the output of the one before, so gradients cannot pass block by block"
    elif before:
        reason = f"{before} before it changes what linears put out"
    else:
        return steps, []
    step = steps[asking]
    taken = decision(step.run.name, UNGRADED, stream.source.architecture, reason, step.settings.gradients, 0)
    without = replace(step, settings=step.settings.model_copy(update={"gradients": 0}))
    return [*steps[:asking], without, *steps[asking + 1 :]], [taken]


def _training(
    stream: StreamedModel, layers: Layers, recipe: Recipe, steps: list[PassRun], scoring: TokenSet
) -> TokenSet | None:
    """Load sequences for a pass of scope `answers` to train on and to hold out; None without such a pass.

    Raises InputError: `recover-unable`, `recover-scales`, `recover-text`.
    """
    step = next((step for step in steps if step.run.scope == "answers"), None)
    if step is None:
        return None
    name, source, without = step.run.name, stream.source, f"take `{step.run.name}` out of the recipe's passes"
    if source.kind != "decoder" or source.has_encoder or stream.flow.live:
        rule = "gradients of answers need a decoder alone, of which each block reads the output of the one before"
        raise InputError("recover-unable", f"passes: {name}", source.architecture, rule, without)
    for linear, scheme in layers.schemes.items():
        if not scheme.trains_scale:
            rule = "a scale is trained where it is stored as a float of its own"
            raise InputError("recover-scales", f"passes: {name}", f"{scheme.format} in {linear}", rule, without)
    return tokens.training(recipe, source, name, step.settings, scoring)


def _transformed(stream: StreamedModel, steps: list[PassRun], seed: int) -> tuple[StreamedModel, list[Decision]]:
    """Return the model after the passes of scope `model`, and their decisions."""
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
            transforms, stream = stream.transforms, StreamedModel(source)
            stream.transforms = transforms
        stream.transforms.append(outcome.transform)
    return stream, decisions


def _demand_equal_experts(stream: StreamedModel) -> None:
    """Prove on the first block with experts that they are what their linears make of them; the others are of its class.

    Raises InputError: `architecture-unsupported`.
    """
    from quantkit.model.structure import experts

    for index, name in enumerate(stream.block_names):
        if experts.found_in(stream.blocks[index]):
            experts.demand_equal(stream.load(index), name)
            return


def foreseen(recipe: Recipe, architecture: Architecture, build: Callable[..., Any]) -> tuple[Recipe, list[Decision]]:
    """Settle the exports of a model as a compile does, from its config alone. `build`, its `built.skeleton`, is asked
    for the blocks up to the first with experts where the recipe names no layers inside.

    Raises InputError: what the compile would refuse by the linears or the exports.
    """
    from quantkit.model.structure.names import apart, obstacles
    from quantkit.model.structure.traced import find_head, find_stacks, names_of
    from quantkit.pipeline.blocks.work import PassRun, looks_at_data

    assign_sizes(recipe, architecture)
    mixed = [any(matrix.count > 1 for matrix in layer.matrices) for layer in architecture.layers]
    named = {*recipe.keep, *(override.match for override in recipe.overrides)} - {*ROLES}
    skeleton = build(None if named else (mixed.index(True) if any(mixed) else 0) + 1)
    if skeleton is None:
        return recipe, []
    looks = looks_at_data([PassRun(pass_of(step), step.settings) for step in recipe.passes])
    names, hindering, single = names_of(skeleton, find_stacks(skeleton)), obstacles(skeleton, {}), apart(skeleton)

    def laid(recipe: Recipe) -> LayerSpec:
        layers = lay_out(recipe, skeleton, names, architecture.dtype, head=find_head(skeleton))
        how = {"partly": looks and recipe.calibration.experts == "keep", "decodes": architecture.kind == "decoder"}
        asked = _asked(layers, skeleton, recipe, **how)
        return replace(asked, obstacles=hindering, apart=single)

    recipe, left_out = _without_unable(recipe, asked := laid(recipe))
    recipe, evened = _with_symmetric(recipe, asked := laid(recipe) if left_out else asked)
    _demand_exports(recipe, laid(recipe) if evened else asked)
    return recipe, [*left_out, *evened]


def _asked(layers: Layers, skeleton: PreTrainedModel, recipe: Recipe, *, partly: bool, decodes: bool) -> LayerSpec:
    """Return the demands of a compile on an export; the model may lack weights."""
    return replace(
        layers.asked(partly=partly, cache=recipe.scheme.kv_cache),
        stacked=[kept.where for kept in layers.decisions if kept.code in (EXPERTS, EXPERTS_KEPT)],
        untraced="" if has_interface(skeleton) else type(skeleton).__name__,
        stateful=other_state(skeleton) if decodes else "",
        class_name=type(skeleton).__name__,
    )


def _without_unable(recipe: Recipe, asked: LayerSpec) -> tuple[Recipe, list[Decision]]:
    """Leave out exports of another kind of model, while one is left: recipes name ONNX beside a checkpoint."""
    steps, decisions = list[ExportStep](), list[Decision]()
    for step in recipe.export:
        try:
            load_exporter(step.name).accepts(step.settings, replace(asked, cache=None))
        except InputError as problem:
            if problem.remedy == without(step.name):
                decisions.append(decision("export", LEFT_OUT, step.name, f"{problem.value}: {problem.rule}"))
                continue
        steps.append(step)
    if not decisions or not steps:
        return recipe, []
    return recipe.model_copy(update={"export": steps}), decisions


def _with_symmetric(recipe: Recipe, asked: LayerSpec) -> tuple[Recipe, list[Decision]]:
    """Drop the zero points of a recipe where an export cannot hold those of experts."""
    scheme = recipe.scheme
    for step in recipe.export:
        try:
            load_exporter(step.name).accepts(step.settings, asked)
        except InputError as problem:
            if scheme.weights is not None and problem.remedy == exporters.SYMMETRIC and not scheme.weights.symmetric:
                weights = scheme.weights.model_copy(update={"symmetric": True})
                changed = {"scheme": scheme.model_copy(update={"weights": weights})}
                taken = decision("recipe", SYMMETRIC, "scheme.weights.symmetric", problem.rule, "false", "true")
                return recipe.model_copy(update=changed), [taken]
    return recipe, []


def _demand_exports(recipe: Recipe, asked: LayerSpec) -> None:
    """Refuse values outside an export's range, with one remedy for all. Raises InputError, as `accepts`."""
    problems: list[InputError] = []
    for step in recipe.export:
        try:
            load_exporter(step.name).accepts(step.settings, asked)
        except InputError as problem:
            problems.append(problem)
    if not problems:
        return
    leaving = ((re.match(r"leave `(\w+)` out", problem.remedy), problem) for problem in problems)
    out = {match[1]: problem for match, problem in leaving if match}
    first = next((problem for problem in problems if problem not in out.values()), problems[0])
    if out and first not in out.values():
        first = with_remedy(first, f"{next(iter(out.values())).remedy}, and {first.remedy}")
    left = [step for step in recipe.export if step.name not in list(out)[1:]]
    raise spelt_out(first, recipe.model_copy(update={"export": left}))


def estimate(prepared: Prepared) -> Compiling:
    """Predict memory and disk of the compile on this machine's processor; for a GPU's compile, a note says so."""
    expected = predict(spec(prepared))
    return expected if prepared.device.is_cpu else replace(expected, notes=(*expected.notes, PROCESSORS))


def spec(prepared: Prepared) -> CompileSpec:
    """Describe the compile in sizes."""
    recipe, model, schemes = prepared.request.recipe, architecture(prepared), prepared.layers.schemes
    coded = {}
    for matrix in [*model.inside(), *([model.head] if model.head is not None else [])]:
        # of experts one entry stands for many
        stored = [name for name in schemes if name == matrix.name or fnmatchcase(name, matrix.name)]
        if stored:
            coded[matrix.name] = schemes[stored[0]]
    samples, length = prepared.calibration.ids.shape if prepared.calibration is not None else (0, 0)
    scored, scored_length = prepared.scoring.ids.shape
    if prepared.scoring.pairs is not None:  # both texts of each
        scored = 2 * prepared.scoring.items
    step = timed(recipe)
    cached = step is not None and baseline.place(prepared.original, step.name, step.options).exists()
    return CompileSpec(
        model,
        recipe,
        coded,
        samples,
        length,
        scored * scored_length,
        scored_length,
        timed=prepared.is_timed,
        baseline=prepared.is_timed and step is not None and not cached,
        beside=_beside(prepared.stream, model.hidden),
    )


def chosen_device(prepared: Prepared) -> tuple[ComputeDevice, str]:
    """Choose where a compile computes, in sizes that are known before it begins, and say why.

    Raises InputError: `device-absent`; `device-memory`, where it was named and a block does not fit.
    """
    asked = prepared.request.device
    try:
        name, model, free = present("cuda" if asked == AUTO else asked)
    except InputError as problem:
        if asked != AUTO:
            raise
        return ComputeDevice(), f"on the processor: {problem.value}; products in float32"
    fitting = fit(replace(spec(prepared), live=prepared.stream.flow.live), free)
    reason = lies(fitting, asked, model)
    if not fitting.fits:
        return ComputeDevice(), f"{reason}; products in float32"
    device = ComputeDevice(name, model, fitting.chunk, fitting.resident, prepared.request.tf32)
    return device, f"{reason}; products in {device.products}"


def _beside(stream: StreamedModel, hidden: int) -> int:
    """Count the values of a token that are looked up for blocks beside its hidden states: an embedding outside the
    blocks that is wider than those has a part for each block."""
    from torch import nn

    from quantkit.model.structure.traced import is_inside

    tables = [
        module.embedding_dim
        for name, module in stream.skeleton.named_modules()
        if isinstance(module, nn.Embedding) and not is_inside(name, stream.paths)
    ]
    return sum(width for width in tables if width > hidden)


def architecture(prepared: Prepared) -> Architecture:
    """Describe the model in sizes: by its config, where that gives the linears that it has; else by its modules."""
    source, shapes, stream = prepared.source, prepared.layers.inside, prepared.stream
    if configs.is_known(source.config):
        try:
            known = configs.from_config(source.config, source.name)
        except InputError:
            pass
        else:
            mine = sum(any(_stands(m, name, shape) for m in known.inside()) for name, shape in shapes.items())
            if mine == len(shapes) == sum(matrix.count for matrix in known.inside()):
                # the size of a tower is an estimate in the config's figures
                more = sum(value.numel() for value in stream.skeleton.parameters()) - known.parameters
                return replace(known, others=known.others + more) if source.sees else known
    return built.sizes_of(stream.skeleton, source.kind, source.name, source.dtype)


def _stands(matrix: Matrix, name: str, shape: tuple[int, int]) -> bool:
    """Tell whether an entry of an architecture is a linear of the model, or one of many experts'."""
    return shape == (matrix.N, matrix.K) and (matrix.name == name or fnmatchcase(name, matrix.name))
