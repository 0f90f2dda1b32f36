"""Three nights of five cells: fine, slower, failed, not reached, and one with a hostile name; written out of order."""

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quantkit.nightly.page import Written, write
from quantkit.nightly.records import Item, NightCell, StoredDecision
from quantkit.nightly.store import Store

from ..conftest import FIRST, SECOND, THIRD, night, result
from ..planted import timed

EVIL = "<script>alert(1)</script>"
FINE, SLOW, BROKEN, AWAY, HOSTILE, RETIRED = (
    NightCell("tiny", "a", "cpu-x86", "onnxruntime", 1),
    NightCell("tiny", "a", "cpu-x86", "onnxruntime", 8),
    NightCell("tiny", "b", "cpu-x86", "onnxruntime", 1),
    NightCell("tiny", "b", "cpu-x86", "onnxruntime", 8),
    NightCell(EVIL, "\"'&", "../../gpu", "tensorrt", 1),
    NightCell("old", "a", "cpu-x86", "onnxruntime", 1),
)
NOW = (FINE, SLOW, BROKEN, AWAY, HOSTILE)
ERROR = {"code": "out-of-memory", "where": "x", "value": f"41 GB {EVIL}", "rule": "", "remedy": ""}


def decided(cell: NightCell, name: str, answer: Any, value: float | None, what: Any = "latency") -> StoredDecision:
    ends = (None, None) if value is None else (value - 0.01, value + 0.01)
    return StoredDecision(name, cell.key, what, answer, value, *ends, margin=0.02, n=40, because=f"for a reason {EVIL}")


def begun(store: Store, name: str, *cells: NightCell) -> None:
    store.begin(night(name, cells))


def done(store: Store, cell: NightCell, name: str, itself: bool = False, **others: Any) -> None:
    sha = {"content_sha256": "c" * 64, "baseline_sha256": ("c" if itself else "b") * 64}
    times = timed(cell, night=name, rounds=2, blocks=2, slower=0.1 if cell == SLOW else 0.0)
    if cell == FINE and name == THIRD:
        times[0] = replace(times[0], seconds=math.nan)
    items = [
        Item(name, cell.build, 1, i, side, (i + (side == "candidate")) % 2 == 0, 0.1, -1.0, 0, f"cat → {EVIL}")
        for i in range(3)
        for side in ("candidate", "baseline")
    ]
    versions = {"onnxruntime": "1.30" if name == FIRST else "1.31", EVIL: "1"}
    about = {"versions": versions, "device": {"name": "a processor"}, "bytes": 100, "baseline_bytes": 100}
    assert store.commit(result(cell, name, **sha, **about, **others), times, items if cell.batch == 1 else ())


def told(path: Path) -> Store:
    """The store."""
    store = Store.open(path, create=True)
    begun(store, THIRD, *NOW)
    begun(store, FIRST, FINE, SLOW, RETIRED)
    begun(store, SECOND, *NOW)
    for name, cells in (
        (FIRST, (FINE, SLOW, RETIRED)),
        (SECOND, (FINE, SLOW, HOSTILE)),
        (THIRD, (FINE, SLOW, HOSTILE)),
    ):
        for cell in cells:
            done(store, cell, name, itself=cell == FINE)
    for name in (SECOND, THIRD):
        store.commit(result(BROKEN, name, "failed", error=ERROR))
    store.decide(FIRST, [decided(each, FIRST, "same", 0.0) for each in (FINE, SLOW, RETIRED)])
    rows = [decided(FINE, SECOND, "same", math.nan), decided(SLOW, SECOND, "worse", 0.08)]
    store.decide(SECOND, [*rows, decided(BROKEN, SECOND, "failed", None), decided(HOSTILE, SECOND, "better", -0.05)])
    rows = [decided(FINE, THIRD, "same", 0.001), decided(SLOW, THIRD, "worse", 0.1)]
    rows += [decided(SLOW, THIRD, "same", 0.0, "accuracy"), decided(HOSTILE, THIRD, "same", 0.0)]
    rows += [decided(HOSTILE, THIRD, "inconclusive", 0.015, "kl"), decided(BROKEN, THIRD, "failed", None)]
    store.decide(THIRD, rows)
    return store


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return told(tmp_path_factory.mktemp("story") / "store")


@pytest.fixture(scope="session")
def site(story: Store) -> Written:
    return write(story, story.path.parent / "site")


class Page(HTMLParser):
    """What a page is made of: (tag, attributes) in order, and its text by tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: (value or "").replace("\u00a0", " ") for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += f"{data.strip()} ".replace("\u00a0", " ") if data.strip() else ""

    def having(self, **wanted: str) -> list[dict[str, str]]:
        """The attributes of the elements whose attribute holds a word."""
        return [
            given
            for _, given in self.tags
            if all(word in given.get(name.strip("_"), "").split() for name, word in wanted.items())
        ]
