"""Measure a finished bundle again: accuracy, size and speed, against the model it was made from or another one.

What can be measured depends on what is at hand: accuracy needs torch and the original, speed needs the float model as
ONNX. On a machine with the small install alone, `--baseline` names a bundle that holds it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content, registry
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.errors import InputError
from quantkit.measure.latency import Plan
from quantkit.measure.rows import Row, read_rows
from quantkit.measure.size import folder_of, size_rows
from quantkit.pipeline import worth
from quantkit.pipeline.progress import Progress
from quantkit.recipe import Recipe
from quantkit.target import Target

if TYPE_CHECKING:
    from quantkit.measure.accuracy import Items
    from quantkit.model.stream import StreamedModel


# batches beyond this are for prefill and servers; a decode step of them takes a CPU most of a second
_LARGEST = 32


def default_runtime(bundle: Bundle) -> str:
    """ONNX Runtime where the bundle has a graph and the package is there, else torch."""
    has_graph = (bundle.path / "onnx" / "model.onnx").is_file()
    return worth.RUNTIME if has_graph and importlib.util.find_spec("onnxruntime") else "torch"


def measure_bundle(
    bundle: Bundle,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    runtime: str | None = None,
    plan: Plan | None = None,
    speed: bool = True,
) -> list[Row]:
    """Measure what one runtime runs of a bundle. Its rows replace those of their kind; verdict and page follow.

    Args:
        bundle: finished.
        baseline: a model, or a bundle's path; None is the model it was made from, if that can be found by its name.
        progress: told how far it is.
        runtime: `torch` (accuracy and size) or `onnxruntime` (speed too); None is `default_runtime`.
        plan: shapes and seconds of the timing; its batches default to the target's, up to 32.
        speed: whether to time it, in onnxruntime.

    Raises:
        InputError: `baseline-needed`, where the source was a folder; `bundle-without-onnx` or `-checkpoint`.
        MissingDependency: of the runtime.
    """
    progress = progress or Progress()
    runtime = runtime or default_runtime(bundle)
    runner = registry.load("runtimes", runtime)
    runner.folder(bundle)
    timed = speed and runtime == worth.RUNTIME and bundle.manifest.model.kind == "decoder"
    chosen = plan or Plan(batches=batches_of(bundle))
    scored = importlib.util.find_spec("torch") is not None and (timed is False or _findable(bundle, baseline))
    stages = {"score": 60.0} if scored else {}
    progress.plan({**stages, "speed": 60.0 + chosen.seconds} if timed else stages)
    rows: list[Row] = []
    items: Items | None = None
    if scored:
        rows, items = _accuracy(bundle, baseline, runtime, progress)
    if timed:
        rows += _speed(bundle, baseline, chosen, progress)
    _keep(bundle, rows, items if baseline is None else None, runtime)
    return rows


def _target(bundle: Bundle) -> Target:
    from quantkit.pipeline.request import this_machine

    stored = bundle.manifest.target
    if not stored:
        return Target.load(this_machine())
    return Target.from_dict({key: value for key, value in stored.items() if key != "name"}, name=str(stored["name"]))


def _is_bundle(reference: str) -> bool:
    return (Path(reference) / MANIFEST).is_file()


def _findable(bundle: Bundle, baseline: str | None) -> bool:
    """Whether the original's weights can be had, to score against."""
    if baseline is not None:
        return not _is_bundle(baseline) or (Path(baseline) / "model" / "config.json").is_file()
    return not bundle.manifest.model.source.ref.startswith("path:")


def _original(bundle: Bundle, baseline: str | None) -> StreamedModel:
    """What it is scored against."""
    from quantkit.model.open import open_model
    from quantkit.model.stream import StreamedModel

    if baseline is not None and _is_bundle(baseline):
        found: StreamedModel = registry.load("runtimes", "torch").stream(Bundle.load(baseline).model_folder)
        return found
    return StreamedModel(open_model(baseline or _origin(bundle.manifest.model.source.ref)))


def _accuracy(bundle: Bundle, baseline: str | None, runtime: str, progress: Progress) -> tuple[list[Row], Items | None]:
    from quantkit.measure import score
    from quantkit.pipeline import tokens

    manifest = bundle.manifest
    original = _original(bundle, baseline)
    candidate = registry.load("runtimes", runtime).open(bundle.path)
    recipe = Recipe.from_dict(manifest.recipe, name=str(manifest.recipe["name"]))
    if content.is_path(recipe.calibration.set) and not Path(recipe.calibration.set).exists():
        recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"set": "prose-en"})})
    _, scoring = tokens.load(recipe, original.source, calibrate=manifest.calibration is not None, decisions=[])
    rows, items = score.rows(
        original,
        candidate,
        scoring,
        subject=manifest.content_sha256,
        runtime=runtime,
        settings=score.settings(candidate),
        progress=lambda done: progress.at("score", done),
    )
    rows = score.flagged(rows, manifest.model.source.was)
    rows += size_rows(
        manifest.layers,
        manifest.files,
        subject=manifest.content_sha256,
        baseline=original.source.sha256,
        baseline_bytes=original.source.weights.total_bytes(),
        folder=folder_of("onnx" if runtime == worth.RUNTIME else "checkpoint"),
    )
    return rows, items


def _speed(bundle: Bundle, baseline: str | None, plan: Plan, progress: Progress) -> list[Row]:
    runner = registry.load("runtimes", worth.RUNTIME)
    folder = runner.folder(bundle)
    runner.checked(bundle)
    progress.at("speed", 0.0, "the float model as ONNX, for comparison")
    theirs, subject = _float(bundle, baseline)
    return worth.time_it(
        folder,
        bundle.manifest.content_sha256,
        bundle.manifest.layers,
        theirs,
        subject,
        worth.fitting(plan, worth.context_of(folder)),
        lambda share, words: progress.at("speed", share, words),
    )


def _float(bundle: Bundle, baseline: str | None) -> tuple[Path, str]:
    """The folder of what the speed is set against, and its identity."""
    from quantkit.pipeline.baseline import float_onnx

    if baseline is not None and _is_bundle(baseline):
        other = Bundle.load(baseline)
        runner = registry.load("runtimes", worth.RUNTIME)
        runner.checked(other)
        return runner.folder(other), other.manifest.content_sha256
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value="torch is not installed, so the float model cannot be exported here",
            rule="speed is measured against the float model in the same runtime",
            remedy="--baseline FOLDER of a bundle compiled elsewhere with --recipe float",
        )
    source = _original(bundle, baseline).source
    return float_onnx(source, _options(bundle)), source.sha256


def _options(bundle: Bundle) -> dict[str, Any]:
    """What the bundle's graph was exported with."""
    for step in bundle.manifest.recipe.get("export", []):
        if "onnx" in step:
            return dict(step["onnx"] or {})
    return {}


def _keep(bundle: Bundle, rows: Sequence[Row], items: Items | None, runtime: str) -> None:
    """Put new rows into a bundle, decide again, and write page and card anew."""
    from quantkit.report import figures
    from quantkit.report.card import card

    path = bundle.path / MEASUREMENTS
    # rows against another baseline, and in another runtime, stand beside each other
    new = {_kind(row) for row in rows}
    stored = read_rows(path) if path.is_file() else []
    together = [*(row for row in stored if _kind(row) not in new), *rows]
    manifest = bundle.manifest
    files = {MEASUREMENTS: "".join(f"{row.line()}\n" for row in together).encode()}
    if items is not None:
        first = next(iter(next(iter(manifest.recipe["export"]))))
        name = (
            "items.safetensors"
            if registry.load("export", first).runtimes[0] == runtime
            else f"items-{runtime}.safetensors"
        )
        with tempfile.TemporaryDirectory() as temporary:
            items.save(Path(temporary) / "items")
            files[name] = (Path(temporary) / "items").read_bytes()
    changes: dict[str, Any] = {}
    with contextlib.suppress(InputError):
        changes["verdict"] = worth.decide(together, manifest.checks, manifest.layers, _target(bundle))
    manifest = manifest.model_copy(update=changes)
    notes = figures.notes(manifest)
    made, _ = worth.page(manifest, together, notes, bundle.path)
    if made is not None:
        files[worth.REPORT] = made
    files["README.md"] = card(manifest, together, notes).encode()
    bundle.put_all(files, **changes)


def _kind(row: Row) -> tuple[Any, ...]:
    """Rows of one kind replace each other."""
    export = row.settings.get("export")
    baseline = row.baseline.subject if row.baseline else None
    return row.name, baseline, row.runtime, export, row.batch, tuple(sorted((row.shape or {}).items()))


def _origin(ref: str) -> str:
    """The reference that opens a bundle's source again."""
    if ref.startswith("path:"):
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value=f"the bundle was made from a folder called {ref.removeprefix('path:')!r}",
            rule="a bundle holds no path of the machine it was made on",
            remedy="--baseline ./that-folder",
        )
    return ref.removeprefix("alias:")


def batches_of(bundle: Bundle) -> list[int]:
    """The target's batches, up to 32."""
    return [size for size in _target(bundle).batches if size <= _LARGEST] or [1]


def with_changes(plan: Plan, batches: Sequence[int] | None, seconds: float | None) -> Plan:
    """A plan with some of its numbers replaced."""
    changes: dict[str, Any] = {}
    if batches:
        changes["batches"] = tuple(sorted(set(batches)))
    if seconds:
        changes["seconds"] = seconds
    return replace(plan, **changes)
