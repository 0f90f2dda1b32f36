"""What a compile takes of memory and disk, predicted and real.

    python benchmarks/plan_compile.py                       # smollm2-135m by every recipe; about half an hour
    python benchmarks/plan_compile.py --recipes awq-int4 nf4 --set calibration.samples=4 --scored 1000
    python benchmarks/plan_compile.py --on gemma-3-270m wide --recipes rtn-int4 gptq-int4   # other models and shapes
    python benchmarks/plan_compile.py --fit                 # random models -> quantkit/planning/compiling_memory.json
    python benchmarks/plan_compile.py --fit --again         # from the compiles that were recorded last, and new
    python benchmarks/plan_compile.py --rows rows.json ...    # goes on where a run with this file was stopped
    python benchmarks/plan_compile.py --timed smollm2-135m gemma-3-270m   # graphs that are timed, for their memory

Fitted on random Llamas, 3 to 50 M parameters, 4 to 12 layers of widths 256 to 768, with vocabularies up to 262,144, and
on the compiles of real models that `models.py` recorded last, whose figures say nothing new of it therefore. Each
compile runs in a process of its own (`harness/compile_side.py`), with a cache in which nothing is known of its text;
the peak is the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compile_fit import fitted, peaks, spec
from harness.compiles import compiled
from harness.process import THREADS, helper
from harness.random_model import make
from harness.record import RESULTS, layout, parsing, record, show, verdicts

from quantkit import machine as host
from quantkit.model.source.open import open_model
from quantkit.planning.compiling import MEMORY, SCORED, predict

COLUMNS = layout(
    "model | recipe | settings | scored=positions:d | peak_predicted_mb=peak MB predicted:.0f | "
    "peak_real_mb=real:.0f | peak_error=error:+.1% | peak_at=at | disk_error=disk error:+.1%"
)
MODEL = "smollm2-135m"
# the record of compiles whose graph is timed
TIMED = "plan_compile-timed"
POSITIONS = {"positions": 2048}
_SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary", "tied")
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("a", 4, 256, 704, 4, 2, 4096, True),
        ("b", 8, 512, 1408, 8, 2, 16384, True),
        ("c", 5, 768, 2048, 12, 4, 32768, True),
        ("d", 12, 384, 1024, 6, 3, 24576, False),
        # embedding and head of Gemma 3 270M and of Qwen2.5 0.5B, and two layers: what a large vocabulary holds
        ("e", 2, 640, 2048, 10, 2, 262144, True),
        ("f", 2, 896, 4864, 14, 2, 151936, False),
        # of 20 and 79 M parameters: what plain transformers takes that proves and confirms
        ("g", 6, 512, 1408, 8, 2, 4096, True),
        ("h", 12, 768, 2048, 12, 4, 8192, True),
    )
}
# shapes that the fit has not seen: two wide blocks, many narrow ones, all vocabulary, a mixture, two blocks of 3B
OTHERS: dict[str, dict[str, Any]] = {
    "wide": {"layers": 2, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 8, "vocabulary": 4096},
    "deep": {"layers": 48, "hidden": 320, "intermediate": 896, "heads": 5, "vocabulary": 8192, "tied": True},
    "words": {"layers": 4, "hidden": 512, "intermediate": 1536, "heads": 8, "vocabulary": 262144, "tied": True},
    "mixture": {"layers": 4, "hidden": 512, "intermediate": 256, "heads": 8, "kv_heads": 2, "vocabulary": 8192}
    | {"experts": 32, "active": 4},
    "3b": {"layers": 2, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8, "vocabulary": 4096}
    | {"dtype": "bfloat16"},
}
# share of the real peak that a forecast may be off
MOST = 0.15
# model, recipe, sequences (0: the recipe looks at no data), positions that are scored (0: as a user's)
FIT = [
    *[("a", "awq-int4", 4, 0), ("b", "int8-weights", 0, 0), ("b", "gptq-int4", 4, 0), ("d", "rtn-int4", 0, 0)],
    *[("d", "int4-best", 4, 1000), ("a", "float", 0, 1000), ("b", "int4-fast", 0, 1000), ("b", "fp8-block", 0, 1000)],
    *[
        ("a", "fp8", 4, 1000),
        ("d", "fp8", 2, 1000),
        ("b", "nf4", 4, 1000),
        ("b", "int8", 4, 1000),
        ("b", "int8", 16, 0),
    ],
    *[("d", "int8-dynamic", 4, 1000), ("a", "int8", 8, 1000), ("b", "mxfp4", 2, 1000), ("a", "nvfp4", 4, 1000)],
    *[("b", "int3", 2, 1000), ("d", "int4-symmetric", 2, 1000), ("a", "int4-cpu", 4, 1000), ("b", "awq-int4", 2, 1000)],
    *[("a", "gptq-int4+kv-fp8", 4, 1000), ("d", "awq-int4", 4, 1000), ("b", "float", 0, 1000)],
    *[("d", "gptq-int4", 8, 1000)],
    *[("b", "nvfp4", 4, 1000), ("d", "int8-weights", 0, 1000), ("b", "int4-best", 8, 1000), ("c", "awq-int4", 16, 0)],
    *[("c", "fp8", 4, 1000), ("c", "int8-weights", 0, 1000), ("c", "int4-cpu", 4, 1000), ("c", "int4-best", 8, 1000)],
    *[("e", "gptq-int4", 2, 500), ("f", "int8-weights", 0, 500), ("g", "gptq-int4", 2, 500), ("g", "fp8", 2, 500)],
    *[("h", "rtn-int4", 0, 500), ("h", "int8-weights", 0, 500), ("h", "int4-cpu", 2, 500), ("h", "nf4", 2, 500)],
    *[("a", "int4-tensorrt", 2, 1000), ("b", "int4-tensorrt", 2, 1000), ("d", "int4-tensorrt", 2, 1000)],
]
RECIPES = [
    *("float", "rtn-int4", "int4-fast", "gptq-int4", "awq-int4", "int4-best", "int4-symmetric", "int3", "int4-cpu"),
    *("int8-weights", "int8", "int8-dynamic", "fp8", "nf4", "nvfp4", "mxfp4", "gptq-int4+kv-fp8"),
]


# recipes that look at no calibration data
FREE = ("float", "rtn-int4", "int4-fast", "int8-weights", "fp8-block")


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted and real of one compile."""
    expected = predict(spec(row))
    peak, place = max((value, part) for part, value in peaks(row).items())
    return (
        {
            "model": row["model"],
            "recipe": row["recipe"],
            "settings": ", ".join(row["changes"]),
            "scored": row["scored"] or SCORED,
        }
        | {"peak_predicted": expected.peak, "peak_real": peak, "peak_error": expected.peak / peak - 1}
        | {"peak_at": place, "disk_error": expected.disk.bundle / row["bundle_bytes"] - 1}
    )


def _config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the table on random models")
    parser.add_argument("--again", action="store_true", help="from the last record, without --fit from --rows")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="with --fit: those of which compiles may be new"
    )
    parser.add_argument("--rows", type=Path, help="file of what was compiled so far")
    parser.add_argument("--on", nargs="+", default=[MODEL], help=f"models, or of the shapes {', '.join(OTHERS)}")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=YAML", help="change every recipe")
    parser.add_argument("--scored", type=int, default=0, help="positions; 0: as a user's compile")
    parser.add_argument("--speed", action="store_true", help="time graphs as well")
    parser.add_argument("--timed", nargs="+", metavar="MODEL", help="compile these with a graph that is timed")
    options = parser.parse_args()
    if options.timed:
        return timed(options.timed)
    return learn(options) if options.fit else predicted(options)


def timed(models: Sequence[str]) -> int:
    """Compile real models with a graph that is timed, for the memory of its parts."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="plan-compile-") as place:
        own = Path(place) / "untied"  # a large vocabulary whose head is no embedding
        make(own, **MODELS["f"], **POSITIONS)
        for model in [*models, str(own)]:
            changes = ["calibration.samples=2", "gates={}"]
            name = Path(model).name
            row = compiled(Path(place), f"{name}-timed", model, "awq-int4", changes, 1000, True)
            if row is not None:
                rows.append({**row, "model": name, "config": dict(open_model(model).config)})
    record(TIMED, "compiles of real models with a graph that is timed, part by part", rows, {})
    return 0


def learn(options: argparse.Namespace) -> int:
    """Compile the random models, fit, write the table."""
    place = Path(tempfile.mkdtemp(prefix="plan-compile-"))
    last = max(RESULTS.glob("plan_compile-fit-*.json"), default=None)
    rows, about = [], host.describe()
    if options.again and last is not None:
        recorded = json.loads(last.read_text())
        rows, about = recorded["rows"], recorded["machine"]
    recorded_before = {row["name"] for row in rows}
    if options.rows and options.rows.is_file():
        rows += json.loads(options.rows.read_text())
    known, added = {row["name"] for row in rows}, False
    for model, recipe, samples, scored in FIT:
        name = f"{model}-{recipe}-{samples}"
        if name in known or model not in options.models:
            continue
        if not (place / model).exists():
            make(place / model, **MODELS[model], **POSITIONS)
        changes = [f"calibration.samples={samples}"] if samples else []
        row = compiled(place, name, str(place / model), recipe, changes, scored, False, vllm=False)
        if row is not None:
            rows.append({**row, "model": model, "config": _config(place / model)})
            print(f"{name}: {max(peaks(row).values()) / 1e6:.0f} MB")
            if options.rows:
                options.rows.write_text(json.dumps([each for each in rows if each["name"] not in recorded_before]))
            added = True
    if added or options.rows or not options.again:
        claim = "compiles of random models, part by part: what planning/compiling_memory.json is fitted to"
        record("plan_compile-fit", claim, rows, {"models": MODELS})
    shutil.rmtree(place, ignore_errors=True)
    measured = max(RESULTS.glob("models-*.json"), default=None)
    real = [row["compile"] for row in json.loads(measured.read_text())["rows"]] if measured else []
    graphs = max(RESULTS.glob(f"{TIMED}-*.json"), default=None)
    real += json.loads(graphs.read_text())["rows"] if graphs else []
    source = (
        {"script": "benchmarks/plan_compile.py --fit"}
        | {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": about["device"]}
        | {"versions": {name: version for name, version in about["packages"].items() if version}}
        | {"compiles": len(rows), "compiles of real models": len(real)}
    )
    MEMORY.write_text(json.dumps({"about": source, "memory": fitted(rows, real)}, indent=1) + "\n")
    print(f"{len(rows)} compiles, {len(real)} of real models")
    return 0


def predicted(options: argparse.Namespace) -> int:
    """Compile models, or take what `--rows` has of them, and set what is predicted beside it."""
    place = Path(tempfile.mkdtemp(prefix="plan-compile-"))
    compiles = json.loads(options.rows.read_text()) if options.rows and options.rows.is_file() else []
    known = {(row["model"], row["recipe"]): row for row in compiles}
    for model in options.on:
        for recipe in options.recipes:
            if options.again or (model, recipe) in known:
                continue
            row = compiled_here(place, model, recipe, options)
            if row is not None:
                known[model, recipe] = row
                show("", seen([compared(row)]), COLUMNS)
                if options.rows:
                    options.rows.write_text(json.dumps([*known.values()]))
        shutil.rmtree(place / model, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    asked = [known[model, recipe] for model in options.on for recipe in options.recipes if (model, recipe) in known]
    return tell([{**row, **compared(row)} for row in asked], options)


def compiled_here(place: Path, model: str, recipe: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """One compile of a model or of a shape; None where it was refused."""
    source = model
    if model in OTHERS:
        source = str(place / model)
        if not Path(source).exists():
            helper("random_model.py", {"folder": source, **OTHERS[model], **POSITIONS})
    else:
        source = str(open_model(model).path)  # so that its conversion is in no compile
    changes = [change for change in options.set if not (recipe in FREE and change.startswith("calibration."))]
    name = f"{model}-{recipe}"
    row = compiled(place, name, source, recipe, changes, options.scored, options.speed, vllm=False)
    config = _config(place / model) if model in OTHERS else dict(open_model(model).config)
    return None if row is None else {**row, "model": model, "config": config}


def seen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their bytes in MB."""
    return [{**row, **{f"{key}_mb": row[key] / 1e6 for key in ("peak_predicted", "peak_real")}} for row in rows]


def tell(rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """The table, the record, and whether the targets hold."""
    show(f"{THREADS} threads", seen(rows), COLUMNS)
    claim = f"peak memory of {', '.join(options.on)} within {MOST:.0%}, fitted on other models"
    settings = {"threads": THREADS, "load": os.getloadavg(), "shapes": {name: OTHERS.get(name) for name in options.on}}
    record("plan_compile", claim, rows, settings)
    worst = max(rows, key=lambda row: abs(row["peak_error"]))
    text = f"peak memory: at most {abs(worst['peak_error']):.1%} off ({worst['model']}, {worst['recipe']})"
    return verdicts({f"{text}; at most {MOST:.0%}": abs(worst["peak_error"]) <= MOST})


if __name__ == "__main__":
    raise SystemExit(main())
