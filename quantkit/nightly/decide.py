"""Turn the rows of a night into decisions.

All comparisons of the night, with baselines and with the last release, form one family (`stats.decision`); a comparison
that cells of one build share counts once. Bytes are counted, hence certain, and not part of it. A time called worse is
measured again (`Judged.repeat`), and raised only if the second run, decided on its own times, is worse too. This module
neither measures nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from quantkit.errors import InputError
from quantkit.nightly import evidence as ask
from quantkit.nightly.config import Nightly, NightMargins, builds
from quantkit.nightly.evidence import NightComparison, Thing
from quantkit.nightly.records import Answer, Item, Night, NightCell, Result, StoredDecision, Time, What
from quantkit.nightly.store import Store
from quantkit.report.kit import words
from quantkit.runtimes import load_runtime
from quantkit.stats import decision as stats

Taken = TypeVar("Taken", Time, Item)

# severity order: of several answers that share a row, the first one counts
_GRAVEST: tuple[Answer, ...] = ("worse", "failed", "inconclusive", "missing", "better", "same")
# minor one of two that share a row
_BESIDES: tuple[Thing, ...] = ("perplexity", "accuracy")
_FIELDS = ("code", "where", "value", "rule", "remedy")
_HEADS: dict[Thing, str] = {
    "latency": "time",
    "accuracy": "answers lost",
    "kl": "KL from the float model",
    "perplexity": "log-perplexity",
    "size": "bytes",
}
_NOT_YET = "; not yet run again"
_NOTHING = "it holds no times against the same side"


@dataclass(frozen=True)
class Judged:
    """Decisions of a night.

    Args:
        decisions: one a cell and column, in the order of the matrix.
        repeat: cells with times called worse by a first run and without a second.
    """

    decisions: list[StoredDecision]
    repeat: list[NightCell]


@dataclass(frozen=True)
class _Decided:
    """A comparison and its answer; `repeat`: True if its time alarmed and needs a second run."""

    asked: NightComparison
    answer: Answer
    because: str
    decision: stats.CellDecision | None = None
    p: float | None = None
    confirmed: bool | None = None
    repeat: bool = False

    @property
    def gravity(self) -> tuple[int, bool]:
        """Sort key, gravest first; ties are resolved consistently, so that nights stay comparable."""
        return _GRAVEST.index(self.answer), self.asked.thing in _BESIDES


def decide_night(store: Store, night: str, config: Nightly) -> Judged:
    """Decide a night from its rows in the store.

    Raises:
        InputError: `night-missing`.
        MissingDependency: scipy is not installed.
    """
    begun = {night_.night: night_ for night_ in store.nights()}
    if night not in begun:
        last = f"the last is {max(begun)}" if begun else "there is none"
        raise InputError("night-missing", where=str(store.path), value=f"no night {night}", remedy=last)
    results = store.results(night)
    return judge(config, begun[night], results, partial(store.times, night), partial(store.items, night))


def judge(
    config: Nightly,
    night: Night,
    results: Iterable[Result],
    times: Callable[[str], Sequence[Time]],
    items: Callable[[str], Sequence[Item]],
) -> Judged:
    """Decide all cells of a night together.

    Args:
        results: results of the night, first and second attempts.
    """
    attempts = {(result.cell, result.attempt): result for result in results}
    cells = [NightCell.of(key) for key in night.matrix]
    comparisons: list[NightComparison] = []
    for build, members in builds(cells).items():
        done = [cell for cell in members if _is_done(attempts.get((cell.key, 1)))]
        comparisons += [_undone(cell, attempts.get((cell.key, 1))) for cell in members if cell not in done]
        for margins, alike in _by_margins(config, done).items():
            of_these = [attempts[cell.key, 1] for cell in alike]
            comparisons += ask.of_items(of_these, _attempt(items(build), 1), margins)
        if config.tasks is not None and done:
            comparisons += ask.of_tasks([attempts[cell.key, 1] for cell in done], config.tasks.recovery_min)
        for cell in done:
            result, margins = attempts[cell.key, 1], config.gates.of(cell)
            if config.load_ is not None or load_runtime(cell.program).own is None:  # else it has no steps to time
                comparisons += ask.of_times(result, _attempt(times(cell.key), 1), margins)
            comparisons.append(ask.of_size(result, margins))
    decided = _decided(comparisons, config.gates.alpha)
    decided = _repeated(decided, config, attempts, times)
    order = {cell.key: number for number, cell in enumerate(cells)}
    rows = sorted(_rows(night.night, decided), key=lambda row: order[row.cell])
    repeat = {key for one in decided if one.repeat for key in one.asked.cells}
    return Judged(rows, [cell for cell in cells if cell.key in repeat])


def _is_done(result: Result | None) -> bool:
    return result is not None and result.state == "done"


def _undone(cell: NightCell, result: Result | None) -> NightComparison:
    """Return the answer of a cell without measurements."""
    if result is None:
        why = "the night ended before it: continue with `quantkit nightly run --resume`"
        return NightComparison((cell.key,), "latency", "latency", answer="missing", because=why)
    answer: Answer = "failed" if result.state == "failed" else "missing"
    why = "the reason is unknown"
    if result.error:
        why = InputError(**{name: result.error.get(name, "") for name in _FIELDS}).line()
    return NightComparison((cell.key,), "latency", "latency", answer=answer, because=why)


def _by_margins(config: Nightly, cells: Sequence[NightCell]) -> dict[NightMargins, list[NightCell]]:
    """Group cells of one build by the margins of their shared comparisons: usually one group."""

    def shared(cell: NightCell) -> NightMargins:
        margins = config.gates.of(cell)
        return NightMargins(accuracy=margins.accuracy, kl=margins.kl, latency=config.gates.latency)

    return words.by(cells, shared)


def _attempt(rows: Sequence[Taken], number: int) -> list[Taken]:
    return [row for row in rows if row.attempt == number]


def _decided(comparisons: Sequence[NightComparison], alpha: float) -> list[_Decided]:
    """Decide every comparison: measured ones as one family, counted ones alone."""
    known = [one.evidence for one in comparisons if one.evidence is not None and one.thing != "size"]
    measured = iter(stats.decide(known, alpha=alpha))
    decided: list[_Decided] = []
    for one in comparisons:
        if one.evidence is None:
            decided.append(_Decided(one, one.answer, one.because))
            continue
        decision = stats.decide([one.evidence])[0] if one.thing == "size" else next(measured)
        decided.append(_with(one, decision))
    return decided


def _with(asked: NightComparison, decision: stats.CellDecision, confirmed: bool | None = None) -> _Decided:
    evidence = asked.evidence
    assert evidence is not None
    better = decision.answer == "better"
    p = evidence.p_below(-evidence.alarm) if better else evidence.p_above(evidence.alarm)
    return _Decided(asked, decision.answer, _because(asked, decision, confirmed), decision, p, confirmed)


def _repeated(
    decided: Sequence[_Decided],
    config: Nightly,
    attempts: Mapping[tuple[str, int], Result],
    times: Callable[[str], Sequence[Time]],
) -> list[_Decided]:
    """Apply second runs to times that were called worse: a family of their own."""
    repeated = list(decided)
    again: dict[int, NightComparison] = {}
    for number, first in enumerate(decided):
        if first.answer != "worse" or first.asked.thing != "latency":
            continue
        (key,) = first.asked.cells
        result = attempts.get((key, 2))
        if result is None:
            repeated[number] = replace(first, repeat=True)
            continue
        second = _undone(NightCell.of(key), result)
        if _is_done(result):
            taken = ask.of_times(result, _attempt(times(key), 2), config.gates.of(NightCell.of(key)))
            second = next((one for one in taken if one.what == first.asked.what), replace(second, because=_NOTHING))
        if second.evidence is None:
            # an alarm without a valid second run must not disappear
            why = f"{first.because.replace(_NOT_YET, '')}; its second run failed: {second.because}"
            repeated[number] = _Decided(first.asked, "failed", why)
        else:
            again[number] = second
    evidence = [one.evidence for one in again.values() if one.evidence is not None]
    for (number, second), decision in zip(again.items(), stats.decide(evidence, alpha=config.gates.alpha), strict=True):
        first = decided[number]
        assert first.decision is not None
        both = stats.confirm(first.decision, decision)
        repeated[number] = _with(second, both, decision.answer == "worse")
    return repeated


def _rows(night: str, decided: Sequence[_Decided]) -> list[StoredDecision]:
    """Return one row a cell and column: the gravest answer of those that share it."""
    gravest: dict[tuple[str, What], _Decided] = {}
    for one in decided:
        for cell in one.asked.cells:
            key = cell, one.asked.what
            if key not in gravest or one.gravity < gravest[key].gravity:
                gravest[key] = one
    return [_row(night, cell, what, one) for (cell, what), one in gravest.items()]


def _row(night: str, cell: str, what: What, one: _Decided) -> StoredDecision:
    row = StoredDecision(night, cell, what, one.answer, n=one.asked.n, because=one.because)
    if one.asked.lost is not None:
        effect, (low, high), most = one.asked.lost
        return replace(row, value=effect, low=low, high=high, margin=most)
    if (known := one.decision) is None:
        return row
    low, high = known.ci95
    row = replace(row, value=known.effect, low=low, high=high, margin=known.margin, smallest=known.detectable)
    if one.asked.thing == "size":
        return row
    adjusted = known.p_better if one.answer == "better" else known.p_worse
    return replace(row, p=one.p, p_adjusted=adjusted, confirmed=one.confirmed)


# --- in words --------------------------------------------------------------------------------------------------------


def _because(asked: NightComparison, decision: stats.CellDecision, confirmed: bool | None) -> str:
    """Explain a decision in one sentence; `confirmed`: True if a second run agreed, None without one."""
    told = f"{_HEADS[asked.thing]} {_amount(asked.thing, decision.effect)}"
    if asked.thing != "size":
        low, high = (_amount(asked.thing, end) for end in decision.ci95)
        told += f" ({low} to {high})"
    margin = _amount(asked.thing, decision.margin).lstrip("+")
    parts = [("against the last release: " if asked.what == "drift" else "") + told]
    if decision.answer == "same":
        parts[0] += f", within {margin}"
    elif decision.answer == "inconclusive":
        parts.append(f"{_amount(asked.thing, decision.detectable)} would have been called worse")
    else:
        parts[0] += f", {_beyond(decision)} {margin}"
    if decision.answer == "worse" and asked.thing == "latency" and confirmed is None:
        parts[0] += _NOT_YET
    elif confirmed is not None:
        parts.append("a second run said the same" if confirmed else "a first run called it worse")
    return "; ".join([*parts, *([asked.because] if asked.because else [])])


def _amount(thing: Thing, effect: float) -> str:
    """Format an effect: `+4.8 %`, `+0.012 nats`; zero has no sign."""
    if thing in ("kl", "perplexity"):
        sign = "−" if effect < 0 else "+" if effect > 0 else ""
        return f"{sign}{words.figure(abs(effect), 2)} nats"
    points = words.points(effect, 2 if abs(effect) < 0.01 else 1)
    return f"{points} %"


def _beyond(decision: stats.CellDecision) -> str:
    low, high = decision.ci95
    shown = low > decision.margin if decision.answer == "worse" else high < -decision.margin
    return "more than" if shown else "which may be more than"
