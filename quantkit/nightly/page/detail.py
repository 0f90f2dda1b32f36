"""What a cell's page tells beyond its history: read from the store for all cells at once, a night at a time."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.nightly.page.history import History
from quantkit.nightly.records import Result, StoredDecision
from quantkit.nightly.store import Store

Array = Any
# flipped items of each direction, and errors, that a page shows
EXAMPLES, ERRORS = 40, 20


@dataclass(frozen=True)
class ItemFlip:
    """An item that one side answers right and the other wrong.

    Args:
        item: its number in the data.
        lost: whether it is the candidate that is wrong.
        texts: (side, what stands there), the baseline first; one alone where both are the same.
    """

    item: int
    lost: bool
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Score:
    """How one side answered: its items, the share that is right, mean KL and mean of −log p, None where not known."""

    side: str
    items: int
    right: float | None
    kl: float | None
    nll: float | None


@dataclass(frozen=True)
class Raw:
    """The iterations of one cell in one night, in the order in which they were taken.

    Args:
        side: of each, `candidate`, `baseline` or `release`.
        block: a number for each block of each round of each attempt.
        round: a number for each round of each attempt.
        seconds: that each took.
        dropped: how many were left out, for they are NaN, infinite or not above zero.
        throttled: how many ran while the device had lowered its clock.
        temperature: lowest and highest, where known.
        again: number of the round with which the second attempt begins; None where there was none.
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
        """Side -> (places in the order, seconds)."""
        names = [name for name in ("baseline", "candidate", "release") if (self.side == name).any()]
        return {name: (np.flatnonzero(self.side == name), self.seconds[self.side == name]) for name in names}

    def ratios(self) -> Array:
        """The candidate's fastest step over the baseline's, of the blocks that have both."""
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
    """What a cell ran with from some night on: `device.` and what the machine says of itself, package and version."""

    night: str
    names: Mapping[str, str]


@dataclass
class Detail:
    """Of one cell.

    Args:
        results: of its last night, an attempt each.
        decisions: of its last night.
        raw: times of its last night; None where there are none.
        flips: of its build in its last night.
        flipped: how many there are in all: lost, won.
        scores: of its build in its last night.
        environments: each that differs from the one before, in the order of the nights.
        errors: (night, attempt, error), the last first.
        failed: how many errors there are in all.
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


def read(store: Store, history: History) -> dict[str, Detail]:
    """Cell -> what its page tells of it."""
    found = {key: Detail() for key in history.cells}
    for night, cell, attempt, error in store.query(
        "SELECT night, cell, attempt, error FROM results WHERE error IS NOT NULL ORDER BY night DESC, attempt DESC"
    ).rows:
        detail = found[cell]
        detail.failed += 1
        if len(detail.errors) < ERRORS:
            detail.errors.append((night, attempt, {str(k): str(v) for k, v in json.loads(error).items()}))
    for night, cell, versions, device in store.query(_ENVIRONMENTS).rows:
        environments = found[cell].environments
        # a night that failed early does not tell all; what it is silent on is as it was
        before = environments[-1].names if environments else {}
        names = {**before, **_names(versions, device)}
        if names != before:
            environments.append(Environment(night, names))
    last = history.last
    for at in sorted(set(last.tolist()) - {-1}):
        members = [key for i, key in enumerate(history.cells) if last[i] == at]
        _night(store, history.nights[at].night, {key: found[key] for key in members})
    return found


# of each cell the nights on which something is another than on the night before
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
# all of them; a text is kept of a few alone, and with the candidate's side alone
_COUNTS = """
SELECT ours.build, count(*) FILTER (WHERE theirs.correct AND NOT ours.correct),
    count(*) FILTER (WHERE ours.correct AND NOT theirs.correct)
FROM (FROM items WHERE night = $night AND attempt = 1 AND side = 'candidate') AS ours
JOIN (FROM items WHERE night = $night AND attempt = 1 AND side = 'baseline') AS theirs USING (build, item)
GROUP BY ours.build
"""


def _night(store: Store, night: str, members: Mapping[str, Detail]) -> None:
    """Fill in what belongs to one night."""
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
    scores: dict[str, list[Score]] = defaultdict(list)
    for build, *score in store.query(_SCORES, night=night).rows:
        scores[build].append(Score(*score))
    counts = {build: (lost, won) for build, lost, won in store.query(_COUNTS, night=night).rows}
    flips = _flips(store.query(_FLIPPED, night=night).rows)
    for cell, build in builds.items():
        detail = members[cell]
        detail.scores = scores.get(build, [])
        every = flips.get(build, [])
        lost, won = [each for each in every if each.lost], [each for each in every if not each.lost]
        detail.flips = lost[:EXAMPLES] + won[:EXAMPLES]
        detail.flipped = counts.get(build, (len(lost), len(won)))


def _flips(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[ItemFlip]]:
    """Build -> the items that flipped and have a text."""
    sides: dict[tuple[str, int], dict[str, tuple[bool | None, str]]] = defaultdict(dict)
    for build, item, side, correct, text in rows:
        sides[build, item][side] = correct, text
    found: dict[str, list[ItemFlip]] = defaultdict(list)
    for (build, item), given in sides.items():
        right = {side: correct for side, (correct, _) in given.items()}
        mine = right.get("candidate", None if "baseline" not in right else not right["baseline"])
        if mine is None or right.get("baseline", not mine) == mine:
            continue
        texts = [(side, text) for side, (_, text) in sorted(given.items())]
        if len({text for _, text in texts}) == 1:
            texts = [("", texts[0][1])]
        found[build].append(ItemFlip(item, not mine, texts))
    return found


def _times(store: Store, night: str, members: Mapping[str, Detail]) -> dict[str, Raw]:
    """The iterations of a night by cell."""
    table = store.arrow(
        "SELECT cell, attempt, side, round, block, seconds, temperature_c, throttled FROM times WHERE night = $night "
        "ORDER BY cell, attempt, round, block, position, began",
        night=night,
    )
    cells = table.column("cell").combine_chunks().dictionary_encode()
    codes = cells.indices.to_numpy()
    sides = table.column("side").combine_chunks().dictionary_encode()
    side = np.array([*sides.dictionary.to_pylist(), ""])[sides.indices.to_numpy()]
    column = {name: table.column(name).to_numpy() for name in ("attempt", "round", "block", "seconds")}
    warm = table.column("temperature_c").to_numpy()
    throttled = table.column("throttled").fill_null(False).to_numpy()
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    found = {}
    for start, end in itertools.pairwise(edges):
        if start == end or (cell := cells.dictionary[int(codes[start])].as_py()) not in members:
            continue
        here = slice(start, end)
        seconds = column["seconds"][here]
        sound = np.isfinite(seconds) & (seconds > 0)
        rounds = _numbered(column["attempt"][here], column["round"][here])
        blocks = _numbered(column["attempt"][here], column["round"][here], column["block"][here])
        degrees = warm[here][np.isfinite(warm[here].astype(float))]
        found[cell] = Raw(
            side[here][sound],
            blocks[sound],
            rounds[sound],
            seconds[sound],
            int((~sound).sum()),
            int(throttled[here].sum()),
            (float(degrees.min()), float(degrees.max())) if degrees.size else None,
            int(rounds[later[0]]) if (later := np.flatnonzero(column["attempt"][here] > 1)).size else None,
        )
    return found


def _numbered(*columns: Array) -> Array:
    """Rows by number, one more wherever any of the columns, which are sorted, changes."""
    changed = np.zeros(len(columns[0]), bool)
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.cumsum(changed)


def _names(versions: str, device: str) -> dict[str, str]:
    """Packages and what is known of the device in one list."""
    found = {f"device.{name}": _plain(value) for name, value in json.loads(device or "{}").items()}
    return found | {name: _plain(value) for name, value in json.loads(versions or "{}").items()}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
