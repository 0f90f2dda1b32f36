"""The engine of a language model in 4 bits beside the one in 16: bytes, and how long a compile takes without a GPU.

    python benchmarks/tensorrt_engine.py

SmolLM2-135M for `--target rtx-4090`: `int4-tensorrt` as it ships, and the float model in the same network in float16.
Told are bytes of the engines, the same less embedding and head (one tensor, 16 bits in both), their ratio, and clock
and processor seconds. Claims: a ratio of 0.30 at most, and under 5 minutes on 2 quiet cores. What weights alone would
give is 4.25 bits in 16: 0.266.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.record import record, show, verdicts

import quantkit
from quantkit.errors import QuantkitError

RATIO, SECONDS = 0.30, 300.0
SIDES = {"int4-tensorrt": [], "float": ["export=[{tensorrt: {}}]"]}


def main() -> int:
    """Compile both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for recipe, changes in SIDES.items():
            begun, cpu = time.perf_counter(), _cpu()
            try:
                bundle = quantkit.compile(
                    "smollm2-135m", recipe=recipe, target="rtx-4090", out=Path(place) / recipe, changes=changes
                )
            except QuantkitError as problem:
                raise SystemExit(problem.line()) from None
            engine = bundle.path / "engine" / "sm89.engine"
            head = 2 * 49152 * 576
            rows.append(
                {
                    "recipe": recipe,
                    "bytes": engine.stat().st_size,
                    "less_head": engine.stat().st_size - head,
                    "seconds": round(time.perf_counter() - begun, 1),
                    "cpu_seconds": round(_cpu() - cpu, 1),
                }
            )
    ratio = rows[0]["less_head"] / rows[1]["less_head"]
    rows[0]["ratio"] = ratio
    show(
        "engines of SmolLM2-135M for SM 8.9",
        rows,
        {
            "recipe": "recipe",
            "bytes": "bytes:,",
            "less_head": "less the head:,",
            "ratio": "ratio:.3f",
            "seconds": "s:.0f",
            "cpu_seconds": "CPU s:.0f",
        },
    )
    claims = {f"ratio at most {RATIO}": ratio <= RATIO, f"under {SECONDS:g} s": rows[0]["seconds"] < SECONDS}
    record("tensorrt_engine", "; ".join(claims), rows, {"target": "rtx-4090"}, write=not options.no_record)
    return verdicts(claims)


def _cpu() -> float:
    """Processor seconds of this process and its children so far."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in found)


if __name__ == "__main__":
    raise SystemExit(main())
