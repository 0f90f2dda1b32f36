"""Processor seconds of each stage of a compile, and this machine's rates before and after it.

    request: {"model", "recipe", "changes": [...], "out"}
    answer:  {"stages": {stage: processor seconds}, "rates": {"fp32": op/s, "bf16": op/s, "memory": B/s}}

The clocks are put around functions of the package, in this process alone, and run while blocks are quantized. With one
thread a stage's seconds are its own: those of a stage that runs inside another are taken off. Inside a stage of `WHOLE`
nothing is.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quantkit import machine
from quantkit.calibrate.statistics.collected import Stats
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.model.streaming.calls import Calls
from quantkit.model.streaming.stream import StreamedModel
from quantkit.passes import gptq as assigned
from quantkit.passes.solvers import correction, factor, gptq
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks import quantize
from quantkit.pipeline.progress import Progress

# sides of the matrices and bytes that are read, far beyond the caches; repetitions of each
SIDE, READ, RUNS = 2048, 1 << 28, 7
WHOLE = ("float forwards", "gradients", "output factors", "scales")
PLACES = [
    *(("read", StreamedModel, "load"), ("forwards", Calls, "run"), ("float forwards", Stats, "_originals")),
    *(("sums", InputStats, name) for name in ("add", "taken", "noise")),
    *(("factors", factor, "factor"), ("factors", correction, "factor"), ("correction", correction, "corrected")),
    *(("choosing", gptq, "gptq_shared"), ("output factors", assigned, "_outputs")),
    *(("gradients", quantize, "_collect_gradients"), ("scales", Stats, "each"), ("write", quantize, "_commit")),
]


class Clock(Progress):
    """Processor seconds by stage; a stack of the stages that run."""

    def __init__(self) -> None:
        self.spent, self._running, self._since, self._at = Counter[str](), ["rest"], time.process_time(), ""

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """Note the part of the compile."""
        self._turn()
        self._at = stage

    def _turn(self) -> None:
        now = time.process_time()
        self.spent[self._running[-1] if self._at == "quantize" else self._at] += now - self._since
        self._since = now

    def around(self, stage: str, owner: Any, name: str) -> None:
        """Put the clock around a function, method or property."""
        found = vars(owner)[name]
        inner = found.fget if isinstance(found, property) else found

        def clocked(*args: Any, **named: Any) -> Any:
            self._turn()
            self._running.append(self._running[-1] if self._running[-1] in WHOLE else stage)
            try:
                return inner(*args, **named)
            finally:
                self._turn()
                self._running.pop()

        setattr(owner, name, property(clocked) if isinstance(found, property) else clocked)


def rates() -> dict[str, float]:
    """The best of a few products and reads, by processor seconds, which other work lengthens less than time."""

    def best(work: float, task: Callable[[], object]) -> float:
        found = []
        for _ in range(RUNS):
            began = time.process_time()
            task()
            found.append(work / (time.process_time() - began))
        return max(found)

    left, right, many = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), np.ones(READ, np.int8)
    whole, half = best(2.0 * SIDE**3, lambda: left @ right), (left.bfloat16(), right.bfloat16())
    return {"fp32": whole, "bf16": best(2.0 * SIDE**3, lambda: half[0] @ half[1]), "memory": best(READ, many.max)}


def main(request: dict[str, Any]) -> dict[str, Any]:
    machine.keep_heap()  # as the command line does
    clock, before = Clock(), rates()
    # of its own, or what an earlier compile kept would not be computed
    os.environ["QUANTKIT_CACHE"] = request["out"] + ".cache"
    for place in PLACES:
        clock.around(*place)
    known = {key: request[key] for key in ("recipe", "changes", "out")}
    compile_model(Request.of(request["model"], **known, speed=False, vllm=False), clock)
    after = rates()
    return {"stages": clock.spent, "rates": {kind: max(rate, after[kind]) for kind, rate in before.items()}}
