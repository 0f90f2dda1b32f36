"""What a compile takes, predicted and real: seconds, peak memory, disk.

    python benchmarks/plan_compile.py                       # smollm2-135m by every recipe; about half an hour
    python benchmarks/plan_compile.py --recipes awq-int4 nf4 --set calibration.samples=4 --scored 1000
    python benchmarks/plan_compile.py --fit                 # random models -> quantkit/planning/compiling/rates.json
    python benchmarks/plan_compile.py --fit --again         # from the compiles that were recorded last, and new
    python benchmarks/plan_compile.py --fit --rows rows.json   # goes on where a run with this file was stopped
    python benchmarks/plan_compile.py --timed smollm2-135m gemma-3-270m   # graphs that are timed, for their memory
    python benchmarks/plan_compile.py --fit --again --doctor   # and on figures of their machine that are measured now

The efficiencies are fitted on random Llamas, 3 to 50 M parameters, 4 to 12 layers of widths 256 to 768; smollm2-135m is
not among them. Memory is fitted on more of those, with large vocabularies, and on the compiles of real models that
`models.py` recorded last, whose figures say nothing new of it therefore. Each compile runs in a process of its own
(`harness/compile_side.py`), with a cache in which nothing is known of its text; processor seconds are of all its
threads and children, the peak is the kernel's high-water mark. Wall time is what a quiet machine shows: beside other
work set processor seconds against each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.compile_fit import fitted, peaks, spec, spent
from harness.compiles import compiled
from harness.process import THREADS, envelope, environment, quantkit, run
from harness.random_model import make
from harness.record import RESULTS, record, show, verdicts

from quantkit import machine as host
from quantkit.model.source.open import open_model
from quantkit.planning.compiling.forecast import SCORED, predict
from quantkit.planning.compiling.result import RATES, Machine, Rates
from quantkit.planning.model import shipped as shipped_models

COLUMNS = {
    "recipe": "recipe",
    "settings": "settings",
    "scored": "positions:d",
    "cpu_predicted": "CPU s predicted:.0f",
    "cpu_real": "real:.0f",
    "cpu_error": "error:+.0%",
    "wall_predicted": "wall s predicted:.0f",
    "wall_real": "real:.0f",
    "wall_error": "error:+.0%",
    "peak_predicted_mb": "peak MB predicted:.0f",
    "peak_real_mb": "real:.0f",
    "peak_error": "error:+.1%",
    "peak_at": "at",
    "disk_error": "disk error:+.1%",
}
MODEL = "smollm2-135m"
# the record of compiles whose graph is timed
TIMED = "plan_compile-timed"
POSITIONS = {"positions": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "a": {"layers": 4, "hidden": 256, "intermediate": 704, "heads": 4, "kv_heads": 2, "vocabulary": 4096, "tied": True},
    "b": {
        "layers": 8,
        "hidden": 512,
        "intermediate": 1408,
        "heads": 8,
        "kv_heads": 2,
        "vocabulary": 16384,
        "tied": True,
    },
    "c": {
        "layers": 5,
        "hidden": 768,
        "intermediate": 2048,
        "heads": 12,
        "kv_heads": 4,
        "vocabulary": 32768,
        "tied": True,
    },
    "d": {
        "layers": 12,
        "hidden": 384,
        "intermediate": 1024,
        "heads": 6,
        "kv_heads": 3,
        "vocabulary": 24576,
        "tied": False,
    },
    # embedding and head of Gemma 3 270M and of Qwen2.5 0.5B, and two layers: what a large vocabulary holds
    "e": {
        "layers": 2,
        "hidden": 640,
        "intermediate": 2048,
        "heads": 10,
        "kv_heads": 2,
        "vocabulary": 262144,
        "tied": True,
    },
    "f": {
        "layers": 2,
        "hidden": 896,
        "intermediate": 4864,
        "heads": 14,
        "kv_heads": 2,
        "vocabulary": 151936,
        "tied": False,
    },
    # of 20 and 79 M parameters: what plain transformers takes that proves and confirms
    "g": {
        "layers": 6,
        "hidden": 512,
        "intermediate": 1408,
        "heads": 8,
        "kv_heads": 2,
        "vocabulary": 4096,
        "tied": True,
    },
    "h": {
        "layers": 12,
        "hidden": 768,
        "intermediate": 2048,
        "heads": 12,
        "kv_heads": 4,
        "vocabulary": 8192,
        "tied": True,
    },
}
# fitted for their memory alone: the seconds of the first two are those of one thing, two heads
MEMORY_ALONE = frozenset("efgh")
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
    *[
        ("a", "gptq-int4+kv-fp8", 4, 1000),
        ("d", "awq-int4", 4, 1000),
        ("b", "float", 0, 1000),
        ("d", "gptq-int4", 8, 1000),
    ],
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


def doctor() -> dict[str, Any]:
    """This machine's figures, as `quantkit doctor` measures them; `busy` where it says not to trust them."""
    report = envelope(run(quantkit("doctor", "--json")))["result"]
    for warning in report["warnings"]:
        print(f"doctor: {warning}")
    rows = {(row["name"], row["unit"]): row["value"] for row in report["measurements"]}
    figures = {"fp32": rows["ceiling.compute", "flop/s"], "read": rows["ceiling.read", "B/s"]}
    return {**figures, "busy": any("busy" in warning for warning in report["warnings"])}


def known() -> dict[str, Any]:
    """The doctor's figures; those of the table where the machine is busy and the table is of this machine."""
    figures, table = doctor(), json.loads(RATES.read_text())
    if not figures["busy"] or table["about"]["device"]["id"] != host.device()["id"]:
        return figures
    print("the figures on which the efficiencies were fitted are taken, which are of this machine")
    return {name: table["machine"][name] for name in ("fp32", "read")} | {"busy": True}


def fit(
    rows: Sequence[Mapping[str, Any]],
    real: Sequence[Mapping[str, Any]],
    machine: Machine,
    provenance: Mapping[str, Any],
    busy: bool,
) -> dict[str, Any]:
    """The table, with the interval that leaving out one random model after another gives; `real` ones say of memory."""
    about = {"name": machine.name, "cores": machine.cores, "fp32": machine.fp32, "read": machine.read}
    ratios = []
    for left_out in sorted({row["model"] for row in rows} - MEMORY_ALONE):
        others = fitted([row for row in rows if row["model"] != left_out], real, machine, MEMORY_ALONE)
        rates = Rates.from_dict({**others, "interval": (1, 1), "machine": about})
        for row in rows:
            if row["model"] == left_out:
                expected = predict(spec(row), machine, rates)
                ratios.append(_seconds(row) / sum(expected.cpu_seconds.values()))
    table = fitted(rows, real, machine, MEMORY_ALONE)
    rates = Rates.from_dict({**table, "interval": (1, 1), "machine": about})
    interval = [float(f"{edge:.3g}") for edge in (min(ratios), max(ratios))]
    sharing = 1.0 if busy else shared_out(rows, machine, rates)
    return {"about": dict(provenance), "machine": about, "interval": interval, "sharing": sharing, **table}


def shared_out(rows: Sequence[Mapping[str, Any]], machine: Machine, rates: Rates) -> float:
    """How much of the cores parallel work keeps busy, with which the clock is met best; of a quiet machine's compiles.

    wall = alone + together / (cores x)        of the predicted processor seconds, least squares of relative errors
    """
    best, least = 1.0, float("inf")
    for x in (step / 100 for step in range(50, 101)):
        walls = [predict(spec(row), machine, replace(rates, sharing=x)).total for row in rows]
        cost = sum((wall / row["seconds"] - 1) ** 2 for wall, row in zip(walls, rows, strict=True))
        best, least = (x, cost) if cost < least else (best, least)
    return best


def _seconds(row: Mapping[str, Any]) -> float:
    """Processor seconds of all parts."""
    return sum(spent(row).values())


def compared(row: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Predicted and real of one compile."""
    expected = predict(spec(row), machine)
    cpu, wall = sum(expected.cpu_seconds.values()), expected.total
    peak, place = max((value, part) for part, value in peaks(row).items())
    bundle = row["bundle_bytes"]
    return {
        "recipe": row["recipe"],
        "settings": ", ".join(row["changes"]),
        "scored": row["scored"] or SCORED,
        "cpu_predicted": cpu,
        "cpu_real": _seconds(row),
        "cpu_error": cpu / _seconds(row) - 1,
        "wall_predicted": wall,
        "wall_real": row["seconds"],
        "wall_error": wall / row["seconds"] - 1,
        "peak_predicted": expected.peak,
        "peak_real": peak,
        "peak_error": expected.peak / peak - 1,
        "peak_at": place,
        "disk_error": expected.disk.bundle / bundle - 1,
        "stages": {
            stage: [value, sum(each for part, each in spent(row).items() if part.partition(" ")[0] == stage)]
            for stage, value in expected.cpu_seconds.items()
        },
    }


def _config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="learn the efficiencies, on random models")
    parser.add_argument("--again", action="store_true", help="from the compiles of the last record, without compiling")
    parser.add_argument("--doctor", action="store_true", help="with --again: on this machine's figures, measured now")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="with --fit: those of which compiles may be new"
    )
    parser.add_argument("--rows", type=Path, help="with --fit: file of what was compiled so far")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=YAML", help="change every recipe")
    parser.add_argument("--scored", type=int, default=0, help="positions; 0: as a user's compile")
    parser.add_argument("--speed", action="store_true", help="time graphs as well")
    parser.add_argument("--timed", nargs="+", metavar="MODEL", help="compile these with a graph that is timed")
    parser.add_argument("--no-record", action="store_true")
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
    rows, figures, about = [], None, host.describe()
    if options.again and last is not None:
        recorded = json.loads(last.read_text())
        rows, about, figures = recorded["rows"], recorded["machine"], recorded["settings"]["figures"]
    recorded_before = {row["name"] for row in rows}
    if options.rows and options.rows.is_file():
        rows += json.loads(options.rows.read_text())
    if figures is None or options.doctor:
        figures = doctor()
    known, added = {row["name"] for row in rows}, False
    for model, recipe, samples, scored in FIT:
        name = f"{model}-{recipe}-{samples}"
        if name in known or model not in options.models:
            continue
        if not (place / model).exists():
            make(place / model, **MODELS[model], **POSITIONS)
        changes = [f"calibration.samples={samples}"] if samples else []
        row = compiled(place, name, str(place / model), recipe, changes, scored, False)
        if row is not None:
            rows.append({**row, "model": model, "config": _config(place / model)})
            print(f"{name}: {_seconds(row):.0f} s of processor time, {max(peaks(row).values()) / 1e6:.0f} MB")
            if options.rows:
                options.rows.write_text(json.dumps([each for each in rows if each["name"] not in recorded_before]))
            added = True
    if added or options.rows or not options.again:
        claim = "compiles of random models, part by part: what planning/compiling/rates.json is fitted to"
        record("plan_compile-fit", claim, rows, {"figures": figures, "models": MODELS}, write=not options.no_record)
    shutil.rmtree(place, ignore_errors=True)
    machine = Machine(about["device"]["name"], THREADS, figures["fp32"], figures["read"])
    measured = max(RESULTS.glob("models-*.json"), default=None)
    real = [row["compile"] for row in json.loads(measured.read_text())["rows"]] if measured else []
    graphs = max(RESULTS.glob(f"{TIMED}-*.json"), default=None)
    real += json.loads(graphs.read_text())["rows"] if graphs else []
    source = {
        "script": "benchmarks/plan_compile.py --fit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": about["device"],
        "figures": figures.get("note", "quantkit doctor"),
        "versions": {name: version for name, version in about["packages"].items() if version},
        "compiles": len(rows),
        "compiles of real models, for memory": len(real),
        "stated": "timed, fixed:speed: by the clock; fixed:prove, fixed:confirm: of the smallest models",
    }
    table = fit(rows, real, machine, source, bool(figures.get("busy", True)))
    RATES.write_text(json.dumps(table, indent=1) + "\n")
    counted = f"{len(rows)} compiles, {len(real)} of real models"
    print(f"{counted}; real over predicted, of models left out: {table['interval']}")
    assumed = " (assumed)" if figures.get("busy", True) else ""
    print(f"parallel work keeps {table['sharing']:.0%} of the cores busy{assumed}")
    return 0


def predicted(options: argparse.Namespace) -> int:
    """Compile smollm2-135m and set what was predicted beside it."""
    place, figures = Path(tempfile.mkdtemp(prefix="plan-compile-")), known()
    machine = Machine("this machine", THREADS, figures["fp32"], figures["read"])
    config, rows = shipped_models.read(MODEL).config, []
    # opened once, so that its conversion is in no compile
    run(quantkit("compile", MODEL, "--dry-run", "--json"), env=environment(QUANTKIT_CACHE=str(place / "cache")))
    for recipe in options.recipes:
        changes = [change for change in options.set if not (recipe in FREE and change.startswith("calibration."))]
        row = compiled(place, recipe, MODEL, recipe, changes, options.scored, options.speed)
        if row is not None:
            rows.append(compared({**row, "model": MODEL, "config": config}, machine))
            show("", rows[-1:], COLUMNS)
    shutil.rmtree(place, ignore_errors=True)
    return tell(rows, figures, options)


def tell(rows: list[dict[str, Any]], figures: Mapping[str, float], options: argparse.Namespace) -> int:
    """The table, the record, and whether the targets hold."""
    shown = [{**row, **{f"{key}_mb": row[key] / 1e6 for key in ("peak_predicted", "peak_real")}} for row in rows]
    show(f"{MODEL}, {THREADS} threads", shown, COLUMNS)
    claim = f"{MODEL} by every recipe: peak memory within 10 %, processor time within 25 %, fitted on other models"
    settings = {"figures": figures, "threads": THREADS, "load": os.getloadavg()}
    record("plan_compile", claim, rows, settings, write=not options.no_record)
    checks = {}
    for key, limit, what in (
        ("peak", 0.10, "peak memory"),
        ("cpu", 0.25, "processor time"),
        ("wall", 0.25, "wall time"),
    ):
        worst = max(rows, key=lambda row: abs(row[f"{key}_error"]))
        text = f"{what}: at most {abs(worst[f'{key}_error']):.1%} off ({worst['recipe']}); at most {limit:.0%}"
        checks[text] = abs(worst[f"{key}_error"]) <= limit
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
