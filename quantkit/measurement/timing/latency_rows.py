"""What follows from the times of one shape, and of a curve of them: rows of latency, throughput, bandwidth and tax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import machine
from quantkit.measurement.operators.tax import Limits, ideal, win_flags, win_intervals, win_settings
from quantkit.measurement.rows import Baseline, Operation, Row
from quantkit.stats.abba import Interval

if TYPE_CHECKING:
    from quantkit.measurement.timing.latency import Cell, Entry


def rows_of(
    cell: Cell, subject: Entry, baseline: Entry, limits: Limits, common: dict[str, Any], settings: dict[str, Any]
) -> list[Row]:
    """All rows of one cell.

    Args:
        cell: timed, or skipped.
        subject, baseline: the two sides.
        limits: of the machine.
        common: fields that all rows have.
        settings: of the runtime.
    """
    decode, found, tokens = cell.kind == "decode", cell.found, cell.batch * cell.tokens
    name = "latency.decode_step" if decode else "latency.prefill"
    common = common | {
        "batch": cell.batch,
        "shape": {"new_tokens": cell.tokens, "context": cell.context},
        "resident_bytes": subject.resident_bytes,
    }
    if found is None:
        return [Row(name=name, value=None, unit="s", better="lower", flags=[cell.skipped], settings=settings, **common)]
    flags = [*found.flags, *(["few-steps"] if cell.few else [])]
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


def curves(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """Cells that differ in M alone, and whether M is their batch or their tokens.

    A model that decodes has its prefills compared over the length of the prompt; for one that does not, M is the batch.
    """
    decodes = any(cell.kind == "decode" for cell in cells)
    curves: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        over = "tokens" if decodes and cell.kind == "prefill" else "batch"
        curves.setdefault((over, cell.kind, cell.batch if over == "tokens" else cell.size), []).append(cell)
    return [(over, curve) for (over, _, _), curve in curves.items()]


def break_even(
    over: str,
    cells: Sequence[Cell],
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
