"""Measure a finished bundle again: accuracy and size, against the model it was made from or another one."""

from __future__ import annotations

from pathlib import Path

from quantkit import content, registry
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError
from quantkit.measure.rows import Row, read_rows
from quantkit.measure.size import size_rows
from quantkit.pipeline import tokens
from quantkit.pipeline.progress import Progress
from quantkit.recipe import Recipe


def measure_bundle(bundle: Bundle, baseline: str | None = None, progress: Progress | None = None) -> list[Row]:
    """Score a bundle's checkpoint on held-out text and weigh it; the rows replace those of the same names in it.

    Args:
        bundle: with a checkpoint.
        baseline: a model, or a bundle's path; None is the model it was made from, if that can be found by its name.
        progress: told how far it is.

    Raises:
        InputError: `baseline-needed`, where the source was a folder.
    """
    from quantkit.measure import score
    from quantkit.model.open import open_model
    from quantkit.model.stream import StreamedModel

    progress = progress or Progress()
    manifest = bundle.manifest
    progress.plan({"score": 60.0})
    runtime = registry.load("runtimes", "torch")
    reference = baseline or _origin(manifest.model.source.ref)
    if baseline is not None and (Path(baseline) / "manifest.json").is_file():
        original = runtime.stream(Bundle.load(baseline).model_folder)
    else:
        original = StreamedModel(open_model(reference))
    candidate = runtime.stream(runtime.folder(bundle))
    recipe = Recipe.from_dict(manifest.recipe, name=str(manifest.recipe["name"]))
    if content.is_path(recipe.calibration.set) and not Path(recipe.calibration.set).exists():
        recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"set": "prose-en"})})
    _, scoring = tokens.load(recipe, original.source, calibrate=manifest.calibration is not None, decisions=[])
    rows, items = score.rows(
        original,
        candidate,
        scoring,
        subject=manifest.content_sha256,
        runtime="torch",
        settings={"dtype": "float32"},
        progress=lambda done: progress.at("score", done),
    )
    rows = score.flagged(rows, manifest.model.source.was)
    rows += size_rows(
        manifest.layers,
        manifest.files,
        subject=manifest.content_sha256,
        baseline=original.source.sha256,
        baseline_bytes=original.source.weights.total_bytes(),
    )
    path = bundle.path / MEASUREMENTS
    # rows against another baseline stand beside each other
    new = {(row.name, row.baseline.subject if row.baseline else None) for row in rows}
    stored = read_rows(path) if path.is_file() else []
    kept = [row for row in stored if (row.name, row.baseline.subject if row.baseline else None) not in new]
    bundle = bundle.put(MEASUREMENTS, "".join(f"{row.line()}\n" for row in [*kept, *rows]).encode())
    if items is not None and baseline is None:
        temporary = bundle.path.with_name(f".{bundle.path.name}.items")
        try:
            items.save(temporary)
            bundle.put("items.safetensors", temporary.read_bytes())
        finally:
            temporary.unlink(missing_ok=True)
    return rows


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
