"""What a compile writes about itself: the manifest, the page, the card."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import (
    CalibrationEntry,
    Check,
    CodeEntry,
    Decision,
    LayerEntry,
    Manifest,
    ModelEntry,
    WeightsEntry,
    inventory,
)
from quantkit.measurement.engine_layers import NAME
from quantkit.measurement.rows import Row
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.request import Request
from quantkit.pipeline.verdict import REPORT, page


def manifest_of(
    request: Request,
    model: ModelEntry,
    calibration: CalibrationEntry | None,
    folder: Path,
    *,
    decisions: list[Decision],
    layers: list[LayerEntry],
    checks: list[Check],
    subject: str,
    weights: Sequence[WeightsEntry] = (),
    compiled_on: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a bundle whose files stand in `folder`, without a verdict; a failed check fails a gate.

    An engine that does otherwise than asked is a decision, and an error under `--strict` alone.

    Args:
        compiled_on: the GPU that computed it, and how it multiplied.
    """
    import torch

    return Manifest(
        quantkit=__version__,
        content_sha256=subject,
        state="complete" if all(check.ok for check in checks if check.name != NAME) else "gate_failed",
        model=model,
        recipe=tokens.without_paths(request.recipe),
        target=request.target.as_dict(),
        calibration=calibration,
        seed=request.recipe.seed,
        threads=torch.get_num_threads(),
        isa=machine.isa(),
        device={**machine.device(), **({"compiled_on": compiled_on} if compiled_on else {})},
        versions=machine.versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        files=inventory(folder),
        decisions=decisions,
        checks=checks,
        weights=list(weights),
        code=[CodeEntry(**each) for each in request.recipe.outside()],
        verdict=None,
    )


def with_documents(manifest: Manifest, rows: list[Row], notes: Sequence[str], folder: Path) -> Manifest:
    """Write page and card into a bundle; the manifest that lists them."""
    from quantkit.report.bundle.card import card

    if manifest.layers or manifest.verdict is not None or any(row.runtime == "onnxruntime" for row in rows):
        made, missing = page(manifest, rows, notes, folder)
        manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
        if made is not None:
            (folder / REPORT).write_bytes(made)
            manifest = manifest.model_copy(update={"files": inventory(folder)})
    (folder / "README.md").write_text(card(manifest, rows, notes), encoding="utf-8")
    return manifest.model_copy(update={"files": inventory(folder)})
