"""Better, same, worse or inconclusive: the decision on every cell of a night, all at once.

    worse           the effect is shown, among all cells of the night, to lie above its alarm, and may exceed the margin
    better          the same with the sides exchanged
    same            the whole 95 % interval lies within the margin, on both sides
    inconclusive    none of these; `detectable` is the smallest effect that would have been called worse

Neither worse nor better is said of a time whose sides differ by no more than one side does from itself, the A/A spread
(`evidence.is_hidden`). *Shown among all cells* means Holm's adjusted p-value (`holm`) of at most `ALPHA` = 0.01: on a
night on which nothing changed, the chance that any cell at all is called worse is at most one in a hundred, if every
cell lay just at its alarm; where the true effects are zero and the alarm is not, it is far smaller. Of times the alarm
is the margin: a difference is worth a call only if it is large. Of answers the alarm is zero, by McNemar's exact test,
and the margin decides whether what was lost matters. That a thing is the same is claimed cell by cell, at 2.5 % each
way.

An alarm on times is run again before it is raised (`confirm`): the models loaded anew, the cells that alarmed and no
others, decided on the new times alone. If what misled the first run has nothing to do with the second, a false alarm is
raised at most once in ALPHA² = 10,000 nights; if they have all in common, once in 100 as before. The price is power: an
effect that one run finds with chance p is raised with chance p², which `detectable` reckons with.
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
# both runs of an alarm see the smallest detectable effect on 9 nights of 10
_POWER = 0.9**0.5


@dataclass(frozen=True)
class CellDecision:
    """What is known of one cell; an effect above zero is for the worse.

    Args:
        effect: a slowdown (0.05: 5 % slower), a share of items lost (0.01: one point), nats.
        p_worse, p_better: adjusted for the other cells.
        detectable: the smallest effect that would have been called worse on 9 nights of 10, both runs together.
        first: the decision that this one, on a second run, confirms or takes back.
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
    """Decide each cell of a night, in the order given. Raises MissingDependency: scipy.

    Args:
        cells: evidence of all comparisons of the night, of whatever kind: with the baseline, and with the last release.
        alpha: chance that any one cell is called worse by mistake, and that any one is called better.
    """
    worse = holm([cell.p_above(cell.alarm) for cell in cells])
    better = holm([cell.p_below(-cell.alarm) for cell in cells])
    return [
        _decision(cell, float(w), float(b), alpha, len(cells)) for cell, w, b in zip(cells, worse, better, strict=True)
    ]


def confirm(first: CellDecision, second: CellDecision) -> CellDecision:
    """Decide after a second run: the second's own decision, on its own times, and never an alarm by itself.

    An alarm is raised only if both say worse. Where one says worse and the other better, nothing is known.
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
    """Adjust p-values [m], in the order given: `holm([0.01, 0.04, 0.03])` is [0.03, 0.06, 0.06].

    With p₁ ≤ … ≤ p_m they are max over j ≤ i of min(1, (m − j + 1) · p_j). Whatever is called at adjusted p ≤ α, the
    chance of even one false call among all m is at most α, however the tests depend on each other. Source: Holm, A
    Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 6 (1979).

    Raises ValueError: one is not within 0 and 1.
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError("p-values [m] lie within 0 and 1")
    order = np.argsort(values, kind="stable")
    rising = np.maximum.accumulate(np.minimum(1.0, values[order] * np.arange(values.size, 0, -1)))
    adjusted = np.empty_like(rising)
    adjusted[order] = rising
    return adjusted
