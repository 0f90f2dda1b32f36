"""What a store holds, as arrays over cells and nights: how every cell was answered on every night.

A cell's answer on a night is the worst of what was decided of it. Where nothing was decided, it is `failed` if it
failed, and else `missing`, as at the gate: not reached, or measured and not decided yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_args

import numpy as np

from quantkit.nightly.records import NIGHT_ID, Answer, Night, NightCell, What
from quantkit.nightly.store import Store
from quantkit.report.kit import words

Array = Any

# the worst first; an answer's number is its place here
ANSWERS: tuple[Answer, ...] = ("worse", "failed", "missing", "inconclusive", "better", "same")
WORSE, FAILED, MISSING, INCONCLUSIVE, BETTER, SAME = range(6)
# of a night on which a cell was not in the matrix, and of what was not decided
NONE = 9
_WAITS = 8
WHATS: tuple[What, ...] = get_args(What)


@dataclass(frozen=True)
class NightAnswers:
    """What was decided in one respect.

    Args:
        answer: numbers of `ANSWERS`, `[cells, nights]`.
        value: the effects, above zero is worse; NaN where there is none.
        low: end of their intervals.
        high: end of their intervals.
        margin: the least effect that counts.
    """

    answer: Array
    value: Array
    low: Array
    high: Array
    margin: Array


@dataclass(frozen=True)
class History:
    """All nights of all cells.

    Args:
        nights: in the order of their names.
        cells: every cell that any night had, sorted.
        current: those of them that the last night had: what the grid shows.
        answer: of each cell on each night, numbers of `ANSWERS`, `[cells, nights]`.
        decided: respect -> what was decided in it.
        itself: where the candidate was measured against the very same bundle.
        waits: where something was measured and nothing decided.
        notes: what is odd about the data, a sentence each.
    """

    nights: list[Night]
    cells: list[str]
    current: list[str]
    answer: Array
    decided: dict[What, NightAnswers]
    itself: Array
    waits: Array
    notes: list[str]

    @property
    def last(self) -> Array:
        """The number of each cell's last night; -1 for a cell that no night has had."""
        planned = self.answer != NONE
        count = planned.shape[1]
        if not count:
            return np.full(len(self.cells), -1)
        return np.where(planned.any(axis=1), count - 1 - np.argmax(planned[:, ::-1], axis=1), -1)

    def of(self, cell: int) -> Array:
        """The numbers of a cell's nights, in order."""
        return np.flatnonzero(self.answer[cell] != NONE)


def parts(key: str) -> NightCell:
    """The cell of a key; of a key that is none, one whose model is called like it."""
    try:
        return NightCell.of(key)
    except ValueError:
        return NightCell(key, "", "", "", 0)


def read(store: Store, *, now: datetime | None = None) -> History:
    """Read a store.

    Args:
        now: nights that say they began after this have a wrong clock; None: not looked at.
    """
    notes: list[str] = []
    nights = _nights(store, notes)
    names = {night.night: i for i, night in enumerate(nights)}
    results = store.arrow(
        "SELECT night, cell, attempt, state, content_sha256 = baseline_sha256 AS itself FROM results ORDER BY attempt"
    )
    decisions = store.arrow("SELECT night, cell, what, answer, value, low, high, margin FROM decisions")
    known = {*(key for night in nights for key in night.matrix)}
    known |= {str(key) for table in (results, decisions) for key in table.column("cell").unique().to_pylist()}
    cells = sorted(known)
    places = {key: i for i, key in enumerate(cells)}
    shape = len(cells), len(nights)

    notes += _clocks(nights, now)
    answer = np.full(shape, NONE, np.int8)
    for i, night in enumerate(nights):
        answer[[places[key] for key in night.matrix], i] = MISSING
    night_of, cell_of, there = _where(results, names, places, notes)
    states = {"failed": FAILED, "missing": MISSING, "done": _WAITS}
    answer[cell_of, night_of] = _codes(results, "state", states)[there]
    waits = answer == _WAITS
    answer[waits] = MISSING
    itself = np.zeros(shape, bool)
    itself[cell_of, night_of] = results.column("itself").fill_null(False).to_numpy()[there]

    night_of, cell_of, there = _where(decisions, names, places, notes)
    codes = _codes(decisions, "answer", {name: i for i, name in enumerate(ANSWERS)})[there]
    whats = _codes(decisions, "what", {name: i for i, name in enumerate(WHATS)})[there]
    worst = np.full(shape, NONE, np.int8)
    np.minimum.at(worst, (cell_of, night_of), codes)
    answer = np.where(worst == NONE, answer, worst)
    decided = {}
    for number, what in enumerate(WHATS):
        rows = np.flatnonzero(whats == number)
        if not rows.size:
            continue
        at = cell_of[rows], night_of[rows]
        numbers = {}
        for name in ("value", "low", "high", "margin"):
            column = decisions.column(name).to_numpy()[there][rows]
            numbers[name] = np.full(shape, np.nan)
            numbers[name][at] = np.where(np.isfinite(column), column, np.nan)
        given = np.full(shape, NONE, np.int8)
        given[at] = codes[rows]
        decided[what] = NightAnswers(given, **numbers)
    if broken := _not_finite(decisions):
        notes.append(f"{words.plural(broken, 'decision')} with a figure that is NaN or infinite: it is left out")
    current = np.flatnonzero(answer[:, -1] != NONE) if nights else ()
    shown = [cells[i] for i in current]
    return History(nights, cells, shown, answer, decided, itself, waits & (worst == NONE), notes)


def _nights(store: Store, notes: list[str]) -> list[Night]:
    """All nights; of one whose own row is gone what its name tells, for what was measured in it is there."""
    found = {night.night: night for night in store.nights()}
    there = store.query("SELECT DISTINCT night FROM results UNION SELECT DISTINCT night FROM decisions").rows
    for (name,) in sorted(there):
        if name not in found and NIGHT_ID.fullmatch(name):
            started = datetime.strptime(name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            found[name] = Night(name, started, None, "", "", ())
            notes.append(f"{name} has results, but the row that says what it was to measure is gone")
    return [found[name] for name in sorted(found)]


def _codes(table: Any, column: str, numbers: dict[str, int]) -> Array:
    """A column of words as numbers; `NONE` for a word that is not known."""
    encoded = table.column(column).combine_chunks().dictionary_encode()
    taken = np.array([numbers.get(word, NONE) for word in encoded.dictionary.to_pylist()] or [NONE], np.int8)
    return taken[encoded.indices.to_numpy()]


def _where(table: Any, nights: dict[str, int], cells: dict[str, int], notes: list[str]) -> tuple[Array, Array, Array]:
    """(number of the night, of the cell, which rows) of a table; rows of a night that never began are left out."""
    found = []
    for column, places in (("night", nights), ("cell", cells)):
        encoded = table.column(column).combine_chunks().dictionary_encode()
        words = encoded.dictionary.to_pylist()
        if strange := [word for word in words if word not in places]:
            notes.append(f"{strange[0]} is no name of a night; its rows are left out")
        taken = np.array([places.get(word, -1) for word in words] or [-1])
        found.append(taken[encoded.indices.to_numpy()])
    there = (found[0] >= 0) & (found[1] >= 0)
    return found[0][there], found[1][there], there


def _not_finite(decisions: Any) -> int:
    """Rows with a figure that is NaN or infinite; what is null is none of them."""
    import pyarrow.compute as pc

    broken = np.zeros(decisions.num_rows, bool)
    for name in ("value", "low", "high", "margin"):
        broken |= pc.invert(pc.is_finite(decisions.column(name))).fill_null(False).to_numpy()
    return int(broken.sum())


def _clocks(nights: Sequence[Night], now: datetime | None) -> list[str]:
    notes = []
    for before, after in itertools.pairwise(nights):
        if after.started < before.started:
            notes.append(
                f"{after.night} states {after.started.astimezone(UTC):%Y-%m-%d %H:%M}, which is before "
                f"{before.night}: a clock was wrong; nights stand in the order of their names"
            )
    if now is not None:
        notes += [
            f"{night.night} lies in the future: a clock was wrong, and it stands last until then"
            for night in nights
            if night.started > now
        ]
    return notes
