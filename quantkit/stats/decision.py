"""Decide all cells of a night at once: better, same, worse or inconclusive.

    worse           the effect, tested among all cells of the night, lies above its alarm and may exceed the margin
    better          the same with the sides exchanged
    same            the whole 95 % interval lies within the margin, on both sides
    inconclusive    none of these; `detectable` is the smallest effect that would have been called worse

A time is called neither worse nor better if the two sides differ by no more than one side differs from itself, the A/A
spread (`evidence.is_hidden`). "Tested among all cells" means Holm's adjusted p-value (`holm`) of at most `ALPHA` =
0.01. On a night without any change, the chance that any cell at all is called worse is at most 1 % even if every true
effect lies just at its alarm; if the true effects are zero and the alarms are not, it is far smaller. For times the
alarm is the margin: only a large difference is worth a call. For answers the alarm is zero, by McNemar's exact test,
and the margin decides whether the loss matters. "Same" is claimed cell by cell, at 2.5 % each way.

An alarm on times is measured again before it is raised (`confirm`): the models are loaded anew, only the cells with an
alarm run, and the new times alone decide. If the errors of both runs are independent, a false alarm is raised at most
once in 1/ALPHA² = 10,000 nights; if they are fully shared, once in 100 as before. The price is power: an effect that
one run finds with chance p is raised with chance p². `detectable` takes this into account.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.evidence import EACH_WAY, Evidence, Interval

Array = NDArray[Any]
Answer = Literal["better", "same", "worse", "inconclusive"]

ALPHA = 0.01
# chance a run, so that both runs of an alarm see the smallest detectable effect on 9 nights of 10
_POWER = 0.9**0.5


@dataclass(frozen=True)
class CellDecision:
    """Decision on one cell; an effect above zero is worse.

    Args:
        effect: slowdown (0.05: 5 % slower), share of items lost (0.01: one point), or nats.
        p_worse, p_better: p-values, adjusted for the other cells.
        detectable: smallest effect that would have been called worse on 9 nights of 10, both runs together.
        first: decision of the first run, if this one decides after a second.
    """

    answer: Answer
    effect: float
    ci95: Interval
    margin: float
    p_worse: float
    p_better: float
    detectable: float
    first: CellDecision | None = None


def decide(cells: Sequence[Evidence], *, alpha: float = ALPHA) -> list[CellDecision]:
    """Decide each cell of a night, in order. Raises MissingDependency: scipy.

    Args:
        cells: evidence of all comparisons of the night, with the baseline and with the last release.
        alpha: chance that any cell is called worse by mistake, and that any is called better.
    """
    worse = holm([cell.p_above(cell.alarm) for cell in cells])
    better = holm([cell.p_below(-cell.alarm) for cell in cells])
    return [
        _decision(cell, float(w), float(b), alpha, len(cells)) for cell, w, b in zip(cells, worse, better, strict=True)
    ]


def confirm(first: CellDecision, second: CellDecision) -> CellDecision:
    """Decide after a second run: its own decision on its own times, which alone never raises an alarm.

    An alarm needs both runs to be worse. If one is worse and the other better, the result is inconclusive.
    """
    torn = "worse" in (first.answer, second.answer) and second.answer not in (first.answer, "same")
    return replace(second, answer="inconclusive" if torn else second.answer, first=first)


def _decision(cell: Evidence, worse: float, better: float, alpha: float, family: int) -> CellDecision:
    low, high = cell.interval(1 - 2 * EACH_WAY)
    answer: Answer = "inconclusive"
    if worse <= alpha and high >= cell.margin and not cell.doubt:
        answer = "worse"
    elif better <= alpha and low <= -cell.margin and not cell.doubt:
        answer = "better"
    elif -cell.margin < low and high < cell.margin and cell.doubt != "ceiling":
        answer = "same"
    return CellDecision(
        answer=answer,
        effect=cell.told(cell.effect),
        ci95=(cell.told(low), cell.told(high)),
        margin=cell.told(cell.margin),
        p_worse=worse,
        p_better=better,
        detectable=cell.told(cell.detectable(alpha / family, _POWER)),
    )


def holm(p: Sequence[float] | Array) -> Array:
    """Adjust p-values [m], in order: `holm([0.01, 0.04, 0.03])` is [0.03, 0.06, 0.06].

    With p₁ ≤ … ≤ p_m they are max over j ≤ i of min(1, (m − j + 1) · p_j). If tests are called at an adjusted p ≤ α,
    the chance of even one false call among all m is at most α, however the tests depend on each other. Source: Holm, A
    Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 6 (1979).

    Raises ValueError: a p-value outside of 0 to 1.
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError("p-values [m] lie within 0 and 1")
    order = np.argsort(values, kind="stable")
    rising = np.maximum.accumulate(np.minimum(1.0, values[order] * np.arange(values.size, 0, -1)))
    adjusted = np.empty_like(rising)
    adjusted[order] = rising
    return adjusted
