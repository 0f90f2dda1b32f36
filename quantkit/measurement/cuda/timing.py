"""Seconds of an operation: whole passes over rotated weights, captured in a graph, sides visited A B B A.

A side holds its weight as many times as it takes for all copies together to be three times the last-level cache; a pass
runs the operation once for each copy, so that none finds its weight in the cache. Passes make one CUDA graph, which is
replayed twice, the second time between two events: the first keeps the device busy while the host queues the second,
or what the host takes for that would be part of the time. That over the number of operations is one sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quantkit.measurement.timing.schedule import Array, Visit, unnamed
from quantkit.stats.abba import aa_spread

# times the last-level cache that all copies of a weight make
ROTATION = 3
_RESAMPLES = 1000


@dataclass
class Implementation:
    """One way to do an operation.

    Args:
        name: of the candidate.
        steps: the operation on each copy of the weight.
        resident_bytes: of one copy, all that it keeps.
        settings: plain data.
        least: operations a graph, at least: what starting it takes is then a small part of its time.
    """

    name: str
    steps: Sequence[Callable[[], object]]
    resident_bytes: int
    settings: dict[str, Any]
    least: int = 64

    def ready(self) -> Callable[[], float]:
        """Compile, capture, and give a function that takes one sample, in seconds."""
        self.steps[0]()
        if not torch.cuda.is_available():
            return self._host
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        passes = -(-self.least // len(self.steps))
        with torch.cuda.graph(graph):
            for _ in range(passes):
                for step in self.steps:
                    step()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def sample() -> float:
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / (passes * len(self.steps))

        return sample

    def _host(self) -> float:
        begin = time.perf_counter()
        for step in self.steps:
            step()
        return (time.perf_counter() - begin) / len(self.steps)


def copies(size: int, cache: int, *, most: int = 1024) -> int:
    """How many copies of `size` bytes rotate past the cache; two at least."""
    return max(2, min(most, -(-ROTATION * cache // max(size, 1))))


def interleaved(samplers: Sequence[Callable[[], float]], blocks: int, generator: np.random.Generator) -> list[Array]:
    """For each side [blocks, 2] seconds: so many blocks in turns; one sample settles each visit."""
    times = unnamed(samplers, blocks=(blocks, blocks), seconds=0.0, generator=generator, visit=Visit(1, 1))
    return [each[..., 0] for each in times]


def summary(times: Array, generator: np.random.Generator) -> dict[str, Any]:
    """Median, quantiles, its interval over resampled blocks (None of one block), A/A spread."""
    drawn = times[generator.integers(0, len(times), (_RESAMPLES, len(times)))].reshape(_RESAMPLES, -1)
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {
        "value": float(np.median(times)),
        "quantiles": {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)},
        "ci95": [float(low), float(high)] if len(times) > 1 else None,
        "n": int(times.size),
        "aa_spread": aa_spread(times[:, :, None], generator),
    }


def ratio(baseline: Array, subject: Array, generator: np.random.Generator) -> tuple[float, list[float] | None]:
    """How many times as fast the subject is, and the 95 % interval over blocks drawn for both sides together.

    One block alone has no interval: nothing can be drawn again.
    """
    index = generator.integers(0, len(subject), (_RESAMPLES, len(subject)))
    draws = [np.median(side[index].reshape(_RESAMPLES, -1), axis=1) for side in (baseline, subject)]
    point = float(np.median(baseline) / np.median(subject))
    if len(subject) < 2:
        return point, None
    low, high = np.quantile(draws[0] / draws[1], (0.025, 0.975))
    return point, [min(float(low), point), max(float(high), point)]
