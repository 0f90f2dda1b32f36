"""What follows from the times of one shape, and of a curve of them: rows of latency, throughput, bandwidth and tax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.measurement.operators.tax import Limits, ideal
from quantkit.measurement.rows import Baseline, Operation, Row
from quantkit.measurement.timed_rows import Point, break_even_row, latency_row, tax_row
from quantkit.stats.abba import Comparison, Interval
from quantkit.stats.deciding.speedup import SpeedUp

if TYPE_CHECKING:
    from quantkit.measurement.timing.latency import ShapeTiming, Side
    from quantkit.measurement.timing.shapes import Shape


def explained(rows: Sequence[Row], linears: Callable[[int], float | None]) -> list[Row]:
    """Rows, those of decode steps with the sum of their linears and what that leaves unexplained.

    Args:
        linears: see `latency.LoadedSides`.
    """
    found = []
    for row in rows:
        if row.name == "latency.decode_step" and row.value is not None and row.batch is not None:
            known = linears(row.batch)
            rest = None if known is None else row.value - known
            row = row.model_copy(update={"settings": {**row.settings, "linears_s": known, "residual_s": rest}})  # noqa: PLW2901
        found.append(row)
    return found


def rows_of(
    timing: ShapeTiming,
    subject: Side,
    baseline: Side,
    limits: Limits,
    common: dict[str, Any],
    settings: dict[str, Any],
) -> list[Row]:
    """All rows of one shape."""
    shape, found = timing.shape, timing.found
    common = common | {"batch": shape.batch, "shape": shape.sizes, "resident_bytes": subject.resident_bytes}
    if found is None:
        flags = [timing.skipped, *timing.flags]
        return [Row(name=shape.name, value=None, unit="s", better="lower", flags=flags, settings=settings, **common)]
    flags = [*found.flags, *(["few-steps"] if timing.few else []), *timing.flags]
    common |= {"n": found.n, "aa_spread": found.aa_spread}
    tokens, time_s, hp_s = shape.batch * shape.tokens, found.quantiles["p50"], found.baseline["p50"]
    # an interval of the ratio of medians is the same for times and for rates
    ratio: dict[str, Any] = {"ratio": found.ratio, "ratio_ci95": found.ratio_ci95}
    sizes = (shape.batch, shape.tokens, shape.context)
    timed = {**settings, **_promise(shape, subject, baseline, limits)}
    rows = [
        latency_row(shape.name, found, baseline.subject, settings=timed, flags=flags, common=common),
        Row(
            name=f"throughput.{shape.kind}",
            value=tokens / time_s,
            unit="token/s",
            stat="median",
            better="higher",
            ci95=_inverse(found.ci95, tokens),
            baseline=Baseline(subject=baseline.subject, value=tokens / hp_s, **ratio),
            settings=settings,
            flags=flags,
            **common,
        ),
    ]
    cached = ["weights-near-cache"] if _near_cache(subject, limits) else []
    if shape.kind == "decode":
        moved = subject.cost.bytes(*sizes)
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
                baseline=Baseline(subject=baseline.subject, value=baseline.cost.bytes(*sizes) / hp_s),
                settings=settings | {"bytes": moved, **share},
                flags=[*flags, *cached],
                **common,
            )
        )
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
    ratio_s = found.ci95, found.ratio, baseline.subject
    rows.append(tax_row(time_s, *ratio_s, op=op, settings=settings, flags=flags, common=common))
    return rows


def across_row(shape: Shape, found: Comparison, across: Side, common: dict[str, Any], settings: dict[str, Any]) -> Row:
    """The subject's step against the same step of another runtime, timed in turns."""
    there = {"baseline_runtime": across.runtime, "baseline_format": across.cost.format}
    common = common | {"batch": shape.batch, "shape": shape.sizes, "n": found.n, "aa_spread": found.aa_spread}
    name = shape.name.replace("latency.", "across.")
    return latency_row(name, found, across.subject, settings=settings | there, flags=found.flags, common=common)


def _near_cache(side: Side, limits: Limits) -> bool:
    """Whether the weights may stay in the cache: then neither bytes nor bound are those of the memory."""
    return limits.cache is not None and side.cost.weight_bytes < 3 * limits.cache


def _promise(shape: Shape, subject: Side, baseline: Side, limits: Limits) -> dict[str, float]:
    """What the roofline promises of a shape; nothing where the weights may stay in the cache."""
    if _near_cache(subject, limits):
        return {}
    sizes = (shape.batch, shape.tokens, shape.context)
    return limits.promise(*(side.cost.bound(*sizes, limits) for side in (subject, baseline)))


def _inverse(interval: Interval, work: float) -> Interval:
    return work / interval[1], work / interval[0]


def curves(timings: Sequence[ShapeTiming]) -> list[tuple[str, list[ShapeTiming]]]:
    """Shapes that differ in M alone, and whether M is their batch or their tokens.

    A model that decodes has its prefills compared over the length of the prompt; for one that does not, M is the batch.
    """
    decodes = any(timing.shape.kind == "decode" for timing in timings)
    found: dict[tuple[str, str, int], list[ShapeTiming]] = {}
    for timing in timings:
        shape = timing.shape
        over = "tokens" if decodes and shape.kind == "prefill" else "batch"
        found.setdefault((over, shape.kind, shape.batch if over == "tokens" else shape.size), []).append(timing)
    return [(over, curve) for (over, _, _), curve in found.items()]


def break_even(
    over: str,
    curve: Sequence[ShapeTiming],
    subject: Side,
    baseline: Side,
    limits: Limits,
    common: dict[str, Any],
    settings: dict[str, Any],
) -> Row:
    """The `tax.break_even` row of one curve; `settings` hold `ideal`, the M where S* = 1 (null: none up to 65,536)."""
    one = curve[0].shape
    ends, promise = ideal(
        subject.cost,
        baseline.cost,
        limits,
        lambda m: (m, one.tokens, one.context) if over == "batch" else (one.batch, m, one.context),
    )
    points = [
        Point(
            timing.shape.batch if over == "batch" else timing.shape.tokens,
            SpeedUp(
                *(found.ratio, found.ratio_ci95, found.aa_spread),
                _promise(timing.shape, subject, baseline, limits).get("promised_most", math.inf),
            ),
            *(found.draws, found.n),
        )
        for timing in curve
        if (found := timing.found) is not None
    ]
    return break_even_row(
        sorted(points, key=lambda point: point.size),
        settings=settings | {"over": over, "ideal": ends},
        flags=[promise] if promise else [],
        common={
            **common,
            "shape": {"context": one.context} | ({"new_tokens": one.tokens} if over == "batch" else {}),
            "batch": None if over == "batch" else one.batch,
            "op": Operation(format=subject.cost.format),
        },
    )
