"""A bundle and its baseline timed side by side: latency, throughput, effective bandwidth, tax and win intervals.

Steps of the two are interleaved (`stats.abba`). Every cell (batch and context, or tokens of a prefill) is measured in
several rounds over the whole run, so that the drift of a machine over minutes is inside the intervals instead of
between the cells. Read bandwidth and compute rates are measured before and after; with them the tax (`measure.tax`) of
a runtime that is a black box: only the sum is known, not what of it is decoding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import Cost, Limits, Shape
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.latency_rows import break_even, curves, rows_of
from quantkit.stats.abba import Comparison, compare, interleave

Array = NDArray[Any]
Step = Callable[[], object]
Report = Callable[[float, str], None]

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)
PREFILLS = (64, 256, 1024)
_FEWEST = {"decode": 30, "prefill": 10}
# blocks of four visits a cell: never fewer, however slow; no more, however fast
_BLOCKS = (5, 240)
# a step shorter than this many seconds is timed twice a visit, after one that is not counted
SHORT = 0.05
# errors of a side that speak of one shape; the others go on
TOO_LARGE = {"out-of-memory", "prompt-too-long", "shape-unsupported"}


class Side(Protocol):
    """A loaded model, ready to run. Both raise InputError for a shape that does not fit: `out-of-memory` for this
    machine, `prompt-too-long` for this model, `shape-unsupported` for this engine."""

    def decode(self, batch: int, context: int) -> Step:
        """One prepared decode step with `context` tokens in the cache; each call repeats the same step."""
        ...

    def prefill(self, batch: int, tokens: int) -> Step:
        """One prepared prefill of `tokens` tokens a sequence; each call repeats it."""
        ...


@dataclass(frozen=True)
class Entry:
    """One of the two that are compared.

    Args:
        side: the loaded model.
        cost: what its steps must move and compute.
        subject: `content_sha256` of its bundle.
        resident_bytes: what it takes in memory, where known.
    """

    side: Side
    cost: Cost
    subject: str
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long it may take.

    Args:
        batches: of the decode steps.
        contexts: tokens in the cache of the decode steps; empty for a model that does not decode.
        prefills: tokens a sequence of the prefills.
        prefill_batches: of the prefills.
        seconds: for all cells together. A cell takes longer where its 30 steps a side (10 of a prefill) need it.
        cell_seconds: beyond this a cell makes do with fewer steps, five blocks at least, and is flagged `few-steps`.
        rounds: over all cells; the interval of a time rests on how much its rounds differ, from four rounds on.
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


@dataclass
class Cell:
    """One shape as it is timed; `size` is tokens in the cache, or of the prefill."""

    kind: Literal["decode", "prefill"]
    batch: int
    size: int
    burst: int = 0
    taken: list[list[Array]] = field(default_factory=list)
    skipped: str = ""
    finished: bool = False
    found: Comparison | None = None

    @property
    def few(self) -> bool:
        """Whether it has fewer steps than its kind should have."""
        return self.found is not None and self.found.n < _FEWEST[self.kind]

    @property
    def tokens(self) -> int:
        """New ones of each sequence."""
        return 1 if self.kind == "decode" else self.size

    @property
    def context(self) -> int:
        """Tokens in the cache."""
        return self.size if self.kind == "decode" else 0

    @property
    def words(self) -> str:
        """For progress."""
        return f"{self.kind}, batch {self.batch}, {'context' if self.kind == 'decode' else 'tokens'} {self.size}"

    def shape(self, over: str, m: float) -> Shape:
        """(batch, new tokens, context) with M in place of the batch or of the tokens."""
        return (m, self.tokens, self.context) if over == "batch" else (self.batch, m, self.context)


def measure(
    subject: Entry,
    baseline: Entry,
    *,
    runtime: str,
    settings: Mapping[str, str | bool | int | float | None],
    device: Mapping[str, str],
    versions: Mapping[str, str],
    plan: Plan | None = None,
    ceilings: Callable[[], Sequence[Ceiling]] | None = None,
    progress: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Time two loaded models, interleaved, and say what follows from it.

    Args:
        subject: what is judged.
        baseline: what it is set against, in the same runtime with the same threads.
        runtime: name of the runtime, for the rows.
        settings: of the runtime, for the rows.
        device: `plan.machine.device()`.
        versions: `plan.machine.versions()`.
        plan: what to measure and how long.
        ceilings: measures read bandwidth and compute rates, before and after the rest; None takes
            `machine_ceilings` with `settings["threads"]`.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.

    Returns:
        `ceiling.*`; for each cell `latency.*`, `throughput.*`, `tax.total` and, of decode steps, `bandwidth.effective`;
        `tax.break_even` for each context and for the prefills. A shape that does not fit has one row without value,
        flagged `out-of-memory` or `prompt-too-long`, with `-baseline` where it is that which does not fit.
        The rows of latency hold what has no field of its own in `settings`: `baseline_p90`, `baseline_p99`,
        `p99_ratio` with its interval `p99_ratio_low` and `p99_ratio_high`.

    Raises:
        InputError: whatever else a side raises.
        MissingDependency: scipy is not installed.
    """
    plan = plan or Plan()
    progress = progress or (lambda share, words: None)
    ceilings = ceilings or (lambda: machine_ceilings(int(settings.get("threads") or machine.cores())))
    progress(0.0, "ceilings")
    before = ceilings()
    cells = _cells(plan)
    _time(cells, (baseline, subject), plan, progress, clock)
    progress(1.0, "ceilings")
    measured = joined(before, ceilings())
    limits = Limits.of(measured)
    for cell in cells:
        if not cell.skipped:
            base, ours = (np.concatenate(times) for times in zip(*cell.taken, strict=True))
            rounds = [len(times[0]) for times in cell.taken]
            cell.found = compare(ours, base, rounds=rounds, seed=plan.seed)
    common = {
        "subject": subject.subject,
        "runtime": runtime,
        "device": Device.model_validate(dict(device)),
        "versions": dict(versions),
    }
    rows = [ceiling.row(device=dict(device), versions=dict(versions)) for ceiling in measured]
    for cell in cells:
        rows += rows_of(cell, subject, baseline, limits, common, dict(settings))
    for over, curve in curves(cells):
        rows.append(break_even(over, curve, subject, baseline, limits, common, dict(settings)))
    return rows


def machine_ceilings(threads: int, *, size: int = 1024, runs: int = 7) -> list[Ceiling]:
    """`ceiling.read` in so many threads, `ceiling.compute` in float32 and int8 on all cores: a second or two."""
    cache = machine.last_level_cache() or 64 * 2**20
    span = min(max(4 * cache, 256 * 2**20), machine.memory_limit() // 8)
    return [
        _ceilings.read(threads, span, runs),
        _ceilings.compute_fp32(size, runs),
        _ceilings.compute_int8(size, runs),
    ]


def _cells(plan: Plan) -> list[Cell]:
    """Small ones first: what they leave of their time goes to the large ones."""
    decode = [Cell("decode", batch, context) for batch in plan.batches for context in plan.contexts]
    prefill = [Cell("prefill", batch, tokens) for batch in plan.prefill_batches for tokens in plan.prefills]
    return [*decode, *prefill]


def _time(
    cells: Sequence[Cell],
    entries: tuple[Entry, Entry],
    plan: Plan,
    progress: Report,
    clock: Callable[[], float],
) -> None:
    """Fill in `taken`, or `skipped`, of every cell."""
    generator = np.random.default_rng(plan.seed)
    end = clock() + plan.seconds
    visits = [(turn, cell) for turn in range(plan.rounds) for cell in cells]
    for i, (turn, cell) in enumerate(visits):
        progress(i / len(visits), cell.words)
        if cell.skipped or cell.finished:
            continue
        left = sum(not (c.skipped or c.finished) for _, c in visits[i:])
        share = max(end - clock(), 0.0) / left
        try:
            _visit(cell, entries, share, plan.rounds - turn, plan, generator, clock)
        except _TooLarge as error:
            # a shape that has fitted once keeps what was measured of it
            cell.finished, cell.skipped = True, "" if cell.taken else str(error)


def _visit(
    cell: Cell,
    entries: tuple[Entry, Entry],
    share: float,
    left: int,
    plan: Plan,
    generator: np.random.Generator,
    clock: Callable[[], float],
) -> None:
    """Prepare both sides, warm them up and take one round's times, or those of all rounds that are left."""
    began = clock()
    (step, once), (other, again) = (
        _warm(cell, entry, suffix, clock) for suffix, entry in zip(("-baseline", ""), entries, strict=True)
    )
    prepared = clock() - began
    # what costs more to prepare than to time is prepared once
    rounds = left if prepared > share else 1
    cell.finished = rounds == left
    if not cell.burst:
        cell.burst = 2 if max(once, again) < SHORT else 1
    settle = cell.burst - 1
    block = max(2 * (cell.burst + settle) * (once + again), 1e-9)
    part = rounds / plan.rounds
    wanted = math.ceil(_FEWEST[cell.kind] / (2 * cell.burst) * part)
    floor, most = math.ceil(_BLOCKS[0] * part), math.ceil(_BLOCKS[1] * part)
    least = max(min(wanted, int(plan.cell_seconds * part / block)), floor)
    times = interleave(
        (step, other),
        blocks=(least, max(least, most)),
        seconds=share * rounds - prepared,
        generator=generator,
        burst=cell.burst,
        settle=settle,
        clock=clock,
    )
    cell.taken.append(times)


class _TooLarge(Exception):
    """The shape does not fit one of the two; the message is the row's flag."""


def _warm(cell: Cell, entry: Entry, suffix: str, clock: Callable[[], float]) -> tuple[Step, float]:
    """(a prepared step, about the seconds that it takes) after it has run twice: the first faults the pages in."""
    make = entry.side.decode if cell.kind == "decode" else entry.side.prefill
    try:
        step = make(cell.batch, cell.size)
        seconds = []
        for _ in range(2):
            began = clock()
            step()
            seconds.append(clock() - began)
        return step, min(seconds)
    except InputError as error:
        if error.code not in TOO_LARGE:
            raise
        raise _TooLarge(f"{error.code}{suffix}") from None


def joined(before: Sequence[Ceiling], after: Sequence[Ceiling]) -> list[Ceiling]:
    """The samples of both: each ceiling's halves are then the start and the end of the run."""
    return [
        replace(first, samples=first.samples + second.samples)
        if first.settings == second.settings and first.samples and second.samples
        else max(first, second, key=lambda ceiling: ceiling.value or 0.0)
        for first, second in zip(before, after, strict=True)
    ]
