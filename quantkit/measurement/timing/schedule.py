"""What is timed, and the one schedule by which sides are timed, so that a noisy machine harms all of them alike.

A block visits the sides in a random order and then in the reverse of it: A B B A or B A A B; of three A B C C B A, or
another order of them. A drift that is linear over a block adds the same to all and leaves their ratios alone (ABBA
counterbalancing). Blocks that follow each other are a round; between two rounds something else ran, or all sides were
loaded anew. A visit times a side's step several times, after some that are not counted: caches and threads still belong
to the side before it. What the times say is in `stats.abba` and `stats.slowdown`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.abba import Comparison, compare

Array = NDArray[Any]
Settings = Mapping[str, str | bool | int | float | None]
# a step that returns a float says itself how many seconds it took, by the clock of its device
Step = Callable[[], object]
Clock = Callable[[], float]

# the sides of a comparison
SUBJECT, BASELINE = "subject", "baseline"
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)
PREFILLS = (64, 256, 1024)
# errors of a model that speak of one shape; the others go on
TOO_LARGE = {"out-of-memory", "prompt-too-long", "shape-unsupported"}
# a step shorter than this many seconds is timed twice a visit, after one that is not counted
SHORT = 0.05
# what takes less is run several times in a row, seconds
SHORTEST = 1e-3


class Timeable(Protocol):
    """A loaded model. Raises InputError for a shape that does not fit: `out-of-memory` for this machine,
    `prompt-too-long` for this model, `shape-unsupported` for this engine."""

    def decode(self, batch: int, context: int) -> Step:
        """Prepare a decode step with `context` tokens in the cache; each call repeats the same step."""
        ...

    def prefill(self, batch: int, tokens: int) -> Step:
        """Prepare a prefill of `tokens` tokens a sequence; each call repeats it."""
        ...


@dataclass(frozen=True)
class Shape:
    """What is timed.

    Args:
        batch: sequences, or samples of a graph.
        size: tokens in the cache of a decode step; of each sequence of a prefill, which is 1 of a graph.
    """

    kind: Literal["decode", "prefill"]
    batch: int
    size: int

    @property
    def name(self) -> str:
        """Name of its rows of latency."""
        return "latency.decode_step" if self.kind == "decode" else "latency.prefill"

    @property
    def tokens(self) -> int:
        """New tokens of each sequence."""
        return 1 if self.kind == "decode" else self.size

    @property
    def context(self) -> int:
        """Tokens in the cache."""
        return self.size if self.kind == "decode" else 0

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes as rows have them beside the batch."""
        return {"new_tokens": self.tokens, "context": self.context}

    @property
    def words(self) -> str:
        """Words for progress and errors."""
        return f"{self.kind}, batch {self.batch}, {'context' if self.kind == 'decode' else 'tokens'} {self.size}"

    def step(self, model: Timeable) -> Step:
        """Prepare it on a model. Raises InputError: the model's."""
        return (model.decode if self.kind == "decode" else model.prefill)(self.batch, self.size)


@dataclass(frozen=True)
class TimingPlan:
    """What is measured, and how long it may take.

    Args:
        batches: of the decode steps.
        contexts: tokens in the cache of the decode steps; empty for a model that does not decode.
        prefills: tokens a sequence of the prefills.
        prefill_batches: of the prefills.
        seconds: for all shapes together. One takes longer where its 30 steps a side (10 of a prefill) need it.
        cell_seconds: beyond this a shape makes do with fewer steps, five blocks at least, and is flagged `few-steps`.
        rounds: over all shapes; the interval of a time rests on how much its rounds differ, from four rounds on.
        seed: of the order of the steps and of the resamples.
    """

    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    prefills: Sequence[int] = PREFILLS
    prefill_batches: Sequence[int] = (1,)
    seconds: float = 300.0
    cell_seconds: float = 120.0
    rounds: int = 5
    seed: int = 0

    def shapes(self) -> list[Shape]:
        """List the shapes, small ones first: what they leave of their time goes to the large ones."""
        decode = [Shape("decode", batch, context) for batch in self.batches for context in self.contexts]
        return decode + [Shape("prefill", batch, tokens) for batch in self.prefill_batches for tokens in self.prefills]


@dataclass(frozen=True)
class Visit:
    """What is done each time that a side's turn comes.

    Args:
        burst: timed steps.
        settle: steps before them that are not counted.
        runs: how often a step is run in a row to be timed as one; its mean is kept.
    """

    burst: int = 1
    settle: int = 0
    runs: int = 1

    @classmethod
    def fitting(cls, longest: float, *, runs: int = 1) -> Visit:
        """Lay out a visit for steps of at most so many seconds."""
        return cls(2, 1, runs) if longest < SHORT else cls(1, 0, runs)

    def block(self, seconds: Sequence[float]) -> float:
        """Tell the seconds of a block whose sides' steps take so long."""
        return max(2 * (self.burst + self.settle) * self.runs * sum(seconds), 1e-9)


@dataclass(frozen=True, eq=False)
class Timing:
    """What was timed of some sides in turns, in the order in which it was taken; or why nothing was.

    Args:
        seconds: side -> [blocks, 2, burst] of one step.
        began: the same, when each step began, seconds since 1970; empty where nobody kept that.
        order: of each block the sides as they were visited, and then in reverse.
        rounds: blocks of each round.
        visit: how a side's turn was laid out, where that is known.
        shape: what was timed; None of a step without one.
        skipped: why there are no times: `out-of-memory`, `prompt-too-long`, `shape-unsupported`; empty else.
        settings: of its rows, besides those of the run: clocks and warmth meanwhile.
        flags: of its rows: `throttled`.
    """

    seconds: Mapping[str, Array] = field(default_factory=dict)
    began: Mapping[str, Array] = field(default_factory=dict)
    order: Sequence[Sequence[str]] = ()
    rounds: tuple[int, ...] = ()
    visit: Visit | None = None
    shape: Shape | None = None
    skipped: str = ""
    settings: Settings = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Timing]) -> Timing:
        """Join rounds of the same sides, one after another; one that was skipped has no times at all."""
        if skipped := next((part for part in parts if part.skipped), None):
            return skipped
        first, order = parts[0], [order for part in parts for order in part.order]
        seconds = {side: np.concatenate([part.seconds[side] for part in parts]) for side in first.seconds}
        began = {side: np.concatenate([part.began[side] for part in parts]) for side in first.began}
        rounds = tuple(blocks for part in parts for blocks in part.rounds)
        return replace(first, seconds=seconds, began=began, order=order, rounds=rounds)

    def of(self, *sides: str) -> Timing:
        """Keep the times of some sides alone."""
        seconds, began = ({side: times[side] for side in sides} for times in (self.seconds, self.began))
        return replace(self, seconds=seconds, began=began)

    def compared(self, subject: str, baseline: str, seed: int = 0) -> Comparison | None:
        """Compare two sides; None where there are no times.

        Raises ValueError: fewer than two blocks; MissingDependency: scipy.
        """
        if self.skipped or subject not in self.seconds:
            return None
        return compare(self.seconds[subject], self.seconds[baseline], rounds=self.rounds, seed=seed)

    def steps(self) -> Iterator[tuple[str, int, int, float, float]]:
        """Give (side, block, position in the block, seconds, when it began) of every step, in the order of time."""
        for block, order in enumerate(self.order):
            for place, side in enumerate([*order, *order[::-1]]):
                visit, burst = int(place >= len(order)), self.seconds[side].shape[2]
                for i in range(burst):
                    taken, began = (float(times[side][block, visit, i]) for times in (self.seconds, self.began))
                    yield side, block, place * burst + i, taken, began

    def as_dict(self) -> dict[str, Any]:
        """Give what JSON holds of it."""
        seconds, began = ({side: x.tolist() for side, x in times.items()} for times in (self.seconds, self.began))
        parts = {"visit": self.visit and asdict(self.visit), "shape": self.shape and asdict(self.shape)}
        told = {**parts, "skipped": self.skipped, "settings": dict(self.settings), "flags": list(self.flags)}
        times = {"seconds": seconds, "began": began, "order": [*map(list, self.order)], "rounds": list(self.rounds)}
        return {**times, **{name: value for name, value in told.items() if value}}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Timing:
        """Read what `as_dict` gave."""
        known: dict[str, Any] = dict(data)
        for name in ("seconds", "began"):
            known[name] = {side: np.asarray(times) for side, times in known.get(name, {}).items()}
        for name, kind in (("visit", Visit), ("shape", Shape)):
            known[name] = kind(**known[name]) if known.get(name) else None
        for name in ("rounds", "flags"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def interleave(
    sides: Mapping[str, Step],
    *,
    blocks: tuple[int, int],
    seconds: float,
    generator: np.random.Generator,
    visit: Visit | None = None,
    clock: Clock = time.perf_counter,
) -> Timing:
    """Take one round: the fewest blocks that are asked for, then more while there is time.

    Args:
        sides: what to time, one or more.
        blocks: the fewest and the most.
        seconds: after which no further block begins.
        generator: draws the order of each block.
        visit: None is one step.
        clock: seconds, rising.
    """
    visit = visit or Visit()
    steps = {side: _repeated(step, visit.runs) for side, step in sides.items()}
    taken: dict[str, list[Any]] = {side: [] for side in sides}
    began: dict[str, list[Any]] = {side: [] for side in sides}
    orders: list[list[str]] = []
    with undisturbed():
        start = clock()
        while len(orders) < blocks[0] or (len(orders) < blocks[1] and clock() - start < seconds):
            orders.append([[*sides][number] for number in generator.permutation(len(sides))])
            for side in sides:
                taken[side].append([])
                began[side].append([])
            for side in (*orders[-1], *orders[-1][::-1]):
                step = steps[side]
                for _ in repeat(None, visit.settle):
                    step()
                begins, times = [], []
                for _ in repeat(None, visit.burst):
                    begins.append(time.time())
                    times.append(timed(step, clock) / visit.runs)
                began[side][-1].append(begins)
                taken[side][-1].append(times)
    seconds_of, began_of = ({side: np.array(x) for side, x in times.items()} for times in (taken, began))
    return Timing(seconds_of, began_of, orders, (len(orders),), visit)


def warm(step: Step, clock: Clock = time.perf_counter) -> float:
    """Tell about the seconds that a step takes, after it has run once: that faults the pages in."""
    step()
    return max(timed(step, clock), 1e-9)


def runs_of(longest: float) -> int:
    """Tell how often steps of at most so many seconds are run to be timed as one."""
    return math.ceil(SHORTEST / longest)


def timed(step: Step, clock: Clock) -> float:
    """Run a step: the seconds that it says itself, as a float, or that passed on the clock."""
    begin = clock()
    told = step()
    return told if isinstance(told, float) else clock() - begin


def _repeated(step: Step, runs: int) -> Step:
    """A step that is so many of them, one after another."""
    if runs == 1:
        return step

    def several() -> float | None:
        told = [seconds for _ in repeat(None, runs) if isinstance(seconds := step(), float)]
        return sum(told) if len(told) == runs else None

    return several


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python's garbage collector may stop one side's step for long; as with `timeit`, it waits.

    Collecting first may take a tenth of a second: within another one of these, it is left out.
    """
    was = gc.isenabled()
    if was:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
