"""Load a store's content for its site: every cell's answer on every night, as arrays, and the details of a cell's page.

A cell's answer on a night is the worst of its decisions. Without decisions it is `failed` if it failed, otherwise
`missing`, as at the gate: the night ended before it, or has not decided it yet.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args

import numpy as np

from quantkit.nightly.records import NIGHT_ID, Answer, Night, NightCell, Result, StoredDecision, What
from quantkit.nightly.store import Store
from quantkit.report.kit import words

Array = Any
# most flipped items of each direction, and most errors, on a page
EXAMPLES, ERRORS = 40, 20

# worst first; an answer's number is its index here
ANSWERS: tuple[Answer, ...] = ("worse", "failed", "missing", "inconclusive", "better", "same")
WORSE, FAILED, MISSING, INCONCLUSIVE, BETTER, SAME = range(6)
# code for a cell outside of a night's matrix, and for a missing decision
NONE = 9
_WAITS = 8
WHATS: tuple[What, ...] = get_args(What)


@dataclass(frozen=True)
class NightAnswers:
    """Decisions of one comparison, each `[cells, nights]`.

    Args:
        answer: numbers of `ANSWERS`.
        value: effects, above zero is worse; NaN without one.
        margin: smallest effects that matter.
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
        nights: nights in the order of their names.
        cells: every cell of any night, sorted.
        current: cells of the last night, shown in the grid.
        answer: numbers of `ANSWERS`, `[cells, nights]`.
        decided: comparison -> its decisions.
        itself: True where the candidate was compared with the very same bundle.
        waits: True where a measurement was not decided yet.
        notes: oddities of the data, a sentence each.
    """

    nights: list[Night]
    cells: list[str]
    current: list[str]
    answer: Array
    decided: dict[What, NightAnswers]
    itself: Array
    waits: Array
    notes: list[str]

    def of(self, cell: int) -> Array:
        """Return the indices of a cell's nights, in order."""
        return np.flatnonzero(self.answer[cell] != NONE)

    def in_a_row(self, cell: int) -> int:
        """Count the last nights with the same answer of a cell."""
        codes = self.answer[cell, self.of(cell)]
        other = np.flatnonzero(codes != codes[-1]) if codes.size else codes
        return len(codes) - 1 - int(other[-1]) if other.size else len(codes)


def parts(key: str) -> NightCell:
    """Read a key; an invalid key becomes a cell with this model name."""
    try:
        return NightCell.of(key)
    except ValueError:
        return NightCell(key, "", "", "", 0)


# rows of a table with the indices of their nights and cells, limited to known nights and cells
_PLACED = """
SELECT nights.i AS night, cells.i AS cell, {columns} FROM {table}
JOIN (SELECT unnest($nights) AS night, unnest(range(len($nights))) AS i) AS nights USING (night)
JOIN (SELECT unnest($cells) AS cell, unnest(range(len($cells))) AS i) AS cells USING (cell) {order}
"""


def read(store: Store, *, now: datetime | None = None) -> History:
    """Read a store.

    Args:
        now: current time; nights that began later have a wrong clock; None skips the check.
    """
    notes: list[str] = []
    nights = _nights(store, notes)
    sql = "SELECT DISTINCT cell FROM results UNION SELECT DISTINCT cell FROM decisions"
    cells = sorted({cell for (cell,) in store.query(sql).rows}.union(*(night.matrix for night in nights)))
    places = {key: i for i, key in enumerate(cells)}
    shape = len(cells), len(nights)
    notes += _clocks(nights, now)

    def placed(table: str, columns: str, order: str = "", **values: Any) -> dict[str, Array]:
        sql = _PLACED.format(table=table, columns=columns, order=order)
        rows = store.arrow(sql, nights=[night.night for night in nights], cells=cells, **values)
        return {name: rows.column(name).to_numpy() for name in rows.column_names}

    answer = np.full(shape, NONE, np.int8)
    for i, night in enumerate(nights):
        answer[[places[key] for key in night.matrix], i] = MISSING
    itself, worst = np.zeros(shape, bool), np.full(shape, NONE, np.int8)
    decided: dict[What, NightAnswers] = {}
    if nights:
        states = "CASE state WHEN 'failed' THEN 1 WHEN 'done' THEN 8 ELSE 2 END AS state"
        same = "coalesce(content_sha256 = baseline_sha256, false)::INT AS itself"
        results = placed("results", f"{states}, {same}", "ORDER BY attempt")
        at = results["cell"], results["night"]
        answer[at], itself[at] = results["state"], results["itself"].astype(bool)
    waits = answer == _WAITS
    answer[waits] = MISSING
    for what in WHATS if nights else ():
        columns = f"coalesce(list_position($answers, answer) - 1, {NONE}) AS code, value, low, high, margin"
        rows = placed("(FROM decisions WHERE what = $what)", columns, what=what, answers=list(ANSWERS))
        at = rows["cell"], rows["night"]
        if not at[0].size:
            continue
        np.minimum.at(worst, at, rows["code"].astype(np.int8))
        numbers = {name: np.full(shape, np.nan) for name in ("value", "low", "high", "margin")}
        for name, values in numbers.items():
            column = rows[name].astype(float)
            values[at] = np.where(np.isfinite(column), column, np.nan)
        codes = np.full(shape, NONE, np.int8)
        codes[at] = rows["code"]
        decided[what] = NightAnswers(codes, **numbers)
    answer = np.where(worst == NONE, answer, worst)
    ((broken,),) = store.query(_BROKEN).rows
    if broken:
        notes.append(f"{words.plural(broken, 'decision')} with a NaN or infinite figure, which is left out")
    shown = [cells[i] for i in np.flatnonzero(answer[:, -1] != NONE)] if nights else []
    return History(nights, cells, shown, answer, decided, itself, waits & (worst == NONE), notes)


# null is not broken
_BROKEN = """
SELECT count(*) FROM decisions
WHERE NOT (isfinite(coalesce(value, 0)) AND isfinite(coalesce(low, 0)) AND isfinite(coalesce(high, 0))
    AND isfinite(coalesce(margin, 0)))
"""


def _nights(store: Store, notes: list[str]) -> list[Night]:
    """Read all nights; a night without its own row is restored from its name, for the sake of its measurements."""
    known = {night.night: night for night in store.nights()}
    there = store.query("SELECT DISTINCT night FROM results UNION SELECT DISTINCT night FROM decisions").rows
    for (name,) in sorted(there):
        if name not in known and not NIGHT_ID.fullmatch(name):
            notes.append(f"{name} is not a night's name; its rows are left out")
        elif name not in known:
            started = datetime.strptime(name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            known[name] = Night(name, started, None, "", "", ())
            notes.append(f"{name} has results, but its row in the table of nights is gone")
    return [known[name] for name in sorted(known)]


def _clocks(nights: Sequence[Night], now: datetime | None) -> list[str]:
    notes = []
    for before, after in itertools.pairwise(nights):
        if after.started < before.started:
            states = f"{after.night} states {after.started.astimezone(UTC):%Y-%m-%d %H:%M}"
            order = "a clock was wrong; nights are sorted by name"
            notes.append(f"{states}, before {before.night}: {order}")
    late = [night.night for night in nights if now is not None and night.started > now]
    return notes + [f"{name} lies in the future: a clock was wrong; until then it is the last night" for name in late]


# --- a cell ---


@dataclass(frozen=True)
class ItemFlip:
    """An item that only one side answers right.

    Args:
        item: index in the data.
        lost: True if the candidate is wrong.
        texts: (side, text), the baseline first; a single entry if both are the same.
    """

    item: int
    lost: bool
    texts: Sequence[tuple[str, str]]


# answers of one side: name, items, share of right ones, mean KL, mean −log p; None if unknown
Score = tuple[str, int, float | None, float | None, float | None]


@dataclass(frozen=True)
class Raw:
    """Iterations of one cell in one night, in order of measurement.

    Args:
        side: `candidate`, `baseline` or `release` of each iteration.
        block: number of the block, unique over rounds and attempts.
        round: number of the round, unique over attempts.
        seconds: duration of each iteration.
        dropped: number of iterations left out as NaN, infinite or not positive.
        throttled: number of iterations while the device lowered its clock.
        temperature: lowest and highest, where known.
        again: first round of the second attempt; None without one.
    """

    side: Array
    block: Array
    round: Array
    seconds: Array
    dropped: int
    throttled: int
    temperature: tuple[float, float] | None
    again: int | None = None

    def sides(self) -> dict[str, tuple[Array, Array]]:
        """Return side -> (places in the order, seconds)."""
        names = [name for name in ("baseline", "candidate", "release") if (self.side == name).any()]
        return {name: (np.flatnonzero(self.side == name), self.seconds[self.side == name]) for name in names}

    def ratios(self) -> Array:
        """Divide the candidate's fastest step by the baseline's, in blocks that have both."""
        fastest = []
        for name in ("candidate", "baseline"):
            best = np.full(int(self.block.max(initial=-1)) + 1, np.inf)
            mine = self.side == name
            np.minimum.at(best, self.block[mine], self.seconds[mine])
            fastest.append(best)
        both = np.isfinite(fastest[0]) & np.isfinite(fastest[1])
        return fastest[0][both] / fastest[1][both]


@dataclass(frozen=True)
class Environment:
    """Environment of a cell from some night on: `device.` entries, packages and versions."""

    night: str
    names: Mapping[str, str]


@dataclass
class Detail:
    """Details of one cell: results (one an attempt), decisions, times, flips and scores of its last night.

    Args:
        flipped: number of all flips: lost, won.
        environments: environments that differ from the one before, in the order of the nights.
        errors: (night, attempt, error), latest first.
        failed: number of all errors.
    """

    results: list[Result] = field(default_factory=list)
    decisions: list[StoredDecision] = field(default_factory=list)
    raw: Raw | None = None
    flips: list[ItemFlip] = field(default_factory=list)
    flipped: tuple[int, int] = (0, 0)
    scores: list[Score] = field(default_factory=list)
    environments: list[Environment] = field(default_factory=list)
    errors: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    failed: int = 0


def details(store: Store, history: History) -> dict[str, Detail]:
    """Read cell -> details of its page."""
    by_cell = {key: Detail() for key in history.cells}
    for night, cell, attempt, error in store.query(
        "SELECT night, cell, attempt, error FROM results WHERE error IS NOT NULL ORDER BY night DESC, attempt DESC"
    ).rows:
        detail = by_cell[cell]
        detail.failed += 1
        if len(detail.errors) < ERRORS:
            detail.errors.append((night, attempt, {str(k): str(v) for k, v in json.loads(error).items()}))
    for night, cell, versions, device in store.query(_ENVIRONMENTS).rows:
        environments = by_cell[cell].environments
        # a night that failed early lacks entries, which count as unchanged
        before = environments[-1].names if environments else {}
        names = {**before, **_names(versions, device)}
        if names != before:
            environments.append(Environment(night, names))
    last = {key: nights[-1] for i, key in enumerate(history.cells) if (nights := history.of(i)).size}
    for at, keys in words.by(last, lambda key: int(last[key])).items():
        _night(store, history.nights[at].night, {key: by_cell[key] for key in keys})
    return by_cell


# nights of each cell with an environment other than the night before
_ENVIRONMENTS = """
SELECT night, cell, versions, device FROM (
    SELECT night, cell, attempt, versions, device, lag((versions, device)) OVER nights AS before FROM results
    WHERE versions <> '{}' WINDOW nights AS (PARTITION BY cell ORDER BY night, attempt)
) WHERE (versions, device) IS DISTINCT FROM before ORDER BY night, attempt
"""
_SCORES = """
SELECT build, side, count(*), avg(correct::INT), avg(kl) FILTER (isfinite(kl)), -avg(logp) FILTER (isfinite(logp))
FROM items WHERE night = $night AND attempt = 1 GROUP BY build, side ORDER BY build, side
"""
_FLIPPED = """
SELECT build, item, side, correct, text FROM items
WHERE night = $night AND attempt = 1 AND text IS NOT NULL AND side <> 'release' ORDER BY build, item, side
"""
# all flips; only a few have a text, and only on the candidate's side
_COUNTS = """
SELECT ours.build, count(*) FILTER (WHERE theirs.correct AND NOT ours.correct),
    count(*) FILTER (WHERE ours.correct AND NOT theirs.correct)
FROM (FROM items WHERE night = $night AND attempt = 1 AND side = 'candidate') AS ours
JOIN (FROM items WHERE night = $night AND attempt = 1 AND side = 'baseline') AS theirs USING (build, item)
GROUP BY ours.build
"""


def _night(store: Store, night: str, members: Mapping[str, Detail]) -> None:
    """Fill in the details of one night."""
    builds: dict[str, str] = {}
    for result in store.results(night):
        if (detail := members.get(result.cell)) is not None:
            detail.results.append(result)
            builds[result.cell] = result.build
    for decision in store.decisions(night):
        if (detail := members.get(decision.cell)) is not None:
            detail.decisions.append(decision)
    for cell, raw in _times(store, night, members).items():
        members[cell].raw = raw
    scores = words.by(store.query(_SCORES, night=night).rows, lambda row: row[0])
    counts = {build: (lost, won) for build, lost, won in store.query(_COUNTS, night=night).rows}
    flips = _flips(store.query(_FLIPPED, night=night).rows)
    for cell, build in builds.items():
        detail = members[cell]
        detail.scores = [row[1:] for row in scores.get(build, [])]
        lost, won = ([flip for flip in flips.get(build, []) if flip.lost == side] for side in (True, False))
        detail.flips = lost[:EXAMPLES] + won[:EXAMPLES]
        detail.flipped = counts.get(build, (len(lost), len(won)))


def _flips(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[ItemFlip]]:
    """Return build -> flipped items with a text."""
    flips: dict[str, list[ItemFlip]] = defaultdict(list)
    for (build, item), of_item in words.by(rows, lambda row: row[:2]).items():
        right = {side: correct for _, _, side, correct, _ in of_item}
        mine = right.get("candidate", None if "baseline" not in right else not right["baseline"])
        if mine is None or right.get("baseline", not mine) == mine:
            continue
        texts = sorted((side, text) for _, _, side, _, text in of_item)
        if len({text for _, text in texts}) == 1:
            texts = [("", texts[0][1])]
        flips[build].append(ItemFlip(item, not mine, texts))
    return flips


# rounds and blocks are numbered across all attempts
_TIMES = """
SELECT cell, attempt, side, seconds, temperature_c, coalesce(throttled, false)::INT AS throttled,
    dense_rank() OVER (PARTITION BY cell ORDER BY attempt, round) - 1 AS round,
    dense_rank() OVER (PARTITION BY cell ORDER BY attempt, round, block) - 1 AS block
FROM times WHERE night = $night ORDER BY cell, attempt, times.round, times.block, position, began
"""


def _times(store: Store, night: str, members: Mapping[str, Detail]) -> dict[str, Raw]:
    """Read the iterations of a night by cell."""
    table = store.arrow(_TIMES, night=night)
    cells = table.column("cell").combine_chunks().dictionary_encode()
    codes = cells.indices.to_numpy()
    column = {name: table.column(name).to_numpy() for name in table.column_names if name != "cell"}
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    taken = {}
    for start, end in itertools.pairwise(edges):
        if start == end or (cell := cells.dictionary[int(codes[start])].as_py()) not in members:
            continue
        here = {name: values[start:end] for name, values in column.items()}
        sound = np.isfinite(here["seconds"]) & (here["seconds"] > 0)
        warm = here["temperature_c"].astype(float)
        degrees = warm[np.isfinite(warm)]
        later = np.flatnonzero(here["attempt"] > 1)
        taken[cell] = Raw(
            **{name: here[name][sound] for name in ("side", "block", "round", "seconds")},
            dropped=int((~sound).sum()),
            throttled=int(here["throttled"].sum()),
            temperature=(float(degrees.min()), float(degrees.max())) if degrees.size else None,
            again=int(here["round"][later[0]]) if later.size else None,
        )
    return taken


def _names(versions: str, device: str) -> dict[str, str]:
    """Merge packages and device entries into one mapping."""
    known = {f"device.{name}": value for name, value in json.loads(device or "{}").items()}
    known |= json.loads(versions or "{}")
    return {name: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for name, v in known.items()}
