"""Define the shapes to time and the one schedule for timing sides in turns, so that a noisy machine harms all alike.

A block visits the sides in a random order and then in reverse: A B B A or B A A B; with three, A B C C B A or another
order. A drift that is linear over a block adds the same to all sides and leaves their ratios alone (ABBA
counterbalancing). Consecutive blocks form a round; between two rounds something else ran, or all sides were loaded
anew. A visit times a side's step several times, after a few untimed ones, because caches and threads still belong to
the side before it. `stats.abba` and `stats.slowdown` analyse the times.
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
# a step that returns a float reports its own seconds, by the clock of its device
Step = Callable[[], object]
Clock = Callable[[], float]

# the sides of a comparison
SUBJECT, BASELINE = "subject", "baseline"
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)
PREFILLS = (64, 256, 1024)
# batches beyond this are for prefill and servers; a decode step of them takes a CPU most of a second
LARGEST = 32
# errors that concern one shape only; the other shapes go on
TOO_LARGE = {"out-of-memory", "prompt-too-long", "shape-unsupported"}
# a step of fewer seconds is timed twice a visit, after an untimed one
SHORT = 0.05
# seconds; a shorter step is run several times in a row
SHORTEST = 1e-3


class Timeable(Protocol):
    """A loaded model. Its methods raise InputError for a shape that does not fit: `out-of-memory` on this machine,
    `prompt-too-long` for this model, `shape-unsupported` by this engine."""

    def decode(self, batch: int, context: int) -> Step:
        """Prepare a decode step with `context` tokens in the cache. Each call of the result repeats the same step."""
        ...

    def prefill(self, batch: int, tokens: int) -> Step:
        """Prepare a prefill of `tokens` tokens a sequence. Each call of the result repeats it."""
        ...


@dataclass(frozen=True)
class Shape:
    """Shape of a step.

    Args:
        batch: sequences, or samples of a graph.
        size: decode step: tokens in the cache; prefill: tokens of each sequence (1 for a graph).
    """

    kind: Literal["decode", "prefill"]
    batch: int
    size: int

    @property
    def name(self) -> str:
        """Name of its latency rows."""
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
        """Sizes beside the batch, as rows have them."""
        return {"new_tokens": self.tokens, "context": self.context}

    @property
    def words(self) -> str:
        """Words for progress and errors."""
        return f"{self.kind}, batch {self.batch}, {'context' if self.kind == 'decode' else 'tokens'} {self.size}"

    def step(self, model: Timeable) -> Step:
        """Prepare the step on a model. Raises InputError: the model's errors."""
        return (model.decode if self.kind == "decode" else model.prefill)(self.batch, self.size)


@dataclass(frozen=True)
class TimingPlan:
    """Shapes to measure and the time for them.

    Args:
        batches: batches of the decode steps.
        contexts: tokens in the cache of the decode steps; empty for a model that does not decode.
        prefills: tokens a sequence of the prefills.
        prefill_batches: batches of the prefills.
        seconds: time for all shapes together. A shape takes longer if its 30 steps a side (10 of a prefill) need it.
        cell_seconds: limit for one shape; beyond it the shape gets fewer steps, at least five blocks, and is flagged
            `few-steps`.
        rounds: rounds over all shapes. From four rounds on, a time's interval comes from the differences between
            rounds.
        seed: seed of the order of the steps and of the resamples.
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
        """List the shapes, small ones first: the large ones get the time that those leave."""
        decode = [Shape("decode", batch, context) for batch in self.batches for context in self.contexts]
        return decode + [Shape("prefill", batch, tokens) for batch in self.prefill_batches for tokens in self.prefills]


@dataclass(frozen=True)
class Visit:
    """Steps of one side each time its turn comes.

    Args:
        burst: timed steps.
        settle: untimed steps before them.
        runs: repetitions that are timed as one step; their mean is kept.
    """

    burst: int = 1
    settle: int = 0
    runs: int = 1

    @classmethod
    def fitting(cls, longest: float, *, runs: int = 1) -> Visit:
        """Lay out a visit for steps of at most `longest` seconds."""
        return cls(2, 1, runs) if longest < SHORT else cls(1, 0, runs)

    def block(self, seconds: Sequence[float]) -> float:
        """Return the seconds of a block whose sides' steps take `seconds`."""
        return max(2 * (self.burst + self.settle) * self.runs * sum(seconds), 1e-9)


@dataclass(frozen=True, eq=False)
class Timing:
    """Times of sides in turns, in the order of measurement, or the reason for having none.

    Args:
        seconds: side -> [blocks, 2, burst] seconds of one step.
        began: start of each step in seconds since 1970, same shape; empty if not kept.
        order: sides of each block in the order of their first visits; the second visits are in reverse.
        rounds: blocks of each round.
        visit: layout of a side's turn, where known.
        shape: shape of the step; None for a step without one.
        skipped: reason for having no times: `out-of-memory`, `prompt-too-long`, `shape-unsupported`; otherwise empty.
        settings: settings of its rows besides those of the run: clocks and temperature meanwhile.
        flags: flags of its rows: `throttled`.
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
        """Join rounds of the same sides, one after another; if one was skipped, there are no times."""
        if skipped := next((part for part in parts if part.skipped), None):
            return skipped
        first, order = parts[0], [order for part in parts for order in part.order]
        seconds = {side: np.concatenate([part.seconds[side] for part in parts]) for side in first.seconds}
        began = {side: np.concatenate([part.began[side] for part in parts]) for side in first.began}
        rounds = tuple(blocks for part in parts for blocks in part.rounds)
        return replace(first, seconds=seconds, began=began, order=order, rounds=rounds)

    def of(self, *sides: str) -> Timing:
        """Keep only the times of the named sides."""
        seconds, began = ({side: times[side] for side in sides} for times in (self.seconds, self.began))
        return replace(self, seconds=seconds, began=began)

    def compared(self, subject: str, baseline: str, seed: int = 0) -> Comparison | None:
        """Compare two sides; None without times.

        Raises ValueError: fewer than two blocks; MissingDependency: scipy.
        """
        if self.skipped or subject not in self.seconds:
            return None
        return compare(self.seconds[subject], self.seconds[baseline], rounds=self.rounds, seed=seed)

    def steps(self) -> Iterator[tuple[str, int, int, float, float]]:
        """Yield (side, block, position in the block, seconds, start) of every step, in order of time."""
        for block, order in enumerate(self.order):
            for place, side in enumerate([*order, *order[::-1]]):
                visit, burst = int(place >= len(order)), self.seconds[side].shape[2]
                for i in range(burst):
                    taken, began = (float(times[side][block, visit, i]) for times in (self.seconds, self.began))
                    yield side, block, place * burst + i, taken, began

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        seconds, began = ({side: x.tolist() for side, x in times.items()} for times in (self.seconds, self.began))
        parts = {"visit": self.visit and asdict(self.visit), "shape": self.shape and asdict(self.shape)}
        told = {**parts, "skipped": self.skipped, "settings": dict(self.settings), "flags": list(self.flags)}
        times = {"seconds": seconds, "began": began, "order": [*map(list, self.order)], "rounds": list(self.rounds)}
        return {**times, **{name: value for name, value in told.items() if value}}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Timing:
        """Read the result of `as_dict`."""
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
    """Take one round: the fewest blocks, then more while there is time.

    Args:
        sides: one or more sides with their steps.
        blocks: fewest and most blocks.
        seconds: time after which no block begins.
        generator: source of each block's random order.
        visit: layout of a turn; None is one step.
        clock: rising seconds.
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
    """Run a step once to fault its pages in, then return its approximate seconds."""
    step()
    return max(timed(step, clock), 1e-9)


def runs_of(longest: float) -> int:
    """Return how many repetitions are timed as one, for steps of at most `longest` seconds."""
    return math.ceil(SHORTEST / longest)


def timed(step: Step, clock: Clock) -> float:
    """Run a step. Return the seconds that it reports as a float, or those that passed on the clock."""
    begin = clock()
    told = step()
    return told if isinstance(told, float) else clock() - begin


def _repeated(step: Step, runs: int) -> Step:
    if runs == 1:
        return step

    def several() -> float | None:
        told = [seconds for _ in repeat(None, runs) if isinstance(seconds := step(), float)]
        return sum(told) if len(told) == runs else None

    return several


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Python's garbage collector from interrupting a step, as `timeit` does.

    The first collection may take a tenth of a second; a nested use skips it.
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
