"""Memory is one block, whatever the model's size: peaks of a 12- and a 24-layer model, and a model larger than its cap.

    python benchmarks/memory.py
    python benchmarks/memory.py --layers 4 32 --shapes wide --recipe gptq-int4 --no-cap --repeats 1
    python benchmarks/memory.py --cap-alone --shapes llama-3.2-3b --cap-layers 30 --cap 1.5e9 --recipe gptq-int4
    python benchmarks/memory.py --block llama-3-8b --recipes gptq-int4      one block of real shapes, part by part

Random Llamas with layers of 30.7 MB, float32, are compiled with `awq-int4`, few samples and a short search, each in a
fresh process; the peak is the operating system's high-water mark of resident memory. glibc's allocator keeps part of
what is freed, more or less of it from run to run: the same compile peaks tens of MB apart. So there are two kinds of
run: `default`, as anyone runs it, and `mapped` (MALLOC_MMAP_THRESHOLD_=65536), where what is freed is gone at once and
the peak is what was needed; that one decides on growth.

Then a 48-layer model, 1.5 GB, is compiled by a process that may not have more than the cap: RLIMIT_DATA, which counts
heap and private writable mappings whether they are touched or not, so that allocation beyond it fails. (Files that are
mapped to be read are not in it: the kernel can drop those pages at any time.)

`--block` compiles a bfloat16 model of one block in a real model's shapes, with 4,096 rows of vocabulary, by some
recipes on 2 x 128 tokens, and says the peak and the processor seconds of each part. 256 positions score.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import compiles
from harness.process import THREADS, compiled, environment, helper
from harness.random_model import LARGE, layer_bytes
from harness.record import layout, parsing, record, show, verdicts

SETTINGS = ["calibration.samples=4", "calibration.tokens=128", "awq.grid=4", "gates={}"]


# what one block is measured in; the time of a whole model is that of its blocks and of what is read once
SHAPES: dict[str, dict[str, int]] = {
    "wide": {"hidden": 1536, "intermediate": 4608, "heads": 12, "kv_heads": 12},
    "llama-3.2-3b": {"hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8},
    "llama-3-8b": {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8},
    "llama-3-70b": {"hidden": 8192, "intermediate": 28672, "heads": 64, "kv_heads": 8},
}
BLOCK_SETTINGS = ["gates={}", "export=[{checkpoint: {layout: pack-quantized}}]"]
FEW = ["calibration.samples=2", "calibration.tokens=128"]
ALLOCATORS = {"default": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def model(place: Path, layers: int, shapes: Mapping[str, Any] = LARGE) -> Path:
    folder = place / f"random-{layers}"
    if not folder.exists():
        helper("random_model.py", {"folder": str(folder), "layers": layers, **shapes})
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


def blocks(shapes: str, recipes: list[str], most: float) -> int:
    """One block by some recipes; whether the parts up to the check stay below `most` bytes."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        made = {"layers": 1, "vocabulary": 4096, "dtype": "bfloat16", "positions": 8192, **SHAPES[shapes]}
        helper("random_model.py", {"folder": str(place / shapes), **made})
        for recipe in recipes:
            changes = [*BLOCK_SETTINGS, *([] if recipe == "rtn-int4" else FEW)]
            found = compiles.compiled(place, recipe, str(place / shapes), recipe, changes, 256, False)
            if found is None:
                return 1
            for part in found["parts"]:
                what = {"recipe": recipe, "stage": part["stage"], "detail": part["detail"]}
                if part["detail"] != "end":
                    rows.append({**what, "peak_mb": part["peak_bytes"] / 1e6, "cpu_seconds": part["cpu_seconds"]})
    show(
        f"one block of {shapes}, {THREADS} threads",
        rows,
        layout("recipe | stage | detail | peak_mb=peak MB:.0f | cpu_seconds=CPU s:.1f"),
    )
    settings = {"shapes": made, "changes": BLOCK_SETTINGS, "calibration": FEW, "scored": 256, "threads": THREADS}
    record(f"memory-block-{shapes}", f"peak of every part at most {most / 1e9:g} GB", rows, settings)
    worst = max(rows, key=lambda row: row["peak_mb"])
    text = f"at most {worst['peak_mb']:.0f} MB ({worst['recipe']}, {worst['stage']}); at most {most / 1e6:.0f}"
    return verdicts({text: worst["peak_mb"] <= most / 1e6})


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
    parser.add_argument("--most", type=float, default=5e9, help="with --block: bytes")
    options = parser.parse_args()
    if options.block:
        return blocks(options.block, options.recipes, options.most)

    few, many = options.layers
    small = {"vocabulary": 4096, "dtype": "bfloat16", "positions": 8192, "tied": True}
    shapes = {**SHAPES[options.shapes], **small} if options.shapes else LARGE
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
