"""Sides that take turns on a quiet machine: each a process of `decode_side.py` that keeps its model loaded.

A round is A B C C B A, so that a drift of the machine hits all sides alike; every turn goes back to the same prompt. A
turn waits for a quiet machine and is taken again if other processes had more than a tenth of a processor meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.process import THREADS

VENV = Path(__file__).resolve().parents[2] / ".peers" / "decode"
SCRIPT = Path(__file__).parent / "decode_side.py"
WARM = 4
PAUSE, QUIET = 0.1, 0.1  # seconds between turns; what others may take of a processor during one


def python_of(kind: str) -> str:
    """The interpreter of a kind of side."""
    return str(VENV / "bin" / "python") if kind in ("genai", "llama.cpp") else sys.executable


class Side:
    """A process of `decode_side.py` that answers one request at a time."""

    def __init__(self, name: str, kind: str, path: Path, errors: Path) -> None:
        self.name, self.kind, self.path, self.errors = name, kind, path, errors
        # each runtime waits as it does by default: OMP_WAIT_POLICY=PASSIVE would slow llama.cpp's barriers
        spared = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        env = {key: value for key, value in os.environ.items() if key not in spared} | {"OMP_NUM_THREADS": str(THREADS)}
        with errors.open("wb") as stream:
            self.process = subprocess.Popen(
                [str(part) for part in (python_of(kind), SCRIPT, kind, path, THREADS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=env,
                text=True,
            )

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Its answer; if it died, what it said last, and the end of the run."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: {what} failed\n{self.errors.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Close its input, which ends it."""
        self.process.stdin.close()
        self.process.wait()


def busy() -> float:
    """Processor seconds that this machine has worked since it started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0) - getattr(times, "guest", 0))


def turn(side: Side, deadline: float, what: str, **details: Any) -> dict[str, Any]:
    """One turn, taken when nothing else works on the machine, and again if something did meanwhile.

    `others`: processor seconds a second that other processes took. From `deadline` on any turn is taken as it is.
    """
    while True:
        before = busy()
        time.sleep(PAUSE)
        late = time.perf_counter() > deadline
        if busy() - before > QUIET * PAUSE and not late:
            continue
        before, began = busy(), time.perf_counter()
        answer = side.ask(what, **details)
        answer["others"] = max(0.0, busy() - before - answer["cpu"]) / (time.perf_counter() - began)
        if answer["others"] < QUIET or late:
            return answer


def play(sides: list[Side], rounds: int, steps: int, deadline: float) -> dict[str, list[dict[str, Any]]]:
    """The turns of each side, two a round: A B C C B A."""
    turns: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for side in sides:
        side.ask("run", steps=steps, warm=WARM)
    for _ in range(rounds):
        for side in [*sides, *reversed(sides)]:
            turns[side.name].append(turn(side, deadline, "run", steps=steps, warm=WARM))
    return turns


def in_turns(steps: Sequence[Callable[[], object]], **how: Any) -> list[Any]:
    """Seconds of each of some steps of this process, [blocks, 2, burst], as `quantkit` interleaves them."""
    from quantkit.measurement.timing.schedule import interleave

    seconds = interleave({str(number): step for number, step in enumerate(steps)}, **how).seconds
    return [seconds[str(number)] for number in range(len(steps))]
