"""What the compile of a graph would do and take: the result of `--dry-run`, and the seconds that progress begins with.

Times are guesses from multiply-accumulates, at the rate of an ordinary core, and from what starting a session of ONNX
Runtime takes for every product that is solved; space is reckoned from shapes.
"""

from __future__ import annotations

from typing import Any

from quantkit import machine
from quantkit.calibrate.sets.inputs import InputSet
from quantkit.pipeline.graphs.measure import RUNTIME, SECONDS
from quantkit.pipeline.graphs.prepared import Prepared
from quantkit.pipeline.graphs.quantized import BATCH, SOLVING
from quantkit.pipeline.request import runs_here
from quantkit.report.bundle import figures

# multiply-accumulates a second of a core in float32; what Python with torch and ONNX Runtime takes
_RATE = 10e9
_INTERPRETER = 0.7e9
# two sessions and the clones of the graph for one product
_SESSIONS = 0.15
# numbers of inner tensors that are looked at a second, and what is held of one feed's at once
_SCANNED, _HELD = 60e6, 3
# those that become sums of products in a second
_SUMMED = 8e6
# of mixed precision, beyond the first
_POINTS = 4
# how often the weights are in memory: the file, the graph, a clone, and a session of it
_COPIES = 5
_CEILINGS = 12.0
# bytes of a node in a file; of a product's quantizers and their names
_NODE, _SITE = 200, 1500
# of a product's step: its line in the journal, its file's head
_STEP = 600


def seconds(prepared: Prepared) -> dict[str, float]:
    """By stage, in order."""
    activations = prepared.request.recipe.scheme.activations
    macs, inner = sum(prepared.cost.macs.values()), prepared.cost.inner
    rate = _RATE * machine.cores()
    solved, sites = min(SOLVING, len(prepared.calib)), len(prepared.sites)
    found = {}
    if activations is not None and not activations.dynamic:
        found["ranges"] = 1.0 + len(prepared.calib) * (macs / rate + inner / _SCANNED)
    # the graph runs twice, and what every product sees becomes sums
    found["codes"] = sites * _SESSIONS + solved * (2 * macs / rate + inner / _SUMMED)
    if prepared.held is not None:
        # each product alone, then a few points that are solved again
        found["mixed"] = sites * (1.0 + 32 * macs / rate) + _POINTS * found["codes"]
    found["score"] = 1.0 + 2 * len(prepared.scoring) * macs / rate
    if prepared.request.speed and runs_here(prepared.request.target):
        found["speed"] = SECONDS + _CEILINGS
    return found


def planned_graph(prepared: Prepared) -> dict[str, Any]:
    """What a compile would do, as JSON; keys as of `dry_run.planned`, and multiply-accumulates of one sample."""
    graph, recipe = prepared.graph, prepared.request.recipe
    weights, activations = recipe.scheme.weights, recipe.scheme.activations
    macs, chosen = prepared.cost.macs, {site.name: site for site in prepared.sites}
    numbers, scales = _numbers(prepared)
    return {
        "model": {
            "name": graph.name,
            "ref": prepared.ref,
            "kind": graph.kind,
            "dtype": "float32",
            "was": None,
            "bytes": graph.bytes,
        },
        "recipe": recipe.name,
        "target": prepared.request.target.name,
        "schemes": [
            {
                "scheme": figures.scheme_of(weights.model_dump(mode="json")),
                "activations": activations.model_dump(mode="json", exclude_none=True) if activations else None,
                "layers": len(chosen),
                "bits_per_weight": (8 * numbers + 32 * scales) / numbers,
            }
        ]
        if weights is not None
        else [],
        "kept": [name for name in macs if name not in chosen],
        "macs": {"quantized": sum(macs[name] for name in chosen), "all": sum(macs.values())},
        "passes": recipe.as_dict()["passes"],
        "export": recipe.as_dict()["export"],
        "calibration": _samples(prepared.calib),
        "scoring": _samples(prepared.scoring),
        "seconds": seconds(prepared),
        "memory_bytes": round(_INTERPRETER + _COPIES * graph.bytes + _inputs(prepared) + _activations(prepared)),
        "disk_bytes": {**disk(prepared), "cache": 0},
        "out": str(prepared.out),
        "runtime": RUNTIME,
        "decisions": [each.model_dump(mode="json", by_alias=True) for each in prepared.decisions],
        "notes": list(graph.notes),
    }


def disk(prepared: Prepared) -> dict[str, int]:
    """Bytes on disk: of the bundle, and of what stands beside it until it is finished."""
    graph, sites = prepared.graph.model.graph, list(prepared.sites)
    weights = prepared.request.recipe.scheme.weights
    stored = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    if weights is None:
        return {"bundle": stored + _NODE * len(graph), "work": 0}
    # codes are bytes, whatever they hold; of each row a scale and a sum of biases
    numbers, scales = _numbers(prepared)
    bundle = stored - 3 * numbers + 12 * scales + _NODE * len(graph) + _SITE * len(sites)
    # in steps a second sum of biases, and where products may be kept, two more solves
    rows = sum(site.weight.shape[site.rows] for site in sites)
    step = numbers + 4 * scales + 8 * rows + _STEP * len(sites)
    return {"bundle": bundle, "work": step if prepared.held is None else 3 * step}


def _numbers(prepared: Prepared) -> tuple[int, int]:
    """Of the products that are quantized: weights, and scales."""
    weights = prepared.request.recipe.scheme.weights
    by_channel = weights is not None and weights.granularity == "channel"
    scales = sum(site.weight.shape[site.rows] if by_channel else 1 for site in prepared.sites)
    return sum(site.weight.size for site in prepared.sites), scales


def _inputs(prepared: Prepared) -> int:
    return sum(array.nbytes for data in (prepared.calib, prepared.scoring) for array in data.arrays.values())


def _activations(prepared: Prepared) -> float:
    """What is shown of one feed at once, or what products that are still to be solved read of all of them."""
    solved = min(SOLVING, len(prepared.calib))
    return 4.0 * prepared.cost.inner * max(_HELD * (prepared.calib.batch or BATCH), solved / 2)


def _samples(data: InputSet) -> dict[str, Any]:
    return {"set": data.name, "split": data.split, "samples": len(data)}
