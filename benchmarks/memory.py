"""Memory is one block, whatever the model's size: peaks of a 12- and a 24-layer model, and a model larger than its cap.

    python benchmarks/memory.py
    python benchmarks/memory.py --layers 6 12 --no-cap --repeats 1

Random Llamas with layers of 30.7 MB, float32, are compiled with `awq-int4`, few samples and a short search, each in a
fresh process; the peak is the operating system's high-water mark of resident memory. glibc's allocator keeps part of
what is freed, more or less of it from run to run: the same compile peaks tens of MB apart. So there are two kinds of
run: `default`, as anyone runs it, and `mapped` (MALLOC_MMAP_THRESHOLD_=65536), where what is freed is gone at once and
the peak is what was needed; that one decides on growth.

Then a 48-layer model, 1.5 GB, is compiled by a process that may not have more than the cap: RLIMIT_DATA, which counts
heap and private writable mappings whether they are touched or not, so that allocation beyond it fails. (Files that are
mapped to be read are not in it: the kernel can drop those pages at any time.)
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, environment, helper
from harness.random_model import LARGE, layer_bytes
from harness.record import layout, parsing, record, show, verdicts

SETTINGS = ["calibration.samples=4", "calibration.tokens=128", "awq.grid=4", "gates={}"]


ALLOCATORS = {"default": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def model(place: Path, layers: int) -> Path:
    folder = place / f"random-{layers}"
    if not folder.exists():
        helper("random_model.py", {"folder": str(folder), "layers": layers, **LARGE})
    return folder


def measured(
    place: Path, layers: int, recipe: str, number: int, allocator: str = "default", cap: int | None = None
) -> dict[str, Any]:
    """One compile, with a cache of its own so that every run does the same work."""
    folder = model(place, layers)
    name = f"out-{layers}-{number}-{allocator}"
    arguments = [f"--set={change}" for change in SETTINGS]
    env = environment(QUANTKIT_CACHE=str(place / f"cache-{name}"), **ALLOCATORS[allocator])
    result, done = compiled(folder, recipe, place / name, *arguments, env=env, data_limit=cap)
    return (
        {"layers": layers, "round": number, "allocator": allocator}
        | {"model_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}
        | {"cap_bytes": cap, "peak_bytes": done.peak, "exit": done.status, "wall_seconds": done.wall}
        | {"checks": {check["name"]: check["ok"] for check in result["checks"]}}
    )


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--recipe", default="awq-int4")
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 24])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS), choices=list(ALLOCATORS))
    parser.add_argument("--cap", type=float, default=1.0e9, help="bytes")
    parser.add_argument("--cap-layers", type=int, default=48)
    parser.add_argument("--no-cap", action="store_true", help="leave the capped run out")
    options = parser.parse_args()

    few, many = options.layers
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows = [
            measured(place, layers, options.recipe, number, allocator)
            for number in range(options.repeats)
            for allocator in options.allocators
            for layers in (few, many)
        ]
        if not options.no_cap:
            rows.append(measured(place, options.cap_layers, options.recipe, 0, cap=int(options.cap)))
    for row in rows:
        row.update({f"{key}_mb": row[f"{key}_bytes"] / 1e6 for key in ("model", "peak")})
        row["cap_mb"] = row["cap_bytes"] / 1e6 if row["cap_bytes"] else None
    columns = layout(
        "layers | allocator | model_mb=model MB:.0f | cap_mb=cap (RLIMIT_DATA) MB:.0f | peak_mb=peak MB:.1f | exit | "
        "wall_seconds=wall s:.0f"
    )
    show(f"{options.recipe}, layers of {layer_bytes(**LARGE) / 1e6:.1f} MB, {THREADS} threads", rows, columns)
    settings = {"recipe": options.recipe, "changes": SETTINGS, **LARGE, "threads": THREADS, "cap": "RLIMIT_DATA"}
    claim = "the peak grows by less than one block from 12 to 24 layers; a model larger than its memory compiles"
    record("memory", claim, rows, settings)
    block = layer_bytes(**LARGE)
    checks = {}
    for allocator in options.allocators:
        peaks: dict[int, list[int]] = {few: [], many: []}
        for row in rows:
            if row["cap_bytes"] is None and row["allocator"] == allocator:
                peaks[row["layers"]].append(row["peak_bytes"])
        growth = statistics.median(peaks[many]) - statistics.median(peaks[few])
        spread = max(max(found) - min(found) for found in peaks.values())
        text = f"{allocator}: from {few} to {many} layers the median peak grows by {growth / 1e6:.1f} MB"
        text += f"; the same compile differs by up to {spread / 1e6:.1f} MB"
        if allocator == "mapped":
            checks[f"{text}; less than a block of {block / 1e6:.1f} MB"] = growth < block
        else:
            print(text)
    for row in rows:
        if row["cap_bytes"]:
            text = f"{row['model_mb']:.0f} MB compile within {row['cap_mb']:.0f} MB, exit {row['exit']}"
            checks[text] = row["exit"] == 0 and row["model_bytes"] > row["cap_bytes"]
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
