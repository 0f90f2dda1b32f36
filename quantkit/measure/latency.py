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

from quantkit.errors import InputError
from quantkit.measure import ceilings as _ceilings
from quantkit.measure.ceilings import Ceiling
from quantkit.measure.rows import Baseline, Device, Operation, Row
from quantkit.measure.tax import Cost, Limits, Shape, ideal, win_flags, win_intervals, win_settings
from quantkit.plan import machine
from quantkit.stats.abba import Comparison, Interval, compare, interleave

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
class _Cell:
    kind: Literal["decode", "prefill"]
    batch: int
    size: int  # tokens in the cache, or of the prefill
    burst: int = 0
    taken: list[list[Array]] = field(default_factory=list)
    skipped: str = ""
    finished: bool = False
    found: Comparison | None = None

    @property
    def tokens(self) -> int:
        return 1 if self.kind == "decode" else self.size

    @property
    def context(self) -> int:
        return self.size if self.kind == "decode" else 0

    @property
    def words(self) -> str:
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
        rows += _rows(cell, subject, baseline, limits, common, dict(settings))
    for over, curve in _curves(cells):
        rows.append(_break_even(over, curve, subject, baseline, limits, common, dict(settings)))
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


def _cells(plan: Plan) -> list[_Cell]:
    """Small ones first: what they leave of their time goes to the large ones."""
    decode = [_Cell("decode", batch, context) for batch in plan.batches for context in plan.contexts]
    prefill = [_Cell("prefill", batch, tokens) for batch in plan.prefill_batches for tokens in plan.prefills]
    return [*decode, *prefill]


def _time(
    cells: Sequence[_Cell],
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
    cell: _Cell,
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


def _warm(cell: _Cell, entry: Entry, suffix: str, clock: Callable[[], float]) -> tuple[Step, float]:
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


def _rows(
    cell: _Cell, subject: Entry, baseline: Entry, limits: Limits, common: dict[str, Any], settings: dict[str, Any]
) -> list[Row]:
    """All rows of one cell."""
    decode, found, tokens = cell.kind == "decode", cell.found, cell.batch * cell.tokens
    name = "latency.decode_step" if decode else "latency.prefill"
    common = common | {
        "batch": cell.batch,
        "shape": {"new_tokens": cell.tokens, "context": cell.context},
        "resident_bytes": subject.resident_bytes,
    }
    if found is None:
        return [Row(name=name, value=None, unit="s", better="lower", flags=[cell.skipped], settings=settings, **common)]
    flags = [*found.flags, *(["few-steps"] if found.n < _FEWEST[cell.kind] else [])]
    common |= {"n": found.n, "aa_spread": found.aa_spread}
    time_s, hp_s = found.quantiles["p50"], found.baseline["p50"]
    # an interval of the ratio of medians is the same for times and for rates
    rate: dict[str, Any] = {"ratio": found.ratio, "ratio_ci95": found.ratio_ci95, "subject": baseline.subject}
    rows = [
        Row(
            name=name,
            value=time_s,
            unit="s",
            stat="median",
            better="lower",
            quantiles=found.quantiles,
            ci95=found.ci95,
            baseline=Baseline(value=hp_s, **rate),
            settings=settings
            | {
                "baseline_p90": found.baseline["p90"],
                "baseline_p99": found.baseline["p99"],
                "p99_ratio": found.p99_ratio,
                "p99_ratio_low": found.p99_ratio_ci95[0],
                "p99_ratio_high": found.p99_ratio_ci95[1],
            },
            flags=flags,
            **common,
        ),
        Row(
            name=f"throughput.{cell.kind}",
            value=tokens / time_s,
            unit="token/s",
            stat="median",
            better="higher",
            ci95=_inverse(found.ci95, tokens),
            baseline=Baseline(value=tokens / hp_s, **rate),
            settings=settings,
            flags=flags,
            **common,
        ),
    ]
    # where the weights may stay in the cache, neither bytes nor bound are those of the memory
    cache = machine.last_level_cache()
    cached = ["weights-near-cache"] if cache and subject.cost.weight_bytes < 3 * cache else []
    shape = (cell.batch, cell.tokens, cell.context)
    if decode:
        moved = subject.cost.bytes(*shape)
        share = {"share_of_ceiling": moved / time_s / limits.read} if limits.read else {}
        rows.append(
            Row(
                name="bandwidth.effective",
                value=moved / time_s,
                unit="B/s",
                stat="median",
                better="higher",
                ci95=_inverse(found.ci95, moved),
                # no ratio: a format that moves fewer bytes is not worse for it
                baseline=Baseline(subject=baseline.subject, value=baseline.cost.bytes(*shape) / hp_s),
                settings=settings | {"bytes": moved, **share},
                flags=[*flags, *cached],
                **common,
            )
        )
    bound, hp_bound = subject.cost.bound(*shape, limits), baseline.cost.bound(*shape, limits)
    op = Operation(
        M=tokens,
        format=subject.cost.format,
        bound_s=bound,
        hp_bound_s=hp_bound,
        hp_s=hp_s,
        shares=subject.cost.shares(*shape, limits),
        hp_shares=baseline.cost.shares(*shape, limits),
    )
    tax: dict[str, Any] = {"unit": "s", "stat": "median", "better": "lower", "op": op} | common
    if bound is None or hp_bound is None:
        rows.append(Row(name="tax.total", value=None, settings=settings, flags=["no-ceiling", *flags], **tax))
        return rows
    excess = time_s - bound
    signs = ["negative-tax"] if excess < 0 else []
    rows.append(
        Row(
            name="tax.total",
            value=excess,
            ci95=(found.ci95[0] - bound, found.ci95[1] - bound),
            # the baseline's own excess: its slack is no merit of the format
            baseline=Baseline(subject=baseline.subject, value=hp_s - hp_bound),
            settings=settings
            | {"share_of_baseline": excess / hp_s, "promised": hp_bound / bound, "delivered": found.ratio},
            flags=["sum-only", *signs, *flags, *cached],
            **tax,
        )
    )
    return rows


def _inverse(interval: Interval, work: float) -> Interval:
    return work / interval[1], work / interval[0]


def _curves(cells: Sequence[_Cell]) -> list[tuple[str, list[_Cell]]]:
    """Cells that differ in M alone, and whether M is their batch or their tokens.

    A model that decodes has its prefills compared over the length of the prompt; for one that does not, M is the batch.
    """
    decodes = any(cell.kind == "decode" for cell in cells)
    curves: dict[tuple[str, str, int], list[_Cell]] = {}
    for cell in cells:
        over = "tokens" if decodes and cell.kind == "prefill" else "batch"
        curves.setdefault((over, cell.kind, cell.batch if over == "tokens" else cell.size), []).append(cell)
    return [(over, curve) for (over, _, _), curve in curves.items()]


def _break_even(
    over: str,
    cells: Sequence[_Cell],
    subject: Entry,
    baseline: Entry,
    limits: Limits,
    common: dict[str, Any],
    settings: dict[str, Any],
) -> Row:
    """The `tax.break_even` row of one curve: its value is the M at which the first win interval ends.

    `settings` hold every interval (`win_1_from`, `win_1_to`, with `_low` and `_high`; null where the measured range
    cuts it off), the range itself and `ideal`, the M where S* = 1 (null: nowhere up to 65,536).
    """
    one = cells[0]
    shape = {"context": one.context} | ({"new_tokens": one.tokens} if over == "batch" else {})
    measured = sorted((cell for cell in cells if cell.found is not None), key=lambda cell: (cell.batch, cell.size))
    found = [cell.found for cell in measured if cell.found is not None]
    sizes = [cell.batch if over == "batch" else cell.tokens for cell in measured]
    no_gain_from, promise = ideal(subject.cost, baseline.cost, limits, lambda m: one.shape(over, m))
    settings = settings | {"over": over, "ideal": no_gain_from}
    row: dict[str, Any] = common | {
        "name": "tax.break_even",
        "unit": "1",
        "better": "higher",
        "shape": shape,
        "batch": None if over == "batch" else one.batch,
        "op": Operation(format=subject.cost.format),
    }
    flags = [promise] if promise else []
    if not found:
        return Row(value=None, settings=settings, flags=["not-measured", *flags], **row)
    wins = win_intervals(
        sizes, [f.ratio_ci95[0] for f in found], [f.ratio for f in found], np.stack([f.draws for f in found])
    )
    settings |= win_settings(wins, sizes)
    flags = [*win_flags(wins), *flags]
    first = wins[0] if wins else None
    return Row(
        value=first.end if first else None,
        ci95=first.end_ci95 if first else None,
        n=min(f.n for f in found),
        aa_spread=max(f.aa_spread for f in found),
        baseline=None,
        settings=settings,
        flags=flags,
        **row,
    )
