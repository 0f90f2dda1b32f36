"""How long llama.cpp's threads should wait awake for one another: a decode step and a prompt by OpenMP's spin count.

python benchmarks/llama_cpp_waits.py MODEL.gguf [--no-record]

Each spin count (`GOMP_SPINCOUNT`; None: OpenMP's default) gets a process of its own, twice in turns: medians of 30
steps at batch 1 with 128 tokens in the cache, and of 5 prompts of 256 tokens; the better of two visits. On a quiet
machine, and beside as many processes as there are processors. `quantkit/runtimes/llama_cpp/library.py` rests on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.record import parsing, record

from quantkit import machine

COUNTS = ("0", "1000", "10000", "100000", None)


def median(step: Callable[[], None], count: int) -> float:
    """Milliseconds, after three that are not counted."""
    taken = []
    for number in range(count + 3):
        began = time.perf_counter()
        step()
        taken += [1e3 * (time.perf_counter() - began)] if number >= 3 else []
    return statistics.median(taken)


def measured(file: Path) -> dict[str, float]:
    """In this process, whose OpenMP does as the environment says."""
    import llama_cpp  # noqa: F401 (before quantkit, which would say otherwise)

    from quantkit.runtimes.llama_cpp.session import LlamaModel

    model = LlamaModel(file)
    return {"step_ms": median(model.decode(1, 128), 30), "prompt_ms": median(model.prefill(1, 256), 5)}


def visited(file: Path, count: str | None) -> dict[str, float]:
    """The same, in a process that is told a count."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    environment |= {"GOMP_SPINCOUNT": count} if count is not None else {}
    program = [sys.executable, __file__, str(file), "--inner"]
    found: dict[str, float] = json.loads(
        subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    )
    return found


def main() -> int:
    """Measure, print a line for each count, record."""
    parser = parsing(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps(measured(options.model)))
        return 0
    rows = []
    for others in (0, machine.cores()):
        company = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
        try:
            visits = [(count, visited(options.model, count)) for count in COUNTS * 2]
        finally:
            for each in company:
                each.kill()
        for count in COUNTS:
            own = [times for asked, times in visits if asked == count]
            best = {what: min(times[what] for times in own) for what in own[0]}
            rows.append({"others": others, "spin_count": count, **best})
            print(f"beside {others}, spin count {count}: {best['step_ms']:.2f} and {best['prompt_ms']:.1f} ms")
    settings = {"model": options.model.name, "threads": machine.cores()}
    record("llama-cpp-waits", "no claim", rows, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
