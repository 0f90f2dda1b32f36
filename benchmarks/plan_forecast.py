"""How far off are the forecasts of `quantkit plan`? Efficiencies from other models, held against a model of its own.

    python benchmarks/plan_forecast.py --fit     # times random models, writes planning/efficiencies.jsonl
    python benchmarks/plan_forecast.py           # forecasts smollm2-135m from those, then times it

Random models of four sizes are rounded to each format, exported to ONNX and timed against float32 as
`compile` does it; what their steps took ships, with what it is made of. SmolLM2-135M is then forecast from nothing
else, on this machine's figures as measured in the same run, and timed. Targets: half of the rows of each format within
25 % of what was measured, and at least eight of ten within the printed interval.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.forecasts import COLUMNS, claims, figures, here, learned, ship, unscored
from harness.forecasts import compared as beside
from harness.process import helper
from harness.record import parsing, record, show, verdicts

import quantkit
from quantkit import machine
from quantkit.errors import QuantkitError
from quantkit.measurement.timing.speed import SpeedJob, SpeedSide, run
from quantkit.pipeline import measure
from quantkit.pipeline.baseline import float_export
from quantkit.pipeline.plan import PlanQuestion, plan
from quantkit.pipeline.verdict import format_of
from quantkit.planning import efficiency
from quantkit.planning.efficiency import Sample, samples
from quantkit.planning.roofline import ModelStep
from quantkit.runtimes import load_runtime

# 41, 69, 113 and 71 million weights in their blocks; what steps are made of differs: layers, heads of attention, and
# the head, which is a table of 258 bytes or of a vocabulary
SIZES: list[dict[str, Any]] = [
    {"layers": 12, "hidden": 512, "intermediate": 1536, "heads": 8},
    {"layers": 16, "hidden": 640, "intermediate": 1728, "heads": 10, "kv_heads": 2, "vocabulary": 32768, "tied": True},
    {"layers": 16, "hidden": 768, "intermediate": 2048, "heads": 12},
    {"layers": 24, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 4, "vocabulary": 16384, "tied": True},
]
# rounding is what differs least between models, and takes seconds
RECIPES = {"int4": ("rtn-int4", []), "int8": ("int8-weights", [])}
QUICK = replace(measure.QUICK, seconds=30.0)
EXPORT = "export=[{onnx: {dialect: onnxruntime, accuracy_level: 4}}]"
KINDS = ("int4 in int8", "int8 in int8")


def timed(model: str, name: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of a compile of one model with one recipe."""
    recipe, changes = RECIPES[name]
    bundle = quantkit.compile(model, recipe, out=folder / name, changes=[EXPORT, *changes, "gates={}"])
    return [dict(row) for row in bundle.measurements]


def taught(model: str, name: str, folder: Path) -> list[dict[str, Any]]:
    """The same timings without the rest of a compile: a random model's accuracy is nobody's business."""
    recipe, changes = RECIPES[name]
    with unscored(model, recipe, folder / name, [EXPORT, *changes]) as (bundle, subject):
        prepared = subject.prepared
        baseline = float_export(prepared.original, "onnx", prepared.request.recipe.export[0].options)
        source = prepared.original.sha256
        context = min(map(load_runtime("onnxruntime").context, [bundle / "onnx", baseline]))
        ours = SpeedSide(str(bundle / "onnx"), f"{source} {name}", format_of(subject.layers))
        job = SpeedJob(
            ours, SpeedSide(str(baseline), source, "float32"), machine.cores(), measure.fitting(QUICK, context)
        )
        rows = run(job)
    return [row.as_dict() for row in rows]


def fit(folder: Path, sizes: Sequence[dict[str, Any]], seconds: float = math.inf) -> list[Sample]:
    """What random models teach; written after each, and no further one is begun that would take it past `seconds`."""
    found: list[Sample] = []
    start = time.monotonic()
    for number, size in enumerate(sizes):
        if number and (time.monotonic() - start) * (number + 1) / number > seconds:
            print(f"{size}: left out, no time", file=sys.stderr)
            break
        place = folder / f"model{number}"
        helper("random_model.py", {"folder": str(place), **size})
        for name in RECIPES:
            found += samples(taught(str(place), name, folder / f"out{number}"))
            print(f"{size}, {name}: done", file=sys.stderr)
        ship("onnxruntime", found)
    return found


def compared(rows: Sequence[dict[str, Any]], taught: Sequence[Sample], name: str) -> Iterator[dict[str, Any]]:
    """Each step that was timed, with its forecast."""
    target = here(figures(rows))
    recipe, changes = RECIPES[name]
    question = PlanQuestion("smollm2-135m", [recipe], target, "onnxruntime", changes=[EXPORT, *changes])
    served = plan(question, taught).candidates[0].served
    assert served is not None
    for row in rows:
        if row["name"] not in ("latency.decode_step", "latency.prefill"):
            continue
        shape = row["shape"]
        step = ModelStep(row["batch"], shape["new_tokens"], shape["context"])
        yield {"model": "smollm2-135m", "format": name, **beside(served.timed(step), row["value"])}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--fit", action="store_true", help="time random models, and ship what they teach")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the random models")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that the fit may take")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # what was learned here before would be learned again
        os.environ["QUANTKIT_CACHE"] = str(folder / "cache")
        try:
            if options.fit:
                found = fit(folder, SIZES[: options.sizes], options.seconds)
                print(
                    f"{len(found)} steps in {efficiency.SHIPPED.name}", learned(found, "onnxruntime", KINDS), sep="\n"
                )
                return 0
            rows, ceilings = [], {}
            for recipe in RECIPES:
                measured = timed("smollm2-135m", recipe, folder)
                rows += list(compared(measured, efficiency.shipped(), recipe))
                ceilings[recipe] = figures(measured)
        except QuantkitError as problem:
            print(problem.line(), file=sys.stderr)
            return problem.exit
    show("SmolLM2-135M, forecast from other models", rows, COLUMNS)
    record(
        "plan_forecast",
        "forecasts from other models' efficiencies",
        rows,
        {"learned": learned(efficiency.shipped(), "onnxruntime", KINDS), "ceilings": ceilings, "note": options.note},
    )
    return verdicts(claims(rows))


if __name__ == "__main__":
    raise SystemExit(main())
