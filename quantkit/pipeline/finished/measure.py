"""Measure a finished bundle again: accuracy, size and speed, against the model it was made from or another one.

What can be measured depends on what is at hand: accuracy needs torch and the original, speed needs the float model as
ONNX. On a machine with the small install alone, `--baseline` names a bundle that holds it.

Whatever can be refused is refused before the first of it: what is missing, what does not fit together, a bundle that
nothing can be put into.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine, plugins
from quantkit.bundle import Bundle, Check, Decision, Manifest
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.errors import GateError, InputError, MissingDependency, QuantkitError
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.size import folder_of, size_rows
from quantkit.measurement.size import read_rows as bytes_read
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished import inspect_engine
from quantkit.pipeline.gates import judge, still_unjudged
from quantkit.pipeline.graphs.remeasure import holds_graph, is_network, measure_graph
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import runs_here
from quantkit.planning.bound import efficiency
from quantkit.recipe import Gates, Recipe
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime
from quantkit.runtimes.onnxruntime import RUNTIME as ONNXRUNTIME
from quantkit.target import Target

if TYPE_CHECKING:
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.engine_layers import Inspected
    from quantkit.measurement.timing.speed import SpeedSide
    from quantkit.model.streaming.stream import StreamedModel


# batches beyond this are for prefill and servers; a decode step of them takes a CPU most of a second
_LARGEST = 32
# bytes of memory a weight takes while a float graph is made and loaded again: of Gemma 3 270M 3.9 GB were seen
_MAKING = 15


@dataclass(frozen=True)
class _Against:
    """What a bundle is measured against.

    Args:
        subject: its identity in the rows: of the model that the bundle was made from, the hash of that; else of a
            bundle its `content_sha256`.
        format: of its weights.
        stream: to score against; None where it cannot be had.
        folder: of what the runtime of floats reads, where it has that already.
    """

    subject: str
    format: str
    stream: StreamedModel | None
    folder: Path | None


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
        _keep(bundle, found, None, runtime, subject, progress)
        return found
    against = _against(bundle, baseline, runner.floats if timed else None)
    chosen = plan or TimingPlan(batches=batches_of(bundle))
    stages = {"score": 60.0} if against.stream is not None else {}
    progress.plan({**stages, "speed": 60.0 + chosen.seconds} if timed else stages)
    rows: list[Row] = []
    items: Items | None = None
    if against.stream is not None:
        rows, items = _accuracy(bundle, against, against.stream, runtime, calibration, progress, decisions)
    on_gpu = speed and engine is not None and engine.decoder and engine.engine.device.type == "cuda"
    if timed or on_gpu:
        try:
            rows += (
                _speed(bundle, against, chosen, progress, runtime)
                if timed
                else _on_gpu(engine, bundle, against, chosen, progress)
            )
        except QuantkitError:
            if rows:
                _keep(bundle, rows, items, runtime, against.subject, progress)
                progress.note("accuracy and size were measured and kept; speed was not measured")
            raise
    _keep(bundle, rows, items, runtime, against.subject, progress, looked)
    return rows


def _target(bundle: Bundle) -> Target:
    from quantkit.pipeline.request import this_machine

    stored = bundle.manifest.target
    if not stored:
        return Target.load(this_machine())
    return Target.from_dict({key: value for key, value in stored.items() if key != "name"}, name=str(stored["name"]))


def _against(bundle: Bundle, baseline: str | None, timed: str | None) -> _Against:
    """Open what the bundle is measured against, and refuse what cannot be.

    Args:
        timed: the runtime that its floats are timed in; None where nothing is timed.

    Raises:
        InputError: `baseline-needed`, `baseline-kind`, `baseline-vocabulary`, `bundle-without-onnx`, `-gguf`,
            `bundle-without-checkpoint`, `hash-mismatch`, those of `open_model`.
        MissingDependency: torch, where nothing can be measured without.
    """
    source = bundle.manifest.model.source
    has_torch = machine.has("torch")
    if baseline is not None and (Path(baseline).expanduser() / MANIFEST).is_file():
        other = Bundle.load(baseline)
        other.demand_intact()
        _demand_alike(bundle, other.manifest.model.kind, config_of(other), baseline)
        from quantkit.runtimes.torch import RUNTIME as TORCH

        checkpoint = (other.model_folder / "config.json").is_file()
        if not timed and has_torch:
            TORCH.folder(other)
        is_original = not other.manifest.layers and other.manifest.model.source.sha256 == source.sha256
        found = _Against(
            source.sha256 if is_original else other.manifest.content_sha256,
            worth.format_of(other.manifest.layers),
            TORCH.stream(other.model_folder) if has_torch and checkpoint else None,
            load_runtime(timed).checked(other) if timed else None,
        )
    elif has_torch:
        from quantkit.model.source.open import open_model
        from quantkit.model.streaming.stream import StreamedModel

        opened = open_model(baseline or _origin(source.ref))
        _demand_alike(bundle, opened.kind, opened.config, baseline or opened.ref)
        found = _Against(opened.sha256, "float32", StreamedModel(opened), None)
    elif timed:
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value="torch is not installed, so the float model cannot be exported here",
            rule="speed is measured against the float model in the same runtime",
            remedy="--baseline FOLDER of a bundle compiled elsewhere with --recipe float --set "
            f"'export=[{{{export_of(timed)}: {{}}}}]'",
        )
    else:
        found = _Against("", "float32", None, None)
    if not timed and found.stream is None:
        raise MissingDependency("torch", extra="compile", purpose="measuring accuracy")
    return found


def _demand_alike(bundle: Bundle, kind: str, config: dict[str, Any], where: str) -> None:
    """Refuse a baseline that does not do what the bundle does."""
    mine, ours = bundle.manifest.model.kind, config_of(bundle)
    if kind != mine:
        remedy = "the model that the bundle was made from"
        raise InputError("baseline-kind", where=where, value=kind, rule=f"the bundle is {mine}", remedy=remedy)
    sizes = [size for size in (ours.get("vocab_size"), config.get("vocab_size")) if isinstance(size, int)]
    if len(set(sizes)) > 1:
        raise InputError(
            "baseline-vocabulary",
            where=where,
            value=f"{sizes[1]} tokens",
            rule=f"the bundle has {sizes[0]}; two models are compared on the same tokens",
            remedy="the model that the bundle was made from, or one of its family",
        )


def config_of(bundle: Bundle) -> dict[str, Any]:
    """`config.json` of a bundle's model, from whichever export has it; empty where none does."""
    for place in ("model", "onnx"):
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(limits.read(bundle.path / place / "config.json")))
    return {}


def _accuracy(
    bundle: Bundle,
    against: _Against,
    original: StreamedModel,
    runtime: str,
    calibration: str | None,
    progress: Progress,
    decisions: list[Decision],
) -> tuple[list[Row], Items | None]:
    from quantkit.measurement.accuracy import score
    from quantkit.pipeline.blocks import tokens
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    manifest = bundle.manifest
    recipe = Recipe.done(manifest.recipe)
    scoring = tokens.again(recipe, original.source, calibration, manifest.calibration, decisions)
    candidate = load_runtime(runtime).open(bundle.path)
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


def _speed(bundle: Bundle, against: _Against, plan: TimingPlan, progress: Progress, runtime: str) -> list[Row]:
    from quantkit.pipeline.baseline import float_export

    folder, exporter = load_runtime(runtime).folder(bundle), export_of(runtime)
    options, form = _options(bundle, exporter), against.format
    progress.at("speed", 0.0, f"the float model as {exporter}, for comparison")
    theirs = against.folder
    if theirs is None:
        assert against.stream is not None
        theirs, form = float_export(against.stream.source, exporter, options), worth.float_format(exporter, options)
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


def _across(bundle: Bundle, against: _Against, progress: Progress) -> SpeedSide | None:
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
        made = float_export(source, name, _options(bundle, name))
    except (InputError, MissingDependency, GateError) as problem:
        progress.note(f"not timed beside {worth.RUNTIME}: {problem.line()}")
        return None
    return SpeedSide(str(made), against.subject, "float32")


def _on_gpu(model: Any, bundle: Bundle, against: _Against, plan: TimingPlan, progress: Progress) -> list[Row]:
    """An engine against torch in bfloat16."""
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.timing import cuda as speed_cuda

    if against.stream is None:
        return []
    return speed_cuda.run_engine(
        model,
        bundle,
        against.stream.source,
        worth.fitting(plan, model.capacity),
        GpuDevice("cuda", dry=False),
        progress=lambda share, words: progress.at("speed", share, words),
    )


def _options(bundle: Bundle, exporter: str) -> dict[str, Any]:
    """What an exporter was told of the bundle; nothing where it was not asked."""
    for step in bundle.manifest.recipe.get("export", []):
        if exporter in step:
            return dict(step[exporter] or {})
    return {}


def _keep(
    bundle: Bundle,
    rows: Sequence[Row],
    items: Items | None,
    runtime: str,
    against: str,
    progress: Progress,
    looked: Inspected | None = None,
) -> None:
    """Put new rows into a bundle; those against the model that it was made from decide anew, on page and card too.

    Raises:
        InputError: `bundle-changed` meanwhile.
    """
    bundle, measured = Bundle.load(bundle.path), bundle.manifest.content_sha256
    manifest = bundle.manifest
    if manifest.content_sha256 != measured:
        raise InputError(
            "bundle-changed",
            where=str(bundle.path),
            value=manifest.content_sha256,
            rule=f"what was measured is {measured}",
            remedy="measure again, with nothing else at work on the bundle",
        )
    efficiency.keep([row.as_dict() for row in rows])
    if looked is not None:
        bundle = _with_engine(bundle, looked)
        manifest = bundle.manifest
    original = manifest.model.source.sha256
    if against != original:
        # rows that do not say what they are set against would pass for those of the original
        rows = [row for row in rows if row.baseline is not None]
    path = bundle.path / MEASUREMENTS
    new = {_kind(row, against) for row in rows}
    stored = read_rows(path) if path.is_file() else []
    together = [*(row for row in stored if _kind(row, original) not in new), *rows]
    files: dict[str, bytes | None] = {MEASUREMENTS: "".join(f"{row.line()}\n" for row in together).encode()}
    if against != original:
        bundle.put_all(files)
        return
    if items is not None:
        name = "items.safetensors" if runtimes_of(manifest)[:1] == [runtime] else f"items-{runtime}.safetensors"
        with tempfile.TemporaryDirectory() as temporary:
            items.save(Path(temporary) / "items")
            files[name] = (Path(temporary) / "items").read_bytes()
    shown = worth.of_original(together, original)
    manifest = _judged(manifest, shown)
    with contextlib.suppress(InputError):
        target, timed = _target(bundle), any(row.name.startswith("latency.") for row in rows)
        here = runs_here(target)
        if timed and not here:
            progress.note(f"{target.name} is another machine: no verdict follows from what was timed here")
        # what was timed before stands as it was judged then
        counts = here if timed else manifest.verdict is not None
        exports = manifest.recipe.get("export") or []
        judged = worth.decide(shown if counts else [], manifest.checks, manifest.layers, target, exports)
        manifest = manifest.model_copy(update={"verdict": judged})
    documents, decisions = worth.documents(manifest, shown, bundle.path)
    for each in decisions:
        progress.note(f"{each.where}: {each.reason}")
    bundle.put_all({**files, **documents}, verdict=manifest.verdict, checks=manifest.checks, state=manifest.state)


def _with_engine(bundle: Bundle, found: Inspected) -> Bundle:
    """With what an engine says of its layers, in place of what was known before."""
    manifest = bundle.manifest
    return bundle.put_all(
        {inspect_engine.place(found): inspect_engine.data(found)},
        checks=[*(each for each in manifest.checks if each.name != found.check.name), found.check],
        decisions=[*inspect_engine.without(manifest.decisions), *found.decisions()],
    )


def _judged(manifest: Manifest, rows: Sequence[Row]) -> Manifest:
    """With the gates held against what is measured now; a gate that has no row stands as it was judged."""
    order = runtimes_of(manifest)
    known = [row for row in rows if row.runtime in order]
    ordered = sorted(known, key=lambda row: order.index(str(row.runtime))) + [row for row in rows if row not in known]
    checks, _ = judge(Gates.model_validate(manifest.recipe.get("gates") or {}), ordered)
    named: dict[str, Check] = {check.name: check for check in [*manifest.checks, *checks]}
    failed = any(not check.ok for name, check in named.items() if name.startswith("gate."))
    state = "gate_failed" if failed else "complete"
    decisions = still_unjudged(manifest.decisions, checks)
    return manifest.model_copy(update={"checks": list(named.values()), "state": state, "decisions": decisions})


def export_of(runtime: str) -> str:
    """What a runtime runs."""
    return next(name for name in _exporters() if runtime in load_exporter(name).runtimes)


def _exporters() -> list[str]:
    """All there are: those that ship first, the others only where none of these will do."""
    return [*plugins.EXPORTERS.shipped(), *plugins.EXPORTERS.offers()]


def runtimes_of(manifest: Manifest) -> list[str]:
    """That run the exports of a bundle, in the order of its recipe."""
    return [reader(name, options or {}) for step in manifest.recipe.get("export", []) for name, options in step.items()]


def _kind(row: Row, against: str) -> tuple[Any, ...]:
    """Rows of one kind replace each other; those against another baseline, in another runtime, or timed on another
    machine stand beside each other. A row without baseline is one against `against`."""
    told = ("export", "kv_cache", "output", "surer_than", "way", "baseline_runtime")
    export = tuple(row.settings.get(key) for key in told)
    baseline = row.baseline.subject if row.baseline else against
    device = row.device.id if row.device and worth.is_timing(row) else None
    return row.name, baseline, row.runtime, export, device, row.batch, tuple(sorted((row.shape or {}).items()))


def _origin(ref: str) -> str:
    """The reference that opens a bundle's source again."""
    if ref.startswith("path:"):
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value=f"the bundle was made from a folder or file called {ref.removeprefix('path:')!r}",
            rule="a bundle holds no path of the machine it was made on",
            remedy=f"--baseline ./{ref.removeprefix('path:')}, where it lies",
        )
    return ref.removeprefix("alias:")


def batches_of(bundle: Bundle) -> list[int]:
    """The target's batches, up to 32."""
    return [size for size in _target(bundle).batches if size <= _LARGEST] or [1]


def with_changes(plan: TimingPlan, batches: Sequence[int] | None, seconds: float | None) -> TimingPlan:
    """A plan with some of its numbers replaced."""
    changes: dict[str, Any] = {}
    if batches:
        changes["batches"] = tuple(sorted(set(batches)))
    if seconds:
        changes["seconds"] = seconds
    return replace(plan, **changes)
