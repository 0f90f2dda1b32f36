"""Rows that follow from interleaved times, of whole steps and of single products alike: latency, tax, break-even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.measurement.operators.tax import Array, win_flags, win_intervals, win_settings
from quantkit.measurement.rows import Baseline, Operation, Row
from quantkit.stats.abba import Comparison, Interval
from quantkit.stats.deciding.speedup import SpeedUp

Fields = Mapping[str, Any]


def latency_row(
    name: str, found: Comparison, against: str | None, *, settings: Fields, flags: Sequence[str], common: Fields
) -> Row:
    """The median of a subject's steps.

    Args:
        against: the baseline; None where that is the subject itself.
        settings: of the row; what has no field of its own is added: `baseline_p90`, `baseline_p99`, `p99_ratio` with
            its interval `p99_ratio_low` and `p99_ratio_high`.
    """
    beside: dict[str, Any] = {}
    if against is not None:
        value = found.baseline["p50"]
        beside["baseline"] = Baseline(subject=against, value=value, ratio=found.ratio, ratio_ci95=found.ratio_ci95)
        low, high = found.p99_ratio_ci95
        settings = {
            **settings,
            **{f"baseline_{q}": found.baseline[q] for q in ("p90", "p99")},
            **{"p99_ratio": found.p99_ratio, "p99_ratio_low": low, "p99_ratio_high": high},
        }
    return Row(
        name=name,
        value=found.quantiles["p50"],
        unit="s",
        stat="median",
        better="lower",
        quantiles=found.quantiles,
        ci95=found.ci95,
        settings=dict(settings),
        flags=list(flags),
        **beside,
        **common,
    )


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
    """`tax.total`: what a step takes beyond its bound; without value, flagged `no-ceiling`, where that is not known.

    Args:
        ratio: how many times as fast as the baseline it is.
        op: with the bounds, and the baseline's seconds.
    """
    row: dict[str, Any] = {"name": "tax.total", "unit": "s", "stat": "median", "better": "lower", "op": op, **common}
    bound, hp_bound, hp_s = op.bound_s, op.hp_bound_s, op.hp_s or seconds
    if bound is None or hp_bound is None:
        return Row(value=None, settings=dict(settings), flags=["no-ceiling", *flags], **row)
    excess = seconds - bound
    told = {"share_of_baseline": excess / hp_s, "promised": hp_bound / bound, "delivered": ratio}
    signs = [*(["sum-only"] if op.raw_s is None else []), *(["negative-tax"] if excess < 0 else [])]
    return Row(
        value=excess,
        ci95=(ci95[0] - bound, ci95[1] - bound),
        # the baseline's own excess: its slack is no merit of the format
        baseline=Baseline(subject=against, value=hp_s - hp_bound),
        settings={**settings, **told},
        flags=[*signs, *flags],
        **row,
    )


@dataclass(frozen=True, eq=False)
class Point:
    """A ratio at one M, of a curve.

    Args:
        size: M.
        speed: how many times as fast the subject is.
        draws: [resamples] of that.
        n: steps that it rests on.
    """

    size: int
    speed: SpeedUp
    draws: Array
    n: int

    @property
    def low(self) -> float:
        """The lower end of what is believed; of what is not believed, at most 1."""
        low = self.speed.interval[0]
        return min(low, 1.0) if self.speed.doubt == "ceiling" else low


def break_even_row(points: Sequence[Point], *, settings: Fields, flags: Sequence[str], common: Fields) -> Row:
    """`tax.break_even`: the M at which the first win interval ends; flagged `not-measured` of no points.

    Args:
        points: M rising.
        settings: of the row; every interval is added (`win_1_from`, `win_1_to`, with `_low` and `_high`; null where
            the measured range cuts it off), and the range itself.
    """
    row: dict[str, Any] = {"name": "tax.break_even", "unit": "1", "better": "higher", **common}
    if not points:
        return Row(value=None, settings=dict(settings), flags=["not-measured", *flags], **row)
    sizes = [each.size for each in points]
    lows, ratios = [each.low for each in points], [each.speed.ratio for each in points]
    wins = win_intervals(sizes, lows, ratios, np.stack([each.draws for each in points]))
    first = wins[0] if wins else None
    return Row(
        value=first.end if first else None,
        ci95=first.end_ci95 if first else None,
        n=min(each.n for each in points),
        aa_spread=max(each.speed.spread for each in points),
        settings={**settings, **win_settings(wins, sizes)},
        flags=[*win_flags(wins), *flags],
        **row,
    )
