"""What a compile would do: the result of `--dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.formats import load_format
from quantkit.pipeline.blocks.prepared import Prepared
from quantkit.pipeline.estimate import estimate
from quantkit.report.bundle import figures

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet


def planned(prepared: Prepared) -> dict[str, Any]:
    """What a compile would do, as JSON. Sizes are in bytes; `seconds` is by stage."""
    source, layers, recipe = prepared.source, prepared.layers, prepared.request.recipe
    counts: dict[str, list[float]] = {}
    for name, scheme in layers.schemes.items():
        rows, columns = layers.shapes[name]
        padded = (rows, columns + scheme.padding(columns))
        bits = load_format(scheme.format).bits_per_weight(padded, scheme) * padded[1] / columns
        found = counts.setdefault(figures.scheme_of(scheme.model_dump(mode="json")), [0, 0, 0.0])
        found[0] += 1
        found[1] += rows * columns
        found[2] += rows * columns * bits
    asked, expected = recipe.as_dict(), estimate(prepared)
    return {
        "model": {
            "name": source.name,
            "ref": source.ref,
            "kind": source.kind,
            "dtype": source.dtype,
            "was": source.was,
            "bytes": source.weights.total_bytes(),
        },
        "recipe": recipe.name,
        "target": prepared.request.target.name,
        "schemes": [
            {"scheme": scheme, "layers": int(count), "bits_per_weight": bits / weights}
            for scheme, (count, weights, bits) in counts.items()
        ],
        "kept": [name for name in layers.shapes if name not in layers.schemes] if layers.schemes else [],
        "passes": asked["passes"],
        "export": asked["export"],
        "calibration": _tokens(prepared.calibration) if prepared.calibration else None,
        "scoring": _tokens(prepared.scoring),
        "seconds": dict(expected.seconds),
        "memory_bytes": round(expected.peak),
        "disk_bytes": expected.as_dict()["disk_bytes"],
        "out": str(prepared.out),
        "decisions": [decision.model_dump(mode="json", by_alias=True) for decision in prepared.decisions],
        "notes": list(source.notes),
    }


def _tokens(tokens: TokenSet) -> dict[str, Any]:
    samples, length = tokens.ids.shape
    if tokens.split == "eval" and tokens.pairs is not None:
        return {"set": tokens.name, "split": tokens.split, "pairs": tokens.items}
    about = {"set": tokens.name, "split": tokens.split, "samples": samples, "tokens": length}
    return about if tokens.begins is None else {**about, "begins": tokens.begins}
