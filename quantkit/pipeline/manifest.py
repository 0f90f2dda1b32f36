"""What a compile writes about itself: the manifest, the page, the card."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import quantkit
from quantkit.bundle import (
    CalibrationEntry,
    Check,
    Decision,
    LayerEntry,
    Manifest,
    ModelEntry,
    SourceEntry,
    inventory,
)
from quantkit.measure.rows import Row
from quantkit.pipeline import tokens
from quantkit.pipeline.prepared import Prepared
from quantkit.pipeline.worth import REPORT, page
from quantkit.plan import machine


def manifest_of(
    prepared: Prepared,
    folder: Path,
    *,
    decisions: list[Decision],
    layers: list[LayerEntry],
    checks: list[Check],
    subject: str,
    state: Literal["complete", "gate_failed"],
) -> Manifest:
    """The manifest of a bundle whose files stand in `folder`, without a verdict."""
    import torch

    recipe, source, seen = prepared.request.recipe, prepared.source, prepared.calibration
    calibration = None
    if seen is not None:
        calibration = CalibrationEntry(
            set=seen.name,
            split=seen.split,
            ids_sha256=seen.sha256,
            samples=seen.ids.shape[0],
            tokens=seen.ids.shape[1],
        )
    origin = SourceEntry(ref=source.ref, sha256=source.sha256, dtype=source.dtype, was=source.was)
    return Manifest(
        quantkit=quantkit.__version__,
        content_sha256=subject,
        state=state,
        model=ModelEntry(name=source.name, kind=source.kind, source=origin),
        recipe=tokens.without_paths(recipe.as_dict()),
        target=prepared.request.target.as_dict(),
        calibration=calibration,
        seed=recipe.seed,
        threads=torch.get_num_threads(),
        isa=machine.isa(),
        device=dict(machine.device()),
        versions=machine.versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        files=inventory(folder),
        decisions=decisions,
        checks=checks,
        verdict=None,
    )


def with_documents(manifest: Manifest, rows: list[Row], notes: Sequence[str], folder: Path) -> Manifest:
    """Write page and card into a bundle; the manifest that lists them."""
    from quantkit.report.card import card

    if manifest.layers or manifest.verdict is not None or any(row.runtime == "onnxruntime" for row in rows):
        made, missing = page(manifest, rows, notes, folder)
        manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
        if made is not None:
            (folder / REPORT).write_bytes(made)
            manifest = manifest.model_copy(update={"files": inventory(folder)})
    (folder / "README.md").write_text(card(manifest, rows, notes), encoding="utf-8")
    return manifest.model_copy(update={"files": inventory(folder)})
