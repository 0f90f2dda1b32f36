"""What a compile would do: the result of `--dry-run`, of a transformer and of a float graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.formats import stored_bits
from quantkit.pipeline import estimate
from quantkit.pipeline.blocks.layers import account_graph, left_in_floats
from quantkit.pipeline.blocks.opened import Prepared
from quantkit.report.bundle import figures

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.pipeline.graphs.prepared import PreparedGraph
    from quantkit.planning.compiling import Compiling


def planned(prepared: Prepared) -> dict[str, Any]:
    """What the compile of a transformer would do, as JSON. Sizes are in bytes; time is known after the first block."""
    source, layers = prepared.source, prepared.layers
    counts: dict[str, list[float]] = {}
    for name, scheme in layers.schemes.items():
        shape = layers.shapes[name]
        found = counts.setdefault(figures.scheme_of(scheme.model_dump(mode="json")), [0, 0, 0.0])
        for place, amount in enumerate((1, shape[0] * shape[1], stored_bits(shape, scheme))):
            found[place] += amount
    return {
        "model": {
            "name": source.name,
            "ref": source.ref,
            "kind": source.kind,
            "dtype": source.dtype,
            "was": source.was,
            "bytes": source.weights.total_bytes(),
        },
        "schemes": [
            {"scheme": scheme, "layers": int(count), "bits_per_weight": bits / weights}
            for scheme, (count, weights, bits) in counts.items()
        ],
        "kept": [name for name in layers.shapes if name not in layers.schemes] if layers.schemes else [],
        "calibration": _tokens(prepared.calibration) if prepared.calibration else None,
        "scoring": _tokens(prepared.scoring),
        "notes": list(source.notes),
        **_common(prepared, estimate.estimate(prepared)),
    }


def planned_graph(prepared: PreparedGraph) -> dict[str, Any]:
    """The same of a float graph, with the multiply-accumulates of one sample and the runtime."""
    from quantkit.pipeline.graphs import quantized as plan
    from quantkit.pipeline.graphs.answers import RUNTIME

    graph, scheme = prepared.graph, prepared.request.recipe.scheme
    macs, chosen, (weights, scales) = prepared.cost.macs, {site.name for site in prepared.sites}, plan.sizes(prepared)
    stored = []
    if scheme.weights is not None:
        inputs = scheme.activations
        stored.append(
            {
                "scheme": figures.scheme_of(scheme.weights.model_dump(mode="json")),
                "activations": inputs.model_dump(mode="json", exclude_none=True) if inputs else None,
                "layers": len(chosen),
                "bits_per_weight": (8 * weights + 32 * scales) / weights,
            }
        )
    return {
        "model": {
            "name": graph.name,
            "ref": prepared.ref,
            "kind": graph.kind,
            "dtype": "float32",
            "was": None,
            "bytes": graph.bytes,
        },
        "schemes": stored,
        "kept": [name for name in macs if name not in chosen],
        "floats": left_in_floats(account_graph(graph.model, chosen, prepared.decisions)),
        "macs": {"quantized": sum(macs[name] for name in chosen), "all": sum(macs.values())},
        "calibration": _samples(prepared.calib),
        "scoring": _samples(prepared.scoring),
        "runtime": RUNTIME,
        "notes": list(graph.notes),
        **_common(prepared, plan.estimate(prepared)),
    }


def _common(prepared: Prepared | PreparedGraph, expected: Compiling) -> dict[str, Any]:
    request, asked = prepared.request, prepared.request.recipe.as_dict()
    return {
        "recipe": request.recipe.name,
        "target": request.target.name,
        "passes": asked["passes"],
        "export": asked["export"],
        "seconds": None,
        "memory_bytes": round(expected.peak),
        "disk_bytes": expected.as_dict()["disk_bytes"],
        "out": str(prepared.out),
        "decisions": [decision.as_dict() for decision in prepared.decisions],
    }


def _tokens(tokens: TokenSet) -> dict[str, Any]:
    samples, length = tokens.ids.shape
    if tokens.split == "eval" and tokens.pairs is not None:
        return {"set": tokens.name, "split": tokens.split, "pairs": tokens.items}
    about = {"set": tokens.name, "split": tokens.split, "samples": samples, "tokens": length}
    more = {"begins": tokens.begins, "generated": tokens.generated or None}
    return about | {name: value for name, value in more.items() if value is not None}


def _samples(data: InputSet) -> dict[str, Any]:
    return {"set": data.name, "split": data.split, "samples": len(data)}
