"""Measure accuracy, size and speed of a bundle against its original or another model.

`measure` does all of it. A compile ends by calling it, with the new folder and the models that are still open.
`quantkit measure` opens a finished bundle's original (`original_of`), calls it, and writes the result into the bundle
(`keep`).

Accuracy needs torch and the original; speed needs the float model in the same runtime. On a machine with the small
install alone, `--baseline` names a bundle that holds the float model. All refusals come before any measurement: missing
packages, sides that do not match, a bundle that cannot be written.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import limits, machine
from quantkit.bundle import Bundle, Decision
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import GateError, InputError, MissingDependency, QuantkitError
from quantkit.kernels import GPUS, too_old
from quantkit.measurement.rows import Row
from quantkit.measurement.size import folder_of, read_rows, size_rows
from quantkit.measurement.timing.schedule import LARGEST, TimingPlan
from quantkit.passes import decision
from quantkit.pipeline import served
from quantkit.pipeline.baseline import float_export, float_format
from quantkit.pipeline.engines import look
from quantkit.pipeline.graphs.bundles import (
    baseline_needed,
    demand_inputs,
    file_of,
    float_file,
    holds_graph,
    is_network,
    scoring,
)
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import RUNTIME, export_of, format_of, keep, options_of, target_of
from quantkit.recipe import Recipe
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import demand_decoder
from quantkit.runtimes.onnxruntime import RUNTIME as ONNXRUNTIME

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.graph.open import FloatGraph
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.timing.speed import SpeedSide
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.graphs.answers import SampleCost

# a compile looks at a step and a prompt; `quantkit measure` at all shapes
QUICK = TimingPlan(batches=(1,), contexts=(128,), prefills=(64,), seconds=7.0, cell_seconds=7.0, rounds=5)
_OTHERS = TimingPlan(seconds=60.0, cell_seconds=60.0, rounds=4)
# of a model that does not decode: one text and many, as short as a query and as long as a passage
_TEXTS, _LENGTHS = (1, 32), (32, 128)
# bytes of memory a weight takes while a float graph is made and loaded again: of Gemma 3 270M 3.9 GB were seen
_MAKING = 15


@dataclass(frozen=True)
class MeasuredAgainst:
    """The original that a bundle is measured against, and the data.

    Attributes:
        subject: identity in the rows: hash of the bundle's own original, or `content_sha256` of another bundle.
        format: format of its weights.
        stream: model to score against; None if it is not available.
        tokens: tokens that score a transformer.
        folder: folder with the float model's export, if it exists already.
        graph: float graph; None for transformers.
        samples: samples to score and time a graph on.
        cost: cost of one sample; None counts it.
    """

    subject: str
    format: str = "float32"
    stream: StreamedModel | None = None
    tokens: TokenSet | None = None
    folder: Path | None = None
    graph: FloatGraph | None = None
    samples: InputSet | None = None
    cost: SampleCost | None = None

    @property
    def bytes(self) -> int | None:
        """Bytes of its weights; None if unknown."""
        if self.graph is not None:
            return self.graph.bytes
        return None if self.stream is None else self.stream.source.bytes

    def floats_in_torch(self) -> StreamedModel:
        """Return the float model as the baseline of steps on a GPU. Raises InputError `baseline-needed`."""
        if self.stream is None or self.format != "float32":
            rule = "on a GPU the baseline of times is the float model in bfloat16"
            remedy = "--baseline MODEL, or --no-speed"
            raise InputError("baseline-needed", where="--baseline", value="another bundle", rule=rule, remedy=remedy)
        return self.stream

    def floats(self, bundle: Bundle, runtime: str) -> tuple[Path, str]:
        """Return the folder and format of the float model's export for a runtime; exported if it does not exist.

        Raises InputError, GateError: those of `float_export`.
        """
        if self.folder is not None:
            return self.folder, self.format
        assert self.stream is not None
        exporter = export_of(runtime)
        options = options_of(bundle, exporter)
        return float_export(self.stream.source, exporter, options), float_format(exporter, options)

    def costs(self) -> SampleCost:
        """Return the cost of one sample of a graph. Raises InputError: those of `graphs.answers.cost`."""
        from quantkit.graph.sites import sites
        from quantkit.pipeline.graphs.answers import cost

        assert self.graph is not None and self.samples is not None
        return self.cost or cost(self.graph.model, sites(self.graph.model), self.samples.first(2))


def measure(
    bundle: Bundle,
    original: MeasuredAgainst,
    runtime: str,
    *,
    accuracy: bool = True,
    plan: TimingPlan | None = None,
    candidate: Any = None,
    weighed: str | None = None,
    engine: Any = None,
    across: bool = False,
    progress: Progress | None = None,
    scored: Callable[[float], None] | None = None,
) -> tuple[list[Row], Items | None]:
    """Measure a bundle, finished or still in its build, in one runtime.

    Args:
        accuracy: True to score and weigh it.
        plan: shapes and seconds of the timing; None does not time it.
        candidate: the model opened in its runtime already; for a graph, its runner.
        weighed: folder of the bundle whose files are weighed; None is the one for the runtime.
        engine: engine to time on this machine's GPU; True times quantkit's own kernels there.
        across: True to time ONNX Runtime in turns with a file of another runtime.
        scored: callback with the finished share of the score; None tells `progress`.

    Returns:
        The rows, and the results for each position of a decoder.

    Raises InputError, GateError, MissingDependency: of opening, scoring and timing.
    """
    progress = progress or Progress()
    rows: list[Row] = []
    items: Items | None = None
    if accuracy and load_runtime(runtime).own is not None:
        rows, items = served.score(bundle, original.stream, original.tokens, original.subject, runtime, progress)
        rows = [*sizes(bundle, original, folder_of(export_of(runtime))), *rows]
    elif accuracy and (original.stream is not None or original.graph is not None):
        tell = scored or (lambda done: progress.at("score", done))
        judge = _score_graph if original.graph is not None else _score
        rows, items = judge(bundle, original, runtime, candidate, weighed, tell)
    if plan is not None:
        if engine:
            rows += _on_gpu(bundle, original, None if engine is True else engine, plan, progress)
        elif original.graph is not None:
            rows += _time_graph(bundle, original, runtime, plan, progress)
        else:
            rows += _time(bundle, original, runtime, plan, progress, across=across)
    return rows, items


def sizes(bundle: Bundle, original: MeasuredAgainst, folder: str) -> list[Row]:
    """Weigh the files in one folder of a bundle."""
    manifest = bundle.manifest
    against: dict[str, Any] = {"baseline": original.subject, "baseline_bytes": original.bytes}
    return size_rows(manifest.layers, manifest.files, subject=manifest.content_sha256, folder=folder, **against)


def _score(
    bundle: Bundle,
    original: MeasuredAgainst,
    runtime: str,
    candidate: Any,
    weighed: str | None,
    tell: Callable[[float], None],
) -> tuple[list[Row], Items | None]:
    from quantkit.measurement.accuracy import score

    stream = original.stream
    assert stream is not None and original.tokens is not None
    subject, folder = bundle.manifest.content_sha256, weighed or folder_of(export_of(runtime))
    if stream.source.hears and original.tokens.lengths is None:
        return sizes(bundle, original, folder), None
    candidate = load_runtime(runtime).open(bundle.path) if candidate is None else candidate
    rows = sizes(bundle, original, folder)
    rows += read_rows(candidate.ways, subject=subject, folder=folder)
    scores, items = score.rows(stream, candidate, original.tokens, subject=subject, runtime=runtime, progress=tell)
    for row in score.flagged(scores, bundle.manifest.model.source.was):
        # a checkpoint of the float model has another hash than the model
        if row.baseline is not None and row.baseline.subject == stream.source.sha256:
            named = row.baseline.model_copy(update={"subject": original.subject})
            row = row.model_copy(update={"baseline": named})  # noqa: PLW2901
        rows.append(row)
    return rows, items


def _score_graph(
    bundle: Bundle,
    original: MeasuredAgainst,
    runtime: str,
    candidate: Any,
    weighed: str | None,
    tell: Callable[[float], None],
) -> tuple[list[Row], None]:
    from quantkit.pipeline.graphs.answers import agreement, answers, kinds_of
    from quantkit.pipeline.graphs.bundles import runner

    graph, samples = original.graph, original.samples
    assert graph is not None and samples is not None
    own = runner(bundle, runtime) if candidate is None else candidate
    expected = answers(graph.model, samples, lambda done: tell(done / 2))
    answered = answers(own, samples, lambda done: tell((1 + done) / 2))
    subject, baseline = bundle.manifest.content_sha256, original.subject
    kinds = kinds_of(graph.model)
    rows = agreement(expected, answered, samples, kinds, subject=subject, baseline=baseline, runtime=runtime)
    return [*sizes(bundle, original, weighed or file_of(bundle, runtime).parent.name), *rows], None


def _time(
    bundle: Bundle, original: MeasuredAgainst, runtime: str, plan: TimingPlan, progress: Progress, *, across: bool
) -> list[Row]:
    """Time a runtime on the bundle, in turns with the float model in a file for that runtime."""
    from quantkit.measurement.timing.speed import SpeedJob, SpeedSide, run

    manifest, reads = bundle.manifest, load_runtime(runtime)
    folder = reads.folder(bundle)
    progress.at("speed", 0.0, f"the float model as {export_of(runtime)}, for comparison")
    baseline, form = original.floats(bundle, runtime)
    floats = reads.floats or runtime
    other = _across(bundle, original, progress) if across and floats != RUNTIME else None
    ours = SpeedSide(str(folder), manifest.content_sha256, format_of(manifest.layers), runtime=runtime)
    theirs = SpeedSide(str(baseline), original.subject, form, runtime=floats)
    sides = [ours, theirs, *([other] if other else [])]
    context = min(load_runtime(side.runtime).context(Path(side.path)) for side in sides)
    job = SpeedJob(ours, theirs, machine.cores(), fitting(plan, context, manifest.model.kind), across=other)
    return run(job, lambda share, words: progress.at("speed", share, words))


def _time_graph(
    bundle: Bundle, original: MeasuredAgainst, runtime: str, plan: TimingPlan, progress: Progress
) -> list[Row]:
    """Time a graph and its float one, on real inputs; a graph of a fixed batch at that alone."""
    from quantkit.measurement.timing.speed import Samples, SpeedJob, SpeedSide, run

    manifest, graph, samples = bundle.manifest, original.graph, original.samples
    assert graph is not None and samples is not None
    batches = [samples.batch] if samples.batch else list(plan.batches)
    if samples.batch:
        progress.note(f"the graph takes {samples.batch} samples at a time, so it is timed at batch {samples.batch}")
    path, costs = file_of(bundle, runtime), original.costs()
    size = sum(entry.bytes for entry in manifest.files if entry.path.startswith(f"{path.parent.name}/"))
    plan = TimingPlan((), (), (1,), batches, plan.seconds, cell_seconds=plan.seconds, rounds=plan.rounds)
    with tempfile.TemporaryDirectory(prefix="quantkit-speed-") as folder:
        file = Path(folder) / "samples.npz"
        np.savez(file, allow_pickle=False, **samples.first(max(batches)))
        inputs = Samples(str(file), float(sum(costs.macs.values())), float(costs.outputs))
        ours = SpeedSide(str(path), manifest.content_sha256, format_of(manifest.layers), size, runtime)
        theirs = SpeedSide(str(graph.path), original.subject, "float32", graph.bytes)
        job = SpeedJob(ours, theirs, machine.cores(), plan, inputs)
        return run(job, lambda share, words: progress.at("speed", share, words))


def _across(bundle: Bundle, original: MeasuredAgainst, progress: Progress) -> SpeedSide | None:
    """Return the graph for ONNX Runtime to run in turns with a file of another runtime: the bundle's own, else the
    float model's; None, with a note, if there is neither.
    """
    from quantkit.measurement.timing.speed import SpeedSide

    manifest, name = bundle.manifest, export_of(RUNTIME)
    if usage.has(manifest, "onnx/"):
        return SpeedSide(str(ONNXRUNTIME.checked(bundle)), manifest.content_sha256, format_of(manifest.layers))
    if original.stream is None or original.folder is not None:
        return None
    source = original.stream.source
    need = _MAKING * sum(math.prod(entry.shape) for entry in source.weights.entries.values())
    if need > machine.memory_available():
        progress.note(f"not timed beside {RUNTIME}: its float graph would take about {need / 1e9:.1f} GB of memory")
        return None
    progress.at("speed", 0.0, f"the float model as {name}, for comparison")
    try:
        folder = float_export(source, name, options_of(bundle, name))
    except (InputError, MissingDependency, GateError) as problem:
        progress.note(f"not timed beside {RUNTIME}: {problem.line()}")
        return None
    return SpeedSide(str(folder), original.subject, "float32")


def _on_gpu(bundle: Bundle, original: MeasuredAgainst, engine: Any, plan: TimingPlan, progress: Progress) -> list[Row]:
    """Time an engine against torch in bfloat16, or steps on quantkit's own kernels against it. Raises InputError."""
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.timing import cuda as speed_cuda

    source, device = original.floats_in_torch().source, GpuDevice("cuda", dry=False)

    def tell(share: float, words: str) -> None:
        progress.at("speed", share, words)

    if engine is not None:
        return speed_cuda.run_engine(engine, bundle, source, fitting(plan, engine.capacity), device, progress=tell)
    rows, note = speed_cuda.run(bundle, source, plan, device, progress=tell)
    if note:
        progress.note(note)
    return rows


def quick_times(
    bundle: Bundle, original: MeasuredAgainst, runtime: str, progress: Progress
) -> tuple[list[Row], list[Decision]]:
    """Take the quick look of a compile; what prevents it is a decision, not the end of the compile."""
    plan = quick("network" if original.graph is not None else bundle.manifest.model.kind)
    try:
        return measure(bundle, original, runtime, accuracy=False, plan=plan, progress=progress)[0], []
    except (InputError, MissingDependency, GateError) as problem:
        return [], [decision("measure", "speed-not-measured", runtime, problem.line())]


def measure_bundle(
    bundle: Bundle,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    runtime: str | None = None,
    calibration: str | None = None,
    plan: TimingPlan | None = None,
    speed: bool = True,
    decisions: list[Decision] | None = None,
) -> list[Row]:
    """Measure a bundle in one runtime. Its rows replace those of their kind; verdict and page follow.

    Args:
        plan: shapes and seconds of the timing; its batches default to the target's, up to 32.
        decisions: list for deviations from the request: text from another place.

    Raises InputError: `baseline-needed`, if the source was a folder; `bundle-without-onnx` or `-checkpoint`;
    `nothing-to-score-on`, if `calibration` has nothing for this; MissingDependency: of the runtime.
    """
    progress, decisions = progress or Progress(), [] if decisions is None else decisions
    runtime = runtime or default_runtime(bundle)
    runner = load_runtime(runtime)
    network = is_network(bundle) and runtime == RUNTIME
    is_apart = runner.own is not None
    if is_apart:
        demand_decoder(bundle)
    if not network:
        runner.folder(bundle)
    if not runner.engines:  # loading one says more
        runner.demand()
    bundle.demand_writable()
    bundle.demand_intact()
    engine = runner.load(bundle) if runner.engines else None
    looked = None if engine is None else look(engine, bundle.manifest.layers)
    for note in () if engine is None else engine.notes:
        progress.note(note)
    timed = speed and runner.floats is not None and not network
    if timed:
        from quantkit.measurement.timing.speed import demand

        demand({runtime})
    try:
        original = original_of(bundle, baseline, runner.floats if timed else None, calibration, decisions)
    except InputError as problem:
        if not is_apart or problem.code != "baseline-needed":
            raise
        progress.note(f"compared with torch alone: {problem.value}; {problem.remedy}")
        text = served.text_of(bundle, calibration, decisions)
        original = MeasuredAgainst(bundle.manifest.model.source.sha256, tokens=text)
    if speed and is_apart:
        progress.note(f"speed in {runtime} is measured under load: quantkit measure {bundle.path} --load rate=1,2,4")
    on_gpu: Any = None
    if speed and original.graph is None:
        if engine is None:
            on_gpu = _steps_on_gpu(bundle, runtime, progress) or None
        elif engine.decoder and engine.engine.device.type == "cuda":
            on_gpu = engine
    if on_gpu:
        original.floats_in_torch()
    default = quick("network") if original.graph is not None else TimingPlan(batches=batches_of(bundle))
    chosen = (plan or default) if timed or on_gpu else None
    stages = {"score": 60.0} if original.bytes is not None or is_apart else {}
    progress.plan({**stages, "speed": 60.0 + chosen.seconds} if chosen else stages)
    how: dict[str, Any] = {"engine": None if timed else on_gpu, "progress": progress}
    rows, items = measure(bundle, original, runtime, **how)
    if chosen is not None:
        try:
            rows += measure(bundle, original, runtime, accuracy=False, plan=chosen, across=True, **how)[0]
        except QuantkitError:
            if rows:
                keep(bundle, rows, items, runtime, original.subject, progress)
                progress.note("accuracy and size were measured and kept; speed was not measured")
            raise
    keep(bundle, rows, items, runtime, original.subject, progress, looked)
    return rows


def default_runtime(bundle: Bundle) -> str:
    """Choose ONNX Runtime where the bundle has a graph, or a graph's network, and the package is there; else torch, or
    what reads its one file."""
    held = (bundle.path / "model").is_dir() or (bundle.path / "onnx").is_dir() or is_network(bundle)
    if not held and (runtime := usage.file_runtime(bundle.manifest)):
        return runtime
    has_graph = (bundle.path / "onnx" / "model.onnx").is_file() or is_network(bundle)
    return RUNTIME if has_graph and machine.has("onnxruntime") else "torch"


def original_of(
    bundle: Bundle,
    baseline: str | None,
    timed: str | None,
    calibration: str | None = None,
    decisions: list[Decision] | None = None,
) -> MeasuredAgainst:
    """Open the baseline of a bundle, and refuse an unfit one.

    Args:
        baseline: a model, a graph or a bundle; None is the bundle's source, if it can be had.
        timed: runtime for timing its floats; None if nothing is timed.
        calibration: scoring set; None is the bundle's calibration set.
        decisions: list for deviations from the request.

    Raises InputError: `baseline-needed`, `baseline-kind`, `baseline-inputs`, `baseline-vocabulary`,
    `calibration-needed`, `nothing-to-score-on`, `bundle-without-onnx`, `-gguf`, `bundle-without-checkpoint`,
    `hash-mismatch`, those of `open_model`, `open_graph` and `load_inputs`; MissingDependency: torch, if nothing can be
    measured without it.
    """
    if holds_graph(bundle):
        from quantkit.graph.open import open_graph

        file, alias = float_file(bundle, baseline)
        graph = open_graph(file)
        demand_inputs(bundle, graph)
        return MeasuredAgainst(graph.sha256, graph=graph, samples=scoring(bundle, graph.inputs, calibration, alias))
    opened = opened_original(bundle, baseline, timed)
    if opened.stream is None:
        if not timed:
            raise MissingDependency("torch", extra="compile", purpose="measuring accuracy")
        return opened
    from quantkit.measurement.accuracy.purpose import TextResults
    from quantkit.pipeline.blocks import tokens

    decisions, source, recipe = [] if decisions is None else decisions, opened.stream.source, bundle.manifest.recipe
    text = tokens.again(Recipe.done(recipe), source, calibration, bundle.manifest.calibration, decisions)
    tokens.unheard(source, text, decisions)
    if source.kind == "encoder":
        decisions += TextResults(opened.stream, text).decisions()
    return replace(opened, tokens=text)


def opened_original(bundle: Bundle, baseline: str | None, timed: str | None) -> MeasuredAgainst:
    """Open the original of a transformer, without its scoring tokens."""
    source, has_torch = bundle.manifest.model.source, machine.has("torch")
    if baseline is not None and (Path(baseline).expanduser() / MANIFEST).is_file():
        other = Bundle.load(baseline)
        other.demand_intact()
        _demand_alike(bundle, other.manifest.model.kind, config_of(other), baseline)
        from quantkit.runtimes.torch import RUNTIME as TORCH

        checkpoint = (other.model_folder / "config.json").is_file()
        if not timed and has_torch:
            TORCH.folder(other)
        is_original = not other.manifest.layers and other.manifest.model.source.sha256 == source.sha256
        return MeasuredAgainst(
            source.sha256 if is_original else other.manifest.content_sha256,
            format_of(other.manifest.layers),
            TORCH.stream(other.model_folder) if has_torch and checkpoint else None,
            folder=load_runtime(timed).checked(other) if timed else None,
        )
    if has_torch:
        from quantkit.model.source.merged import open_origin
        from quantkit.model.source.open import open_model
        from quantkit.model.streaming.stream import StreamedModel

        opened = open_model(baseline, trust_remote_code=None) if baseline is not None else open_origin(source)
        if opened is None:
            raise baseline_needed(source)
        _demand_alike(bundle, opened.kind, opened.config, baseline or opened.ref)
        return MeasuredAgainst(opened.sha256, stream=StreamedModel(opened).as_it_runs())
    if timed:
        value = "torch is not installed, so the float model cannot be exported here"
        rule = "speed is measured against the float model in the same runtime"
        remedy = "--baseline FOLDER of a bundle compiled elsewhere with --recipe float --set "
        remedy += f"'export=[{{{export_of(timed)}: {{}}}}]'"
        raise InputError("baseline-needed", where="--baseline", value=value, rule=rule, remedy=remedy)
    return MeasuredAgainst("")


def _demand_alike(bundle: Bundle, kind: str, config: dict[str, Any], where: str) -> None:
    """Refuse a baseline with another task than the bundle's."""
    mine, ours = bundle.manifest.model.kind, config_of(bundle)
    if kind != mine:
        remedy = "the model that the bundle was made from"
        raise InputError("baseline-kind", where=where, value=kind, rule=f"the bundle is {mine}", remedy=remedy)
    counts = [size for size in (ours.get("vocab_size"), config.get("vocab_size")) if isinstance(size, int)]
    if len(set(counts)) > 1:
        rule = f"the bundle has {counts[0]}; two models are compared on the same tokens"
        remedy = "the model that the bundle was made from, or one of its family"
        raise InputError("baseline-vocabulary", where=where, value=f"{counts[1]} tokens", rule=rule, remedy=remedy)


def config_of(bundle: Bundle) -> dict[str, Any]:
    """Read the `config.json` of a bundle's model from any export; empty if none has it."""
    for place in ("model", "onnx"):
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(limits.read(bundle.path / place / "config.json")))
    return {}


def _steps_on_gpu(bundle: Bundle, runtime: str, progress: Progress) -> bool:
    """Tell whether quantkit's own kernels run a bundle here: a decoder for a GPU, in torch, where torch sees one."""
    kind, target = bundle.manifest.model.kind, target_of(bundle.manifest)
    if runtime != "torch" or kind != "decoder" or target.kind != "gpu" or not (gpus := machine.gpus()[0]):
        return False
    if too_old(capability := str(gpus[0]["sm"])):
        progress.note(f"steps are not timed: {gpus[0]['name']} is of SM {capability}; {GPUS}")
        return False
    return machine.has("triton") and not config_of(bundle).get("is_encoder_decoder")


def quick(kind: str) -> TimingPlan:
    """Return the quick measurement of a compile, for a kind of model."""
    if kind == "network":
        return replace(_OTHERS, batches=_TEXTS, seconds=40.0)
    return QUICK if kind == "decoder" else replace(_OTHERS, batches=_TEXTS)


def fitting(plan: TimingPlan, context: int, kind: str = "decoder") -> TimingPlan:
    """Fit shapes into a model of so many positions; one that does not decode has its batches in prefills."""
    if kind != "decoder":
        plan = replace(plan, batches=(), contexts=(), prefill_batches=plan.batches, prefills=_LENGTHS)
    contexts = sorted({min(wanted, context - 1) for wanted in plan.contexts})
    prefills = sorted({min(wanted, context) for wanted in plan.prefills})
    return replace(plan, contexts=tuple(contexts), prefills=tuple(prefills))


def batches_of(bundle: Bundle) -> list[int]:
    """List the target's batches, up to 32."""
    return [size for size in target_of(bundle.manifest).batches if size <= LARGEST] or [1]


def timing_plan(bundle: Bundle, *, few: bool, batches: Sequence[int] | None, seconds: float | None) -> TimingPlan:
    """Return the shapes and seconds that a user asks for; `few` takes those of a compile."""
    plan = quick(bundle.manifest.model.kind) if few else TimingPlan(batches=batches_of(bundle))
    return with_changes(plan, batches, seconds)


def with_changes(plan: TimingPlan, batches: Sequence[int] | None, seconds: float | None) -> TimingPlan:
    """Replace some numbers of a plan."""
    plan = replace(plan, batches=tuple(sorted(set(batches)))) if batches else plan
    return replace(plan, seconds=seconds) if seconds else plan
