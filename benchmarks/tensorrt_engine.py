"""The engine of a language model in 4 bits beside the one in 16: bytes, and how long a compile takes without a GPU.

    python benchmarks/tensorrt_engine.py
    python benchmarks/tensorrt_engine.py --bundles INT4 FLOAT    # bytes alone, of engines that are there

SmolLM2-135M for `--target rtx-4090`: `int4-tensorrt` as it ships, and the float model in the same network in float16.
Told are bytes of the engines, the same less embedding and head (one tensor, 16 bits in both), their ratio, and clock
and processor seconds. Claims: a ratio of 0.30 at most, and under 5 minutes on 2 quiet cores. What weights alone would
give is 4.25 bits in 16: 0.266. What else is in an engine is told as well: the CUDA source of its kernels, which the
compiler on the user's machine reads, and how much of it are copies (the same text, but for numbers in comments).
"""

from __future__ import annotations

import hashlib
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.record import layout, parsing, record, show, verdicts

import quantkit
from quantkit.errors import QuantkitError

RATIO, SECONDS = 0.30, 300.0
ENGINE = Path("engine") / "sm89.engine"
HEAD = 2 * 49152 * 576
SIDES = {"int4-tensorrt": [], "float": ["export=[{tensorrt: {}}]"]}


def main() -> int:
    """Compile both and compare."""
    parser = parsing(__doc__)
    parser.add_argument("--bundles", nargs=2, type=Path, metavar=("INT4", "FLOAT"), help="that have engines already")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for recipe, path in zip(SIDES, options.bundles or (), strict=False):
            rows.append({"recipe": recipe, **_bytes(path / ENGINE), "seconds": None, "cpu_seconds": None})
        for recipe, changes in {} if options.bundles else SIDES.items():
            begun, cpu = time.perf_counter(), _cpu()
            try:
                bundle = quantkit.compile(
                    "smollm2-135m", recipe=recipe, target="rtx-4090", out=Path(place) / recipe, changes=changes
                )
            except QuantkitError as problem:
                raise SystemExit(problem.line()) from None
            rows.append(
                {"recipe": recipe, **_bytes(bundle.path / ENGINE)}
                | {"seconds": round(time.perf_counter() - begun, 1), "cpu_seconds": round(_cpu() - cpu, 1)}
            )
    ratio = rows[0]["less_head"] / rows[1]["less_head"]
    rows[0]["ratio"] = ratio
    show(
        "engines of SmolLM2-135M for SM 8.9",
        rows,
        layout(
            "recipe | bytes:, | less_head=less the head:, | source=kernels' source:, | copies=of it copies:, | "
            "ratio:.3f | seconds=s:.0f | cpu_seconds=CPU s:.0f"
        ),
    )
    once = [row["less_head"] - row["copies"] for row in rows]
    print(f"with each kernel's source once the ratio would be {once[0] / once[1]:.3f}")
    claims = {f"ratio at most {RATIO}": ratio <= RATIO}
    if not options.bundles:
        claims[f"under {SECONDS:g} s"] = rows[0]["seconds"] < SECONDS
    record("tensorrt_engine", "; ".join(claims), rows, {"target": "rtx-4090"})
    return verdicts(claims)


def _bytes(engine: Path) -> dict[str, int]:
    """Of an engine: all, less the head, source of kernels, and what of that are copies."""
    data = engine.read_bytes()
    sources = [text for text in re.findall(rb"[\x09\x0a\x0d\x20-\x7e]{2000,}", data) if b"__global__" in text]
    # names of constants, which stand in comments, begin with a number of their own and with their values
    plain = [hashlib.sha256(re.sub(rb"-?\d[\d.e+-]*", b"#", text)).digest() for text in sources]
    copies = sum(len(text) for place, text in enumerate(sources) if plain[place] in plain[:place])
    whole = len(data)
    return {"bytes": whole, "less_head": whole - HEAD, "source": sum(map(len, sources)), "copies": copies}


def _cpu() -> float:
    """Processor seconds of this process and its children so far."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in found)


if __name__ == "__main__":
    raise SystemExit(main())
