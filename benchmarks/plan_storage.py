"""A plan's bytes of weights against real bundles of SmolLM2-135M: each format, layout and export, within 0.5 %.

    python benchmarks/plan_storage.py
    python benchmarks/plan_storage.py --only nf4 int8
    python benchmarks/plan_storage.py --rows rows.json    # goes on where a run with this file was stopped

Every recipe is compiled for real, rounding to nearest instead of its own passes, because no byte depends on them. What
SmolLM2's widths do not take (blocks of 128 of a recipe's inputs) is switched off, and said in the row. The plan reads
the shipped config alone; an engine is not built here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness.process import compiled
from harness.record import parsing, record, show, verdicts

from quantkit.bundle import Bundle
from quantkit.measurement.size import folder_of, weight_bytes
from quantkit.model.sizes import configs
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe

MODEL, LIMIT = "smollm2-135m", 0.005
# label -> recipe and changes
BUNDLES: dict[str, tuple[str, list[str]]] = {
    "float": ("float", []),
    "int4, onnx too": ("awq-int4", []),
    "int4, 8-bit head, onnx": ("int4-cpu", []),
    "int4-symmetric": ("int4-symmetric", []),
    "int4-symmetric, gptq": ("int4-symmetric", ["export=[{checkpoint: {layout: gptq}}]"]),
    "int4, gptq-v2": ("rtn-int4", ["export=[{checkpoint: {layout: gptq-v2}}]"]),
    "int4, padded, dense": (
        "rtn-int4",
        ["scheme.weights.group=128", "on_indivisible=pad", "export=[{checkpoint: {layout: dense}}]"],
    ),
    "int4, padded, onnx": ("rtn-int4", ["scheme.weights.group=128", "on_indivisible=pad", "export=[{onnx: {}}]"]),
    "int4, some kept": ("rtn-int4", ["overrides=[{match: '*.down_proj'}]"]),
    "int3": ("int3", []),
    "int8-weights": ("int8-weights", []),
    "int8": ("int8", []),
    "int8-dynamic": ("int8-dynamic", []),
    "int8-dynamic, onnx": ("int8-dynamic", ["export=[{onnx: {}}]"]),
    "fp8": ("fp8", []),
    "fp8-block, weights alone": ("fp8-block", ["scheme.activations=null"]),
    "nf4": ("nf4", []),
    "nvfp4": ("nvfp4", []),
    "mxfp4": ("mxfp4", []),
    "int4, cache in fp8": ("rtn-int4+kv-fp8", []),
}
QUICK = ["gates={}", "calibration.samples=4", "calibration.tokens=128"]


def rows_of(label: str, place: Path) -> list[dict[str, Any]]:
    """One bundle, each of its exports."""
    name, changes = BUNDLES[label]
    rounding = [] if name == "float" else ["passes=[rtn]"]
    arguments = [f"--set={change}" for change in (*QUICK, *rounding, *changes)]
    out = place / "bundle"
    compiled(MODEL, name, out, "--no-speed", *arguments)
    manifest = Bundle.load(out).manifest
    recipe = Recipe.from_dict({key: value for key, value in manifest.recipe.items() if key != "name"}, name=name)
    found = []
    for step in recipe.export:
        planned = storage(configs.read(MODEL), recipe, step.name)
        real = weight_bytes(manifest.files, folder=folder_of(step.name))
        error = planned.total / real - 1
        row = {"bundle": label, "export": step.name, "bytes": real, "planned": round(planned.total), "error": error}
        found.append({**row, "changes": changes, "parts": planned.parts})
    shutil.rmtree(out)
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BUNDLES), default=list(BUNDLES))
    parser.add_argument("--rows", type=Path, help="file of what was compared so far")
    options = parser.parse_args()
    known = json.loads(options.rows.read_text()) if options.rows and options.rows.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        for label in options.only:
            if label not in known:
                known[label] = rows_of(label, Path(name))
                if options.rows:
                    options.rows.write_text(json.dumps(known))
    rows = [row for label in options.only for row in known[label]]
    columns = {"bundle": "bundle", "export": "export", "bytes": "bytes:,", "planned": "planned:,", "error": "off:+.4%"}
    show("weights of SmolLM2-135M", rows, columns)
    claim = f"a plan's bytes of weights are within {LIMIT:.1%} of a real bundle's"
    record("plan_storage", claim, rows, {"model": MODEL, "quick": QUICK})
    worst = max(rows, key=lambda row: abs(row["error"]))
    return verdicts({f"{claim}; the worst: {worst['bundle']}, {worst['error']:+.4%}": abs(worst["error"]) <= LIMIT})


if __name__ == "__main__":
    raise SystemExit(main())
