"""A graph and its quantized self, timed side by side in a process of their own; see `measure.speed`.

One pass of a batch of samples is a `latency.prefill` of one token a sequence: a graph has no tokens, and all that it
reads of a sample comes at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.operators.tax import Cost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.latency import Entry, Plan, Step, measure
from quantkit.measurement.timing.speed import demand
from quantkit.runtimes import child
from quantkit.runtimes.onnxruntime.open import open_graph

RUNTIME = "onnxruntime"
Array = NDArray[Any]


@dataclass(frozen=True)
class Side:
    """One of the two.

    Args:
        file: the graph.
        subject: identity for the rows.
        format: of its weights.
        weight_bytes: of all its constants.
    """

    file: str
    subject: str
    format: str
    weight_bytes: float


@dataclass(frozen=True)
class Job:
    """What is to be timed.

    Args:
        ours: what is judged.
        theirs: the float graph.
        samples: a .npz with an array [n, ...] for each input: what is run, over again where a batch is larger.
        macs: multiply-accumulates of one sample.
        outputs: numbers that come out for one sample.
        batches: samples of a pass.
        threads: of both.
        seconds: for all.
        rounds: over the batches.
    """

    ours: Side
    theirs: Side
    samples: str
    macs: float
    outputs: float
    batches: Sequence[int]
    threads: int
    seconds: float
    rounds: int = 4


def run(job: Job, progress: Callable[[float, str], None] | None = None) -> list[Row]:
    """The rows of `latency.measure`.

    Raises:
        InputError: `speed-failed`, `out-of-memory`; MissingDependency: onnxruntime or scipy.
    """
    demand()
    remedy = "try smaller batches: quantkit measure BUNDLE --batch 1,2,4"
    lines = child.lines(__name__, [], json.dumps(asdict(job)), progress, remedy=remedy)
    return [Row.model_validate(json.loads(line)) for line in lines]


class Passes:
    """A loaded graph as `latency.Side`."""

    def __init__(self, file: str, samples: Mapping[str, Array], threads: int) -> None:
        self._session = open_graph(Path(file), threads)
        self._samples = samples

    def decode(self, batch: int, context: int) -> Step:
        """See `latency.Side`: a graph has no cache."""
        raise InputError("not-a-decoder", where="onnxruntime", value="a graph", rule="only decoders have a cache")

    def prefill(self, batch: int, tokens: int) -> Step:
        """See `latency.Side`."""
        feed = {
            name: np.ascontiguousarray(np.resize(array, (batch, *array.shape[1:])))
            for name, array in self._samples.items()
        }
        return lambda: self._session.run(None, feed)


def _time(data: Mapping[str, Any]) -> list[Row]:
    job = Job(**{**data, "ours": Side(**data["ours"]), "theirs": Side(**data["theirs"])})
    with np.load(job.samples, allow_pickle=False) as loaded:
        samples = {name: loaded[name] for name in loaded.files}
    read = float(sum(array.nbytes / len(array) for array in samples.values()))
    entries = [
        Entry(Passes(side.file, samples, job.threads), _cost(side, job, read), side.subject)
        for side in (job.ours, job.theirs)
    ]
    settings: dict[str, str | bool | int | float | None] = {
        "threads": job.threads,
        "compute_type": entries[0].cost.compute,
        "baseline_format": job.theirs.format,
    }
    plan = Plan((), (), (1,), tuple(job.batches), job.seconds, job.seconds, job.rounds)
    return measure(
        entries[0],
        entries[1],
        runtime=RUNTIME,
        settings=settings,
        device=machine.device(),
        versions=machine.versions(),
        plan=plan,
        progress=lambda share, words: print(f"at {share} {words}", flush=True),
    )


def _cost(side: Side, job: Job, read: float) -> Cost:
    return Cost(
        side.format,
        side.weight_bytes,
        flops_per_token=2.0 * job.macs,
        io_bytes_per_token=read + 4.0 * job.outputs,
        compute="int8" if side.format == "int8" else "fp32",
    )


def main(arguments: list[str]) -> None:
    """The child: a job on stdin."""

    def answer() -> None:
        for row in _time(json.load(sys.stdin)):
            print(f"row {row.line()}", flush=True)

    child.answering(answer)
