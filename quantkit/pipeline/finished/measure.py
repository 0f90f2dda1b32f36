"""Measure a finished bundle again: accuracy, size and speed, against the model it was made from or another one.

What can be measured depends on what is at hand: accuracy needs torch and the original, speed needs the float model as
ONNX. On a machine with the small install alone, `--baseline` names a bundle that holds it.

Whatever can be refused is refused before the first of it: what is missing, what does not fit together, a bundle that
nothing can be put into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import Bundle, Decision
from quantkit.errors import GateError, InputError, MissingDependency, QuantkitError
from quantkit.kernels import GPUS, too_old
from quantkit.measurement.rows import Row
from quantkit.measurement.size import folder_of, size_rows
from quantkit.measurement.size import read_rows as bytes_read
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished import inspect_engine
from quantkit.pipeline.finished.against import MeasuredAgainst, options_of
from quantkit.pipeline.finished.against import against as opened
from quantkit.pipeline.finished.keep import export_of, keep
from quantkit.pipeline.graphs.remeasure import holds_graph, is_network, measure_graph
from quantkit.pipeline.progress import Progress
from quantkit.recipe import Recipe
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime
from quantkit.runtimes.onnxruntime import RUNTIME as ONNXRUNTIME

if TYPE_CHECKING:
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.timing.speed import SpeedSide
    from quantkit.model.streaming.stream import StreamedModel


# batches beyond this are for prefill and servers; a decode step of them takes a CPU most of a second
_LARGEST = 32
# bytes of memory a weight takes while a float graph is made and loaded again: of Gemma 3 270M 3.9 GB were seen
_MAKING = 15


def default_runtime(bundle: Bundle) -> str:
    """ONNX Runtime where the bundle has a graph, or a graph's network, and the package is there; else torch, or what
    reads its one file."""
    held = (bundle.path / "model").is_dir() or (bundle.path / "onnx").is_dir() or is_network(bundle)
    if not held and (runtime := usage.file_runtime(bundle.manifest)):
        return runtime
    has_graph = (bundle.path / "onnx" / "model.onnx").is_file() or is_network(bundle)
    return worth.RUNTIME if has_graph and machine.has("onnxruntime") else "torch"


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
    """Measure what one runtime runs of a bundle. Its rows replace those of their kind; verdict and page follow.

    Args:
        plan: shapes and seconds of the timing; its batches default to the target's, up to 32.
        decisions: gets what was done otherwise than asked: text that had to come from elsewhere.

    Raises:
        InputError: `baseline-needed`, where the source was a folder; `bundle-without-onnx` or `-checkpoint`;
            `nothing-to-score-on`, where `calibration` has nothing for this.
        MissingDependency: of the runtime.
    """
    progress = progress or Progress()
    decisions = [] if decisions is None else decisions
    runtime = runtime or default_runtime(bundle)
    runner = load_runtime(runtime)
    network = is_network(bundle) and runtime == worth.RUNTIME
    if not network:
        runner.folder(bundle)
    if not runner.engines:  # loading one says more
        runner.demand()
    bundle.demand_writable()
    bundle.demand_intact()
    engine = runner.load(bundle) if runner.engines else None
    looked = None if engine is None else inspect_engine.look(engine, bundle.manifest.layers)
    for note in () if engine is None else engine.notes:
        progress.note(note)
    timed = speed and runner.floats is not None and not network
    if timed:
        from quantkit.measurement.timing.speed import demand

        demand({runtime})
    if holds_graph(bundle):
        found, subject = measure_graph(
            bundle, baseline, progress, calibration=calibration, plan=plan, timed=timed, runtime=runtime
        )
        keep(bundle, found, None, runtime, subject, progress)
        return found
    against = opened(bundle, baseline, runner.floats if timed else None)
    chosen = plan or TimingPlan(batches=batches_of(bundle))
    stages = {"score": 60.0} if against.stream is not None else {}
    on_gpu = speed and (
        _steps_on_gpu(bundle, runtime, progress)
        if engine is None
        else engine.decoder and engine.engine.device.type == "cuda"
    )
    if on_gpu:
        against.floats_in_torch()
    progress.plan({**stages, "speed": 60.0 + chosen.seconds} if timed or on_gpu else stages)
    rows: list[Row] = []
    items: Items | None = None
    if against.stream is not None:
        rows, items = _accuracy(bundle, against, against.stream, runtime, calibration, progress, decisions)
    if timed or on_gpu:
        try:
            rows += (
                _speed(bundle, against, chosen, progress, runtime)
                if timed
                else _on_gpu(engine, bundle, against, chosen, progress)
            )
        except QuantkitError:
            if rows:
                keep(bundle, rows, items, runtime, against.subject, progress)
                progress.note("accuracy and size were measured and kept; speed was not measured")
            raise
    keep(bundle, rows, items, runtime, against.subject, progress, looked)
    return rows


def _accuracy(
    bundle: Bundle,
    against: MeasuredAgainst,
    original: StreamedModel,
    runtime: str,
    calibration: str | None,
    progress: Progress,
    decisions: list[Decision],
) -> tuple[list[Row], Items | None]:
    from quantkit.measurement.accuracy import score
    from quantkit.measurement.accuracy.purpose import TextResults
    from quantkit.pipeline.blocks import tokens
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    manifest = bundle.manifest
    recipe = Recipe.done(manifest.recipe)
    scoring = tokens.again(recipe, original.source, calibration, manifest.calibration, decisions)
    candidate = load_runtime(runtime).open(bundle.path)
    if original.source.kind == "encoder":
        decisions += TextResults(original, scoring).decisions()
    rows, items = score.rows(
        original,
        candidate,
        scoring,
        subject=manifest.content_sha256,
        runtime=runtime,
        progress=lambda done: progress.at("score", done),
    )
    rows = score.flagged(rows, manifest.model.source.was)
    rows += size_rows(
        manifest.layers,
        manifest.files,
        subject=manifest.content_sha256,
        baseline=against.subject,
        baseline_bytes=original.source.weights.total_bytes(),
        folder=folder_of(export_of(runtime)),
    )
    if isinstance(candidate, OnnxModel):
        rows += bytes_read(candidate.ways, subject=manifest.content_sha256, folder=folder_of(export_of(runtime)))
    return [_renamed(row, original.source.sha256, against.subject) for row in rows], items


def _renamed(row: Row, old: str, new: str) -> Row:
    """The row with its baseline's identity: a checkpoint of the float model has another hash than the model."""
    if row.baseline is None or row.baseline.subject != old:
        return row
    return row.model_copy(update={"baseline": row.baseline.model_copy(update={"subject": new})})


def _speed(bundle: Bundle, against: MeasuredAgainst, plan: TimingPlan, progress: Progress, runtime: str) -> list[Row]:
    folder = load_runtime(runtime).folder(bundle)
    progress.at("speed", 0.0, f"the float model as {export_of(runtime)}, for comparison")
    theirs, form = against.floats(bundle, runtime)
    across = _across(bundle, against, progress) if load_runtime(runtime).floats != worth.RUNTIME else None
    sides = [folder, theirs, *([Path(across.path)] if across else [])]
    context = min(map(worth.context_of, sides))
    return worth.time_it(
        folder,
        bundle.manifest.content_sha256,
        bundle.manifest.layers,
        theirs,
        against.subject,
        worth.fitting(plan, context, bundle.manifest.model.kind),
        lambda share, words: progress.at("speed", share, words),
        baseline_format=form,
        runtime=runtime,
        across=across,
    )


def _across(bundle: Bundle, against: MeasuredAgainst, progress: Progress) -> SpeedSide | None:
    """What ONNX Runtime runs in turns with a file of another runtime: the bundle's own graph, else the float model's;
    None, with a note, where there is neither."""
    from quantkit.measurement.timing.speed import SpeedSide
    from quantkit.pipeline.baseline import float_export

    manifest, name = bundle.manifest, export_of(worth.RUNTIME)
    if usage.has(manifest, "onnx/"):
        return SpeedSide(str(ONNXRUNTIME.checked(bundle)), manifest.content_sha256, worth.format_of(manifest.layers))
    if against.stream is None or against.folder is not None:
        return None
    source = against.stream.source
    need = _MAKING * sum(math.prod(entry.shape) for entry in source.weights.entries.values())
    if need > machine.memory_available():
        progress.note(
            f"not timed beside {worth.RUNTIME}: its float graph would take about {need / 1e9:.1f} GB of memory"
        )
        return None
    progress.at("speed", 0.0, f"the float model as {name}, for comparison")
    try:
        made = float_export(source, name, options_of(bundle, name))
    except (InputError, MissingDependency, GateError) as problem:
        progress.note(f"not timed beside {worth.RUNTIME}: {problem.line()}")
        return None
    return SpeedSide(str(made), against.subject, "float32")


def _steps_on_gpu(bundle: Bundle, runtime: str, progress: Progress) -> bool:
    """Whether quantkit's own kernels run a bundle here: a decoder for a GPU, in torch, where torch sees one."""
    kind, target = bundle.manifest.model.kind, worth.target_of(bundle.manifest)
    if runtime != "torch" or kind != "decoder" or target.kind != "gpu" or not (found := machine.gpus()[0]):
        return False
    if too_old(capability := str(found[0]["sm"])):
        progress.note(f"steps are not timed: {found[0]['name']} is of SM {capability}; {GPUS}")
        return False
    return machine.has("triton")


def _on_gpu(engine: Any, bundle: Bundle, against: MeasuredAgainst, plan: TimingPlan, progress: Progress) -> list[Row]:
    """An engine against torch in bfloat16, or steps on quantkit's own kernels against the same. Raises InputError."""
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.timing import cuda as speed_cuda

    source, device = against.floats_in_torch().source, GpuDevice("cuda", dry=False)

    def tell(share: float, words: str) -> None:
        progress.at("speed", share, words)

    if engine is not None:
        fitting = worth.fitting(plan, engine.capacity)
        return speed_cuda.run_engine(engine, bundle, source, fitting, device, progress=tell)
    rows, said = speed_cuda.run(bundle, source, plan, device, progress=tell)
    if said:
        progress.note(said)
    return rows


def batches_of(bundle: Bundle) -> list[int]:
    """The target's batches, up to 32."""
    return [size for size in worth.target_of(bundle.manifest).batches if size <= _LARGEST] or [1]


def with_changes(plan: TimingPlan, batches: Sequence[int] | None, seconds: float | None) -> TimingPlan:
    """A plan with some of its numbers replaced."""
    changes: dict[str, Any] = {}
    if batches:
        changes["batches"] = tuple(sorted(set(batches)))
    if seconds:
        changes["seconds"] = seconds
    return replace(plan, **changes)
