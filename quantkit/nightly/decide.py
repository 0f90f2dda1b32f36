"""From the rows of a night to its decisions.

All comparisons of the night, with baselines and with the last release, are one family (`stats.decision`): what cells of
one build share counts once. What was counted (bytes) is certain and no part of it. A time that was called worse is run
again (`Judged.repeat`), and raised only if the second run, decided on its own times, says the same. Nothing here
measures or writes.
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
from quantkit.stats import decision as stats

Taken = TypeVar("Taken", Time, Item)

# of several things that share a row, the first of these is told
_GRAVEST: tuple[Answer, ...] = ("worse", "failed", "inconclusive", "missing", "better", "same")
# of two that share a row
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
    """The decisions of a night.

    Args:
        decisions: one a cell and column, in the order of the matrix.
        repeat: cells whose times were called worse by a first run and have no second yet.
    """

    decisions: list[StoredDecision]
    repeat: list[NightCell]


@dataclass(frozen=True)
class _Decided:
    """A comparison and its answer; `repeat` where its time alarmed and has no second run yet."""

    asked: NightComparison
    answer: Answer
    because: str
    decision: stats.CellDecision | None = None
    p: float | None = None
    confirmed: bool | None = None
    repeat: bool = False

    @property
    def gravity(self) -> tuple[int, bool]:
        """Sorts the gravest first; among equals always the same one, so that its nights make one line."""
        return _GRAVEST.index(self.answer), self.asked.thing in _BESIDES


def decide_night(store: Store, night: str, config: Nightly) -> Judged:
    """Decide a night on what the store has of it.

    Raises:
        InputError: `night-missing`.
        MissingDependency: scipy is not installed.
    """
    begun = {each.night: each for each in store.nights()}
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
        results: of the night, first and second attempts.
    """
    attempts = {(each.cell, each.attempt): each for each in results}
    cells = [NightCell.of(key) for key in night.matrix]
    found: list[NightComparison] = []
    for build, members in builds(cells).items():
        done = [each for each in members if _is_done(attempts.get((each.key, 1)))]
        found += [_undone(each, attempts.get((each.key, 1))) for each in members if each not in done]
        for margins, alike in _by_margins(config, done).items():
            of_these = [attempts[each.key, 1] for each in alike]
            found += ask.of_items(of_these, _attempt(items(build), 1), margins)
        for each in done:
            result, margins = attempts[each.key, 1], config.gates.of(each)
            found += ask.of_times(result, _attempt(times(each.key), 1), margins)
            found.append(ask.of_size(result, margins))
    decided = _decided(found, config.gates.alpha)
    decided = _repeated(decided, config, attempts, times)
    order = {each.key: number for number, each in enumerate(cells)}
    rows = sorted(_rows(night.night, decided), key=lambda row: order[row.cell])
    repeat = {key for each in decided if each.repeat for key in each.asked.cells}
    return Judged(rows, [each for each in cells if each.key in repeat])


def _is_done(result: Result | None) -> bool:
    return result is not None and result.state == "done"


def _undone(cell: NightCell, result: Result | None) -> NightComparison:
    """The answer of a cell that nothing was measured of."""
    if result is None:
        why = "the night ended before it: `quantkit nightly run --resume` goes on"
        return NightComparison((cell.key,), "latency", "latency", answer="missing", because=why)
    answer: Answer = "failed" if result.state == "failed" else "missing"
    why = "no reason is known"
    if result.error:
        why = InputError(**{name: result.error.get(name, "") for name in _FIELDS}).line()
    return NightComparison((cell.key,), "latency", "latency", answer=answer, because=why)


def _by_margins(config: Nightly, cells: Sequence[NightCell]) -> dict[NightMargins, list[NightCell]]:
    """Group cells of one build that ask the same of what they share: mostly all of them."""

    def shared(cell: NightCell) -> NightMargins:
        margins = config.gates.of(cell)
        return NightMargins(accuracy=margins.accuracy, kl=margins.kl, latency=config.gates.latency)

    return words.by(cells, shared)


def _attempt(rows: Sequence[Taken], number: int) -> list[Taken]:
    return [row for row in rows if row.attempt == number]


def _decided(found: Sequence[NightComparison], alpha: float) -> list[_Decided]:
    """A decision each: what was measured as one family, what was counted alone."""
    known = [each.evidence for each in found if each.evidence is not None and each.thing != "size"]
    measured = iter(stats.decide(known, alpha=alpha))
    decided: list[_Decided] = []
    for each in found:
        if each.evidence is None:
            decided.append(_Decided(each, each.answer, each.because))
            continue
        decision = stats.decide([each.evidence])[0] if each.thing == "size" else next(measured)
        decided.append(_with(each, decision))
    return decided


def _with(asked: NightComparison, decision: stats.CellDecision, confirmed: bool | None = None) -> _Decided:
    evidence = asked.evidence
    assert evidence is not None
    better = decision.answer == "better"
    p = evidence.p_below(-evidence.alarm) if better else evidence.p_above(evidence.alarm)
    said = _because(asked, decision, confirmed)
    return _Decided(asked, decision.answer, said, decision, p, confirmed)


def _repeated(
    decided: Sequence[_Decided],
    config: Nightly,
    attempts: Mapping[tuple[str, int], Result],
    times: Callable[[str], Sequence[Time]],
) -> list[_Decided]:
    """The same, with what second runs say of times that were called worse: a family of their own."""
    found = list(decided)
    again: dict[int, NightComparison] = {}
    for number, first in enumerate(decided):
        if first.answer != "worse" or first.asked.thing != "latency":
            continue
        (key,) = first.asked.cells
        result = attempts.get((key, 2))
        if result is None:
            found[number] = replace(first, repeat=True)
            continue
        second = _undone(NightCell.of(key), result)
        if _is_done(result):
            taken = ask.of_times(result, _attempt(times(key), 2), config.gates.of(NightCell.of(key)))
            second = next((each for each in taken if each.what == first.asked.what), replace(second, because=_NOTHING))
        if second.evidence is None:
            # an alarm that nobody could look into is no silence
            why = f"{first.because.replace(_NOT_YET, '')}; its second run failed: {second.because}"
            found[number] = _Decided(first.asked, "failed", why)
        else:
            again[number] = second
    evidence = [each.evidence for each in again.values() if each.evidence is not None]
    for (number, second), decision in zip(again.items(), stats.decide(evidence, alpha=config.gates.alpha), strict=True):
        first = decided[number]
        assert first.decision is not None
        both = stats.confirm(first.decision, decision)
        found[number] = _with(second, both, decision.answer == "worse")
    return found


def _rows(night: str, decided: Sequence[_Decided]) -> list[StoredDecision]:
    """Make one row a cell and column: the gravest of what shares it."""
    gravest: dict[tuple[str, What], _Decided] = {}
    for made in decided:
        for cell in made.asked.cells:
            key = cell, made.asked.what
            if key not in gravest or made.gravity < gravest[key].gravity:
                gravest[key] = made
    return [_row(night, cell, what, made) for (cell, what), made in gravest.items()]


def _row(night: str, cell: str, what: What, made: _Decided) -> StoredDecision:
    row = StoredDecision(night, cell, what, made.answer, n=made.asked.n, because=made.because)
    if (known := made.decision) is None:
        return row
    low, high = known.ci95
    row = replace(row, value=known.effect, low=low, high=high, margin=known.margin, smallest=known.detectable)
    if made.asked.thing == "size":
        return row
    adjusted = known.p_better if made.answer == "better" else known.p_worse
    return replace(row, p=made.p, p_adjusted=adjusted, confirmed=made.confirmed)


# --- in words --------------------------------------------------------------------------------------------------------


def _because(asked: NightComparison, decision: stats.CellDecision, confirmed: bool | None) -> str:
    """Say it in one sentence; `confirmed` is whether a second run said the same, None where there was none."""
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
    """`+4.8 %`, `+0.012 nats`; nothing is without a sign."""
    if thing in ("kl", "perplexity"):
        sign = "−" if effect < 0 else "+" if effect > 0 else ""
        return f"{sign}{words.figure(abs(effect), 2)} nats"
    points = words.points(effect, 2 if abs(effect) < 0.01 else 1)
    return f"{points} %"


def _beyond(decision: stats.CellDecision) -> str:
    low, high = decision.ci95
    shown = low > decision.margin if decision.answer == "worse" else high < -decision.margin
    return "more than" if shown else "which may be more than"
