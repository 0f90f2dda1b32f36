"""Time bundles side by side and turn the times into rows; single products use the same rows.

Every shape (batch and context, or tokens of a prefill) is measured in several rounds spread over the run. A machine's
drift over minutes is then part of the intervals and not a difference between shapes. Read bandwidth and compute rates
are measured before and after. They give the tax (`operators.tax`) of a runtime that is a black box: the sum is known,
but not the share of it that decoding the weights takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling, joined
from quantkit.measurement.operators.tax import Array, Limits, StepCost, ideal, win_flags, win_intervals, win_settings
from quantkit.measurement.rows import Baseline, Device, Operation, Row
from quantkit.measurement.timing.schedule import (
    BASELINE,
    SUBJECT,
    TOO_LARGE,
    Clock,
    Settings,
    Shape,
    Step,
    Timeable,
    Timing,
    TimingPlan,
    Visit,
    interleave,
    warm,
)
from quantkit.runtimes.child import Report
from quantkit.stats.abba import Comparison, Interval
from quantkit.stats.evidence import SpeedUp

Fields = Mapping[str, Any]
ACROSS = "across"
# steps a side; a row with fewer is flagged `few-steps`
FEWEST = {"decode": 30, "prefill": 10}
# fewest and most blocks of four visits a shape
_BLOCKS = (5, 240)


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Args:
        cost: bytes and operations of its steps.
        subject: `content_sha256` of its bundle.
        resident_bytes: memory that it takes, where known.
        runtime: its runtime, if not that of the run.
    """

    cost: StepCost
    subject: str
    resident_bytes: int | None = None
    runtime: str = ""


@dataclass(frozen=True)
class TimedSide(Side):
    """A side with its loaded model."""

    model: Timeable = field(kw_only=True)


@dataclass(frozen=True)
class LoadedSides:
    """Both sides of a comparison, loaded.

    Args:
        settings: settings of their rows.
        note: sentence about how they run that a reader has to know, or "".
        linears: batch -> seconds of all linears of a step, each timed alone (None if one was not); None for a side
            without such times.
    """

    subject: TimedSide
    baseline: TimedSide
    settings: Settings
    note: str = ""
    linears: Callable[[int], float | None] | None = None


def measure(
    subject: TimedSide,
    baseline: TimedSide,
    *,
    runtime: str,
    settings: Settings,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    plan: TimingPlan | None = None,
    across: TimedSide | None = None,
    ceilings: Callable[[], Sequence[Ceiling]] | None = None,
    progress: Report | None = None,
    clock: Clock = time.perf_counter,
) -> list[Row]:
    """Time two loaded models in turns and return the rows.

    Args:
        baseline: model to compare with, in the same runtime with the same threads.
        device: `machine.device()`.
        versions: `machine.versions()`.
        across: third model, in another runtime, that takes turns with the two.
        ceilings: function that measures read bandwidth and compute rates, called before and after; None takes
            `ceilings.measured` with `settings["threads"]`.
        progress: function called with the share done and with words for the current shape.
        clock: rising seconds.

    Returns:
        `ceiling.*`; for each cell `latency.*`, `throughput.*`, `tax.total` and, for decode steps,
        `bandwidth.effective`;
        `tax.break_even` for each context and for the prefills. A shape that does not fit has one row without a value,
        flagged `out-of-memory` or `prompt-too-long`, with `-baseline` if the baseline does not fit. With `across` also
        `across.*`: the subject's steps against those of the third model, which `settings` name as `baseline_runtime`
            and
        `baseline_format`.

    Raises InputError: any other error of a side; MissingDependency: scipy.
    """
    plan = plan or TimingPlan()
    progress = progress or (lambda share, words: None)
    ceilings = ceilings or (lambda: _ceilings.measured(int(settings.get("threads") or machine.cores())))
    progress(0.0, "ceilings")
    before = ceilings()
    sides = {BASELINE: baseline, SUBJECT: subject, **({ACROSS: across} if across else {})}
    timings = take(plan.shapes(), sides, plan, progress, clock)
    progress(1.0, "ceilings")
    how: dict[str, Any] = {"runtime": runtime, "settings": settings, "device": device, "versions": versions}
    return judged(timings, sides, joined(before, ceilings()), cache=machine.last_level_cache(), seed=plan.seed, **how)


def judged(
    timings: Sequence[Timing],
    sides: Mapping[str, Side],
    ceilings: Sequence[Ceiling],
    *,
    runtime: str,
    settings: Settings,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int | None,
    seed: int = 0,
) -> list[Row]:
    """Turn times into rows, wherever they were taken; see `measure`.

    Args:
        sides: `SUBJECT`, `BASELINE`, and `ACROSS` if there is one.
        ceilings: ceilings of the device.
        cache: bytes of its last-level cache.
        seed: seed of the resamples.
    """
    subject = sides[SUBJECT]
    common = {
        "subject": subject.subject,
        "runtime": runtime,
        "device": Device.model_validate(dict(device)),
        "versions": dict(versions),
    }
    make = _StepRows(subject, sides[BASELINE], Limits.of(ceilings, cache), common, settings)
    rows = [ceiling.row(device=dict(device), versions=dict(versions)) for ceiling in ceilings]
    timed = []
    for timing in timings:
        assert timing.shape is not None
        times = timing.compared(SUBJECT, BASELINE, seed)
        rows += make.of(timing, timing.shape, times)
        timed.append((timing.shape, times))
        if ACROSS in sides and (other := timing.compared(SUBJECT, ACROSS, seed)) is not None:
            rows.append(make.across(timing.shape, other, sides[ACROSS]))
    return rows + make.curves(timed)


def take(
    shapes: Sequence[Shape],
    sides: Mapping[str, TimedSide],
    plan: TimingPlan,
    progress: Report,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Time every shape, or learn why it cannot run. Uses the plan's seconds, rounds and seed."""
    cells = [_Cell(shape, sides, plan, clock) for shape in shapes]
    generator = np.random.default_rng(plan.seed)
    end = clock() + plan.seconds
    turns = [(turn, cell) for turn in range(plan.rounds) for cell in cells]
    for i, (turn, cell) in enumerate(turns):
        progress(i / len(turns), cell.shape.words)
        if not cell.done:
            share = max(end - clock(), 0.0) / sum(not other.done for _, other in turns[i:])
            cell.round(share, plan.rounds - turn, generator)
    return [cell.timing for cell in cells]


@dataclass
class _Cell:
    shape: Shape
    sides: Mapping[str, TimedSide]
    plan: TimingPlan
    clock: Clock
    parts: list[Timing] = field(default_factory=list)
    skipped: str = ""
    done: bool = False
    seconds: list[float] = field(default_factory=list)

    @property
    def timing(self) -> Timing:
        # a shape that fitted once keeps its times
        return Timing.joined(self.parts) if self.parts else Timing(shape=self.shape, skipped=self.skipped)

    def round(self, share: float, left: int, generator: np.random.Generator) -> None:
        """Prepare and warm up all sides, then take the times of one round, or of all remaining rounds."""
        began = self.clock()
        steps: dict[str, Step] = {}
        for name, side in self.sides.items():
            try:
                steps[name] = self.shape.step(side.model)
                if self.parts:
                    steps[name]()  # faults the pages in
                else:
                    self.seconds.append(warm(steps[name], self.clock))
            except InputError as error:
                if error.code not in TOO_LARGE:
                    raise
                self.done, self.skipped = True, error.code if name == SUBJECT else f"{error.code}-{name}"
                return
        prepared = self.clock() - began
        # a shape that costs more to prepare than to time is prepared once
        rounds = left if prepared > share else 1
        self.done = rounds == left
        visit = self.parts[0].visit if self.parts else None
        visit = visit or Visit.fitting(max(self.seconds))
        part = rounds / self.plan.rounds
        wanted = math.ceil(FEWEST[self.shape.kind] / (2 * visit.burst) * part)
        floor, most = (math.ceil(blocks * part) for blocks in _BLOCKS)
        least = max(min(wanted, int(self.plan.cell_seconds * part / visit.block(self.seconds))), floor)
        blocks, left_over = (least, max(least, most)), share * rounds - prepared
        how: dict[str, Any] = {"generator": generator, "visit": visit, "clock": self.clock}
        self.parts.append(replace(interleave(steps, blocks=blocks, seconds=left_over, **how), shape=self.shape))


# --- rows ------------------------------------------------------------------------------------------------------------


def latency_row(
    name: str, times: Comparison, against: str | None, *, settings: Fields, flags: Sequence[str], common: Fields
) -> Row:
    """Return the row of the median of a subject's steps.

    Args:
        against: name of the baseline; None if that is the subject itself.
        settings: settings of the row. Figures without a field of their own are added: `baseline_p90`, `baseline_p99`,
            `p99_ratio` and its interval `p99_ratio_low`, `p99_ratio_high`.
    """
    beside: dict[str, Any] = {}
    if against is not None:
        value = times.baseline["p50"]
        beside["baseline"] = Baseline(subject=against, value=value, ratio=times.ratio, ratio_ci95=times.ratio_ci95)
        low, high = times.p99_ratio_ci95
        told = {"p99_ratio": times.p99_ratio, "p99_ratio_low": low, "p99_ratio_high": high}
        settings = {**settings, **{f"baseline_{q}": times.baseline[q] for q in ("p90", "p99")}, **told}
    beside |= {"quantiles": times.quantiles, "ci95": times.ci95, "settings": dict(settings), "flags": list(flags)}
    return Row.seconds(name, times.quantiles["p50"], **beside, **common)


def tax_row(
    seconds: float,
    ci95: Interval,
    ratio: float,
    against: str,
    *,
    op: Operation,
    settings: Fields,
    flags: Sequence[str] = (),
    common: Fields,
) -> Row:
    """Return `tax.total`, the time beyond the bound; if the bound is unknown, a row without a value, flagged
    `no-ceiling`.

    Args:
        ratio: speed-up over the baseline.
        op: operation with its bounds and the baseline's seconds.
    """
    bound, hp_bound, hp_s = op.bound_s, op.hp_bound_s, op.hp_s or seconds
    if bound is None or hp_bound is None:
        return Row.seconds("tax.total", None, op=op, settings=dict(settings), flags=["no-ceiling", *flags], **common)
    excess = seconds - bound
    told = {"share_of_baseline": excess / hp_s, "promised": hp_bound / bound, "delivered": ratio}
    signs = [*(["sum-only"] if op.raw_s is None else []), *(["negative-tax"] if excess < 0 else [])]
    return Row.seconds(
        "tax.total",
        excess,
        op=op,
        ci95=(ci95[0] - bound, ci95[1] - bound),
        # the baseline has an excess too; the format gets no credit for it
        baseline=Baseline(subject=against, value=hp_s - hp_bound),
        settings={**settings, **told},
        flags=[*signs, *flags],
        **common,
    )


@dataclass(frozen=True, eq=False)
class Point:
    """Speed-up at one M of a curve.

    Args:
        size: M.
        speed: speed-up of the subject.
        draws: `[resamples]` speed-up in each resample.
        n: steps behind it.
    """

    size: int
    speed: SpeedUp
    draws: Array
    n: int

    @property
    def low(self) -> float:
        """Lower end of the credible interval; at most 1 for a speed-up above the ceiling."""
        low = self.speed.interval[0]
        return min(low, 1.0) if self.speed.doubt == "ceiling" else low


def break_even_row(points: Sequence[Point], *, settings: Fields, flags: Sequence[str], common: Fields) -> Row:
    """Return `tax.break_even`, the M at which the first winning interval ends; flagged `not-measured` without points.

    Args:
        points: points in order of rising M.
        settings: settings of the row. Every interval is added (`win_1_from`, `win_1_to`, with `_low` and `_high`; null
            at an end of the measured range), and the range itself.
    """
    row: dict[str, Any] = {"name": "tax.break_even", "unit": "1", "better": "higher", **common}
    if not points:
        return Row(value=None, settings=dict(settings), flags=["not-measured", *flags], **row)
    sizes = [point.size for point in points]
    lows, ratios = [point.low for point in points], [point.speed.ratio for point in points]
    wins = win_intervals(sizes, lows, ratios, np.stack([point.draws for point in points]))
    return Row(
        value=wins[0].end if wins else None,
        ci95=wins[0].end_ci95 if wins else None,
        n=min(point.n for point in points),
        aa_spread=max(point.speed.spread for point in points),
        settings={**settings, **win_settings(wins, sizes)},
        flags=[*win_flags(wins), *flags],
        **row,
    )


def explained(rows: Sequence[Row], linears: Callable[[int], float | None]) -> list[Row]:
    """Add to rows of decode steps the sum of their linears and the time that the sum leaves unexplained.

    Args:
        linears: see `LoadedSides`.
    """
    result = []
    for row in rows:
        told: dict[str, Any] = {}
        if row.name == "latency.decode_step" and row.value is not None and row.batch is not None:
            known = linears(row.batch)
            told = {"linears_s": known, "residual_s": None if known is None else row.value - known}
        result.append(row.model_copy(update={"settings": {**row.settings, **told}}))
    return result


@dataclass(frozen=True)
class _StepRows:
    """Rows of the steps of two models and of their curves; `common` and `settings` apply to every row."""

    subject: Side
    baseline: Side
    limits: Limits
    common: Fields
    settings: Fields

    def of(self, timing: Timing, shape: Shape, times: Comparison | None) -> list[Row]:
        """Return all rows of one shape: latency, throughput, bandwidth of a decode step, tax."""
        subject, baseline, limits = self.subject, self.baseline, self.limits
        settings = {**self.settings, **timing.settings}
        common = {**self._at(shape), "resident_bytes": subject.resident_bytes}
        if times is None:
            flags = [timing.skipped, *timing.flags]
            return [Row.seconds(shape.name, None, stat=None, flags=flags, settings=settings, **common)]
        few = ["few-steps"] if times.n < FEWEST[shape.kind] else []
        flags = [*times.flags, *few, *timing.flags]
        common |= {"n": times.n, "aa_spread": times.aa_spread}
        sizes = shape.batch, shape.tokens, shape.context
        tokens, time_s, hp_s = shape.batch * shape.tokens, times.quantiles["p50"], times.baseline["p50"]

        def rate(name: str, work: float, unit: str, against: Baseline, told: Fields, flags: list[str]) -> Row:
            ends = work / times.ci95[1], work / times.ci95[0]
            fields: dict[str, Any] = {"stat": "median", "better": "higher", "ci95": ends, "settings": dict(told)}
            return Row(name=name, value=work / time_s, unit=unit, baseline=against, flags=flags, **fields, **common)

        timed = {**settings, **self._promise(shape)}
        rows = [latency_row(shape.name, times, baseline.subject, settings=timed, flags=flags, common=common)]
        # the ratio of medians has the same interval for times and for rates
        ratios: dict[str, Any] = {"ratio": times.ratio, "ratio_ci95": times.ratio_ci95}
        against = Baseline(subject=baseline.subject, value=tokens / hp_s, **ratios)
        rows.append(rate(f"throughput.{shape.kind}", tokens, "token/s", against, settings, flags))
        cached = ["weights-near-cache"] if self._near_cache else []
        if shape.kind == "decode":
            moved = subject.cost.bytes(*sizes)
            share = {"share_of_ceiling": moved / time_s / limits.read} if limits.read else {}
            # no ratio: moving fewer bytes is no fault of a format
            against = Baseline(subject=baseline.subject, value=baseline.cost.bytes(*sizes) / hp_s)
            told = {**settings, "bytes": moved, **share}
            rows.append(rate("bandwidth.effective", moved, "B/s", against, told, [*flags, *cached]))
        op = Operation(
            M=tokens,
            format=subject.cost.format,
            bound_s=subject.cost.bound(*sizes, limits),
            hp_bound_s=baseline.cost.bound(*sizes, limits),
            hp_s=hp_s,
            shares=subject.cost.shares(*sizes, limits),
            hp_shares=baseline.cost.shares(*sizes, limits),
        )
        flags = flags if op.bound_s is None or op.hp_bound_s is None else [*flags, *cached]
        ratio = times.ci95, times.ratio, baseline.subject
        return [*rows, tax_row(time_s, *ratio, op=op, settings=settings, flags=flags, common=common)]

    def across(self, shape: Shape, times: Comparison, other: Side) -> Row:
        there = {"baseline_runtime": other.runtime, "baseline_format": other.cost.format}
        common = {**self._at(shape), "n": times.n, "aa_spread": times.aa_spread}
        name, settings = shape.name.replace("latency.", "across."), {**self.settings, **there}
        return latency_row(name, times, other.subject, settings=settings, flags=times.flags, common=common)

    def curves(self, timed: Sequence[tuple[Shape, Comparison | None]]) -> list[Row]:
        """Return a `tax.break_even` row for each group of shapes that differ only in M.

        Prefills of a decoder are compared over the length of the prompt. For any other model, M is the batch.
        """
        decodes = any(shape.kind == "decode" for shape, _ in timed)
        groups: dict[tuple[bool, str, int], list[tuple[Shape, Comparison | None]]] = {}
        for shape, times in timed:
            by_batch = not decodes or shape.kind == "decode"
            fixed = shape.size if by_batch else shape.batch
            groups.setdefault((by_batch, shape.kind, fixed), []).append((shape, times))
        return [self._break_even(by_batch, curve) for (by_batch, _, _), curve in groups.items()]

    def _break_even(self, by_batch: bool, curve: Sequence[tuple[Shape, Comparison | None]]) -> Row:
        """Return one curve's row; its `settings` hold `ideal`, the M where S* = 1 (null: none up to 65,536)."""
        one, cost = curve[0][0], self.subject.cost
        ends, reason = ideal(
            cost,
            self.baseline.cost,
            self.limits,
            lambda m: (m, one.tokens, one.context) if by_batch else (one.batch, m, one.context),
        )
        points = []
        for shape, times in curve:
            if times is not None:
                most = self._promise(shape).get("promised_most", math.inf)
                speed = SpeedUp(times.ratio, times.ratio_ci95, times.aa_spread, most)
                points.append(Point(shape.batch if by_batch else shape.tokens, speed, times.draws, times.n))
        fixed = {"context": one.context} | ({"new_tokens": one.tokens} if by_batch else {})
        batch, op = None if by_batch else one.batch, Operation(format=cost.format)
        return break_even_row(
            sorted(points, key=lambda point: point.size),
            settings={**self.settings, "over": "batch" if by_batch else "tokens", "ideal": ends},
            flags=[reason] if reason else [],
            common={**self.common, "shape": fixed, "batch": batch, "op": op},
        )

    def _at(self, shape: Shape) -> dict[str, Any]:
        return {**self.common, "batch": shape.batch, "shape": shape.sizes}

    @property
    def _near_cache(self) -> bool:
        """Tell whether the weights may stay in the cache: then the memory sets neither bytes nor bound."""
        cache = self.limits.cache
        return cache is not None and self.subject.cost.weight_bytes < 3 * cache

    def _promise(self, shape: Shape) -> dict[str, float]:
        if self._near_cache:
            return {}
        sizes = (shape.batch, shape.tokens, shape.context)
        return self.limits.promise(*(side.cost.bound(*sizes, self.limits) for side in (self.subject, self.baseline)))
