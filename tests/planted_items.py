"""Bundles of one text with planted items and times, for comparisons without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import planted

from quantkit.bundle import content_sha256, inventory
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.measurement.accuracy.positions import Items
from quantkit.measurement.rows import Row, write_rows

ORIGINAL = "b" * 64
DATA = {"set": "prose-en", "split": "eval", "sha256": "e" * 64, "items": 5000}
LAYER = {"name": "layers.0.q", "shape": [64, 64], "bits_per_weight": 4.3125, "error": 0.08}
INT4 = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False, "scale": "float16"}


def items(seed: int, *, worse: float = 0.0, sequences: int = 20, each: int = 250) -> Items:
    """Return the items of a candidate; it loses `worse` nats at each position, and the same share of the answers."""
    text, own = np.random.default_rng(0), np.random.default_rng([1, seed])
    n = sequences * each
    nll, right, best = text.gamma(2.0, 1.7, n), text.random(n) < 0.45, text.integers(97, 123, n).astype(np.int32)
    still = (right ^ (own.random(n) < 0.01)) & (own.random(n) >= worse)
    return Items(
        sequence=np.repeat(np.arange(sequences, dtype=np.int32), each),
        nll_original=nll,
        nll_candidate=nll + worse + own.normal(0, 0.05, n),
        kl=worse + own.gamma(1.0, 0.02, n),
        agree=still == right,
        right_original=right,
        right_candidate=still,
        best_original=best,
        best_candidate=np.where(still == right, best, best - 32).astype(np.int32),
        chance_original=np.full(n, 0.5, np.float32),
        chance_candidate=np.full(n, 0.4, np.float32),
    )


@dataclass(frozen=True)
class Plant:
    """Description of a planted bundle.

    Args:
        name: name of its folder.
        seed: seed of its items.
        worse: nats lost at each position, and share of the answers lost.
        size: bytes of its weights.
        ratios: speed-up over the baseline at batches 1, 2, ...
        reach: half width of the ratios' intervals, as a share.
        changes: changes of the manifest.
    """

    name: str
    seed: int = 1
    worse: float = 0.0
    size: int = 1000
    ratios: Sequence[float] = (2.0, 1.5)
    reach: float = 0.01
    changes: dict[str, Any] | None = None

    def but(self, name: str, **changes: Any) -> Plant:
        """Return a copy with changes."""
        return replace(self, name=name, **changes)


def write(home: Path, plant: Plant, *, found: Items | None = None, rows: Sequence[Row] | None = None) -> Path:
    """Write the bundle into a folder of its own; `found` and `rows` replace the planted ones."""
    folder = home / plant.name
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(plant.name.encode().ljust(plant.size, b"."))
    subject = content_sha256(inventory(folder))
    (items(plant.seed, worse=plant.worse) if found is None else found).save(folder / "items.safetensors")
    write_rows(folder / MEASUREMENTS, [*scores(subject), *times(subject, plant)] if rows is None else rows)
    return seal(folder, plant)


def seal(folder: Path, plant: Plant) -> Path:
    """Write a manifest of the folder's files."""
    files = inventory(folder)
    layers = [{**LAYER, "scheme": INT4}]
    changes = {"files": [file.model_dump(by_alias=True) for file in files], "content_sha256": content_sha256(files)}
    manifest = planted.manifest(**{"layers": layers, "verdict": None, **changes, **(plant.changes or {})})
    (folder / MANIFEST).write_bytes(manifest.as_bytes())
    return folder


def scores(subject: str, **data: Any) -> list[Row]:
    """Return the rows that describe the scored text and the runtime."""
    row = {"name": "accuracy.kl", "value": 0.02, "unit": "nat", "runtime": "torch", "n": 5000, "ci95": (0.01, 0.03)}
    against = {"subject": ORIGINAL, "value": 0.0}
    sizes = {"name": "size.bytes", "value": 1000, "unit": "B", "baseline": {"subject": ORIGINAL, "value": 4000}}
    return [
        Row.model_validate({**row, "subject": subject, "data": {**DATA, **data}, "baseline": against}),
        Row.model_validate({**sizes, "subject": subject}),
    ]


def times(subject: str, plant: Plant, *, baseline: str = ORIGINAL, device: str = "cpu-1") -> list[Row]:
    """Return decode steps at batches 1, 2, ..."""
    found = []
    for batch, ratio in enumerate(plant.ratios, start=1):
        ends = (ratio / (1 + plant.reach), ratio * (1 + plant.reach))
        found.append(
            Row(
                name="latency.decode_step",
                value=0.02 * batch / ratio,
                unit="s",
                better="lower",
                n=200,
                aa_spread=plant.reach,
                subject=subject,
                baseline={"subject": baseline, "value": 0.02 * batch, "ratio": ratio, "ratio_ci95": ends},
                batch=batch,
                shape={"new_tokens": 1, "context": 128},
                runtime="onnxruntime",
                settings={"threads": 2},
                device={"id": device, "kind": "cpu", "name": "A Processor"},
                versions={"onnxruntime": "1.31.1"},
            )
        )
    return found
