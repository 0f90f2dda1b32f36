"""Memory is one block, whatever the model's size: peaks of a 12- and a 24-layer model, and a model larger than its cap.

    python benchmarks/memory.py
    python benchmarks/memory.py --layers 4 32 --shapes wide --recipe gptq-int4 --no-cap --repeats 1
    python benchmarks/memory.py --cap-alone --shapes llama-3.2-3b --cap-layers 30 --cap 1.5e9 --recipe gptq-int4
    python benchmarks/memory.py --block llama-3-8b --recipes gptq-int4      one block of real shapes, part by part
    python benchmarks/memory.py --block llama-3.2-3b --whole --struck 10    and the whole model, killed and resumed
    python benchmarks/memory.py --foretold llama-3-70b --recipes int4-best  forecasts alone, of one block

Random Llamas with layers of 30.7 MB, float32, are compiled with `awq-int4`, few samples and a short search, each in a
fresh process; the peak is the operating system's high-water mark of resident memory. glibc's allocator keeps part of
what is freed, more or less of it from run to run: the same compile peaks tens of MB apart. So there are two kinds of
run: `default`, as anyone runs it, and `mapped` (MALLOC_MMAP_THRESHOLD_=65536), where what is freed is gone at once and
the peak is what was needed; that one decides on growth.

Then a 48-layer model, 1.5 GB, is compiled by a process that may not have more than the cap: RLIMIT_DATA, which counts
heap and private writable mappings whether they are touched or not, so that allocation beyond it fails. (Files that are
mapped to be read are not in it: the kernel can drop those pages at any time.)

`--block` compiles a bfloat16 model of one block in a real model's shapes, with 4,096 rows of vocabulary, by some
recipes on 2 x 128 tokens, and says the peak and the processor seconds of each part. 256 positions score. The same
compile with next to no block says what is done once, and both predict the whole model. `--whole` compiles that as well;
with `--struck` it is killed (SIGKILL) after so many steps and resumed, and both processes count. Compiles of one block
come before and after it: processor seconds go by what else a machine does.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import compiles
from harness.compile_fit import parts, spec
from harness.process import THREADS, compiled, environment, helper
from harness.random_model import LARGE, describe, layer_bytes
from harness.record import layout, parsing, record, show, verdicts

from quantkit.planning.compiling import peaks as held_peaks

Row = dict[str, Any]
MODEL = "smollm2-135m"
SETTINGS = ["calibration.samples=4", "calibration.tokens=128", "awq.grid=4", "gates={}"]


# models with their number of blocks; the time of a whole one is that of its blocks and of what is done once
SHAPES: dict[str, dict[str, Any]] = {
    MODEL: {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3}
    | {"vocabulary": 49152, "tied": True, "dtype": "float32"},
    "wide": {"layers": 32, "hidden": 1536, "intermediate": 4608, "heads": 12, "kv_heads": 12},
    "llama-3.2-3b": {"layers": 30, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8},
    "llama-3-8b": {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8},
    "llama-3-70b": {"layers": 80, "hidden": 8192, "intermediate": 28672, "heads": 64, "kv_heads": 8},
    "qwen3-30b-a3b": {"layers": 48, "hidden": 2048, "intermediate": 768, "heads": 32, "kv_heads": 4, "head_dim": 128}
    | {"experts": 128, "active": 8},
}
SMALL = {"vocabulary": 4096, "dtype": "bfloat16", "positions": 8192}
# next to no block: what is done once remains
NEXT_TO_NONE = {"layers": 1, "intermediate": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "experts": 0}
# share of a whole compile's processor seconds that their prediction may be off
OFF = 0.15
BLOCK_SETTINGS = ["gates={}", "export=[{checkpoint: {layout: pack-quantized}}]"]
FEW = ["calibration.samples=2", "calibration.tokens=128"]
ALLOCATORS = {"default": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def model(place: Path, layers: int, shapes: Mapping[str, Any] = LARGE) -> Path:
    folder = place / f"random-{layers}"
    if not folder.exists():
        helper("random_model.py", {"folder": str(folder), **shapes, "layers": layers})
    return folder


def measured(
    place: Path,
    layers: int,
    recipe: str,
    number: int,
    allocator: str = "default",
    cap: int | None = None,
    shapes: Mapping[str, Any] = LARGE,
) -> dict[str, Any]:
    """One compile, with a cache of its own so that every run does the same work."""
    folder = model(place, layers, shapes)
    name = f"out-{layers}-{number}-{allocator}"
    settings = SETTINGS if recipe == "awq-int4" else ["gates={}", *([] if recipe == "rtn-int4" else FEW)]
    arguments = ["--no-speed", "--no-vllm", *(f"--set={change}" for change in settings)]
    env = environment(QUANTKIT_CACHE=str(place / f"cache-{name}"), **ALLOCATORS[allocator])
    result, done = compiled(folder, recipe, place / name, *arguments, env=env, data_limit=cap)
    return (
        {"layers": layers, "round": number, "allocator": allocator}
        | {"model_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}
        | {"cap_bytes": cap, "peak_bytes": done.peak, "exit": done.status, "wall_seconds": done.wall}
        | {"checks": {check["name"]: check["ok"] for check in result["checks"]}}
    )


def blocks(
    name: str, recipes: list[str], most: float, *, few: int, repeats: int, whole: bool, struck: int, kept: Path | None
) -> int:
    """One block, or a few, by some recipes; the whole model is predicted from that, and with `whole` also measured."""
    shapes = {**SMALL, **SHAPES[name]}
    layers, rows, predicted, checks = shapes["layers"], list[Row](), list[Row](), dict[str, bool]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        made = {"one": {**shapes, "layers": few}, "none": {**shapes, **NEXT_TO_NONE}}
        made |= {"whole": shapes} if whole and name != MODEL else {}
        for kind, described in made.items():
            helper("random_model.py", {"folder": str(place / kind), **described})
        sources = {"whole": MODEL, **{kind: str(place / kind) for kind in made}}

        def took(kind: str, recipe: str, number: int) -> Row:
            key, known = f"{name} {recipe} {kind} {number}", {}
            if kept is not None and kept.is_file():
                known = json.loads(kept.read_text())
            if key not in known:
                known[key] = run(kind, recipe)
                if kept is not None:
                    kept.write_text(json.dumps(known))
            found: Row = known[key]
            return found

        def run(kind: str, recipe: str) -> Row:
            changes = [*BLOCK_SETTINGS, *([] if recipe == "rtn-int4" else FEW)]
            given = (place, f"{kind}-{recipe}", sources[kind], recipe, changes, 256, False)
            found = compiles.compiled(*given, vllm=False, struck=struck if kind == "whole" else 0)
            if found is None:
                raise SystemExit(1)
            return {**found, "model": name}

        for recipe in recipes:
            kinds = [*repeats * ["none", "one"], *(["whole", *repeats * ["one", "none"]] if whole else [])]
            runs = [(kind, took(kind, recipe, kinds[:at].count(kind))) for at, kind in enumerate(kinds)]
            cpu = {kind: statistics.fmean(one["process_cpu"] for of, one in runs if of == kind) for kind in kinds}
            block = (cpu["one"] - cpu["none"]) / few
            row: Row = {"recipe": recipe, "blocks": layers, "once": cpu["none"], "block": block}
            row |= {"hours": (cpu["none"] + layers * block) / 3600, "runs": [one["process_cpu"] for _, one in runs]}
            row |= {"kinds": kinds, "predicted": cpu["none"] + layers * block}
            if whole:
                found = next(one for kind, one in runs if kind == "whole")
                off = row["predicted"] / cpu["whole"] - 1
                row |= {"whole": cpu["whole"], "off": off, "struck_after": found["struck_after"]}
                row |= {"whole_peak_mb": found["process_peak"] / 1e6, "parts": found["parts"]}
                checks[f"{recipe}: predicted {off:+.0%} off; at most {OFF:.0%}"] = abs(off) <= OFF
            predicted.append(row)
            found = next(one for kind, one in runs if kind == "one")
            config = json.loads((place / "one" / "config.json").read_text())
            forecast = held_peaks(spec({**found, "config": config}))
            for part, cpu_seconds, peak in parts(found):
                real = {"peak_mb": peak / 1e6, "cpu_seconds": cpu_seconds}
                rows.append({"recipe": recipe, "part": part, **real, "forecast_mb": forecast.get(part, 0.0) / 1e6})
            tell(f"{few} blocks of {name}" if few > 1 else f"one block of {name}", rows[-len(parts(found)) :])
            told(name, predicted[-1:])
    settings = {"shapes": made, "changes": BLOCK_SETTINGS, "calibration": FEW, "scored": 256, "threads": THREADS}
    claim = f"peak of every part of one block at most {most / 1e9:g} GB; the whole within {OFF:.0%} of what it predicts"
    one = f"-{recipes[0]}" if len(recipes) == 1 else ""
    record(f"memory-block-{name}{one}", claim, [*predicted, *rows], settings)
    worst = max(rows, key=lambda row: row["peak_mb"])
    text = f"at most {worst['peak_mb']:.0f} MB ({worst['recipe']}, {worst['part']}); at most {most / 1e6:.0f}"
    return verdicts({text: worst["peak_mb"] <= most / 1e6, **checks})


def foretold(names: list[str], recipes: list[str], more: list[str]) -> int:
    """The forecast of one block of these shapes by each recipe, with more changes; nothing is compiled."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            describe(Path(folder) / name, **{**SMALL, **SHAPES[name], "layers": 1})
            config = json.loads((Path(folder) / name / "config.json").read_text())
            for recipe in recipes:
                changes = [*BLOCK_SETTINGS, *([] if recipe == "rtn-int4" else FEW), *more]
                asked = {"recipe": recipe, "changes": changes, "config": config, "model": name}
                found = held_peaks(spec({**asked, "speed": False, "scored": 256}))
                part = max(found, key=lambda one: found[one])
                rows.append({"name": name, "recipe": recipe, "part": part, "forecast_gb": found[part] / 1e9})
    show("forecasts, one block", rows, layout("name | recipe | part | forecast_gb=GB:.1f"))
    return 0


def tell(what: str, rows: list[Row]) -> None:
    """Show the parts of one block, or a few."""
    shown = "recipe | part | peak_mb=peak MB:.0f | forecast_mb=forecast:.0f | cpu_seconds=CPU s:.1f"
    show(f"{what}, {THREADS} threads", rows, layout(shown))


def told(name: str, predicted: list[Row]) -> None:
    """Show what the whole model is predicted to take."""
    shown = "recipe | blocks:d | once=once, CPU s:.1f | block=a block:.1f | hours=predicted, CPU h:.2f"
    shown += " | whole=measured, CPU s:.0f | off=off:+.1%" if "whole" in predicted[-1] else ""
    show(f"all of {name}", predicted, layout(shown))


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--recipe", default="awq-int4")
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 24])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS), choices=list(ALLOCATORS))
    parser.add_argument("--cap", type=float, default=1.0e9, help="bytes")
    parser.add_argument("--cap-layers", type=int, default=48)
    parser.add_argument("--shapes", choices=list(SHAPES), help="of these models: bfloat16, 4,096 rows of vocabulary")
    parser.add_argument("--cap-alone", action="store_true", help="leave the other runs out")
    parser.add_argument("--no-cap", action="store_true", help="leave the capped run out")
    parser.add_argument("--block", choices=list(SHAPES), help="one block of these shapes, and nothing else")
    parser.add_argument("--recipes", nargs="+", default=["gptq-int4"], help="with --block")
    parser.add_argument("--blocks", type=int, default=1, help="with --block: more of a small model")
    parser.add_argument("--whole", action="store_true", help="with --block: all blocks too")
    parser.add_argument("--struck", type=int, default=0, help="of --whole: steps after which it is killed, and resumed")
    parser.add_argument("--rows", type=Path, help="with --block: file of what was compiled so far")
    parser.add_argument("--most", type=float, default=5e9, help="with --block: bytes")
    parser.add_argument(
        "--foretold", choices=list(SHAPES), nargs="+", help="forecasts of one block of these by --recipes"
    )
    parser.add_argument("--set", nargs="*", default=[], help="with --foretold: more changes of the recipes")
    options = parser.parse_args()
    if options.foretold:
        return foretold(options.foretold, options.recipes, options.set)
    if options.block:
        how = {"few": options.blocks, "repeats": options.repeats, "whole": options.whole}
        how |= {"struck": options.struck, "kept": options.rows}
        return blocks(options.block, options.recipes, options.most, **how)

    few, many = options.layers
    shapes = {**SMALL, **SHAPES[options.shapes], "tied": True} if options.shapes else LARGE
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows = [
            measured(place, layers, options.recipe, number, allocator, shapes=shapes)
            for number in range(0 if options.cap_alone else options.repeats)
            for allocator in options.allocators
            for layers in (few, many)
        ]
        if not options.no_cap:
            rows.append(measured(place, options.cap_layers, options.recipe, 0, cap=int(options.cap), shapes=shapes))
    for row in rows:
        row.update({f"{key}_mb": row[f"{key}_bytes"] / 1e6 for key in ("model", "peak")})
        row["cap_mb"] = row["cap_bytes"] / 1e6 if row["cap_bytes"] else None
    columns = layout(
        "layers | allocator | model_mb=model MB:.0f | cap_mb=cap (RLIMIT_DATA) MB:.0f | peak_mb=peak MB:.1f | exit | "
        "wall_seconds=wall s:.0f"
    )
    block = layer_bytes(**{name: shapes[name] for name in LARGE})
    show(f"{options.recipe}, layers of {block / 1e6:.1f} MB in float32, {THREADS} threads", rows, columns)
    settings = {"recipe": options.recipe, "changes": SETTINGS, **shapes, "threads": THREADS, "cap": "RLIMIT_DATA"}
    claim = "the peak grows by less than one block, and 5 %, with the layers; a model larger than its memory compiles"
    record(f"memory-{options.shapes}-{options.recipe}" if options.shapes else "memory", claim, rows, settings)
    checks = {}
    for allocator in [] if options.cap_alone else options.allocators:
        peaks: dict[int, list[int]] = {few: [], many: []}
        for row in rows:
            if row["cap_bytes"] is None and row["allocator"] == allocator:
                peaks[row["layers"]].append(row["peak_bytes"])
        growth = statistics.median(peaks[many]) - statistics.median(peaks[few])
        spread = max(max(found) - min(found) for found in peaks.values())
        text = f"{allocator}: from {few} to {many} layers the median peak grows by {growth / 1e6:.1f} MB"
        text += f"; the same compile differs by up to {spread / 1e6:.1f} MB"
        if allocator == "mapped":
            most = min(block, 0.05 * statistics.median(peaks[few]))
            checks[f"{text}; less than a block of {block / 1e6:.1f} MB, and 5 %"] = growth < most
        else:
            print(text)
    for row in rows:
        if row["cap_bytes"]:
            text = f"{row['model_mb']:.0f} MB compile within {row['cap_mb']:.0f} MB, exit {row['exit']}"
            checks[text] = row["exit"] == 0 and row["model_bytes"] > row["cap_bytes"]
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
