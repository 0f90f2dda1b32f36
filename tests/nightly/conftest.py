"""Small nights."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quantkit.nightly.records import Item, Night, NightCell, Result, StoredDecision, Time
from quantkit.nightly.store import Store

FIRST, SECOND, THIRD = (f"202601{day:02d}T030000Z-{day:06x}" for day in (1, 2, 3))
CELLS = tuple(NightCell("tiny", recipe, "cpu-x86", "onnxruntime", batch) for recipe in ("a", "b") for batch in (1, 8))


def night(name: str = FIRST, cells: tuple[NightCell, ...] = CELLS) -> Night:
    started = datetime.strptime(name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return Night(name, started, "c0ffee", "ab" * 32, "builder", tuple(each.key for each in cells))


def times(cell: NightCell, name: str = FIRST, attempt: int = 1, n: int = 4) -> list[Time]:
    sides = ("candidate", "baseline")
    return [
        Time(name, cell.key, attempt, sides[i % 2], 0, i // 4, i, (1 + i) * cell.batch * 1e-3, 1.7e9 + i)  # type: ignore[arg-type]
        for i in range(n)
    ]


def items(cell: NightCell, name: str = FIRST, attempt: int = 1) -> list[Item]:
    return [Item(name, cell.build, attempt, i, "candidate", i % 2 == 0, 0.1, -1.0, 0) for i in range(3)]


def result(cell: NightCell, name: str = FIRST, state: Any = "done", attempt: int = 1, **others: Any) -> Result:
    return Result.of(name, cell, state, attempt=attempt, **others)


def decision(cell: NightCell, name: str = FIRST, answer: Any = "same", what: Any = "latency") -> StoredDecision:
    return StoredDecision(name, cell.key, what, answer, 1.01)


def fill(store: Store, name: str = FIRST, cells: tuple[NightCell, ...] = CELLS) -> None:
    """A night: every cell, the items with the first of a build, all of it fine."""
    store.begin(night(name, cells))
    for cell in cells:
        assert store.commit(result(cell, name), times(cell, name), items(cell, name) if cell.batch == 1 else ())
    store.decide(name, [decision(cell, name) for cell in cells])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)
