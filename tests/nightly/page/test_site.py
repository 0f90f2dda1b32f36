"""The site as files: what is on it, what it may do, what is written again."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.nightly.page import Written, index, write
from quantkit.nightly.store import Store

from ..conftest import CELLS, FIRST, SECOND, THIRD, fill, night, result
from .conftest import AWAY, BROKEN, EVIL, FINE, HOSTILE, RETIRED, SLOW, Page, decided, done


def page_of(site: Written, cell: Any) -> Page:
    return Page(site.path.parent / index.href(cell.key))


def test_the_grid_has_every_cell_of_the_last_night_the_worst_first(site: Written) -> None:
    front = Page(site.path)
    tiles = front.having(class_="tile")
    shown = [(each["data-key"], each["class"].split()[1]) for each in tiles]
    assert set(shown) == {
        (SLOW.key, "worse"),
        (BROKEN.key, "failed"),
        (AWAY.key, "missing"),
        (HOSTILE.key, "inconclusive"),
        (FINE.key, "same"),
    }
    assert shown[0] == (FINE.key, "same")  # beside the worst: a row is a model and its recipe
    assert [key for key, _ in shown].index(SLOW.key) < [key for key, _ in shown].index(BROKEN.key)
    by_key = {each["data-key"]: each["aria-label"] for each in tiles}
    assert by_key[SLOW.key] == "tiny · a · cpu-x86 · onnxruntime · batch 8: worse, +10.0 %"
    assert "inconclusive kl, +0.0150 nats" in by_key[HOSTILE.key]
    assert "1 worse, 1 failed of 5 cells" in front.text
    assert site.verdict == "1 worse, 1 failed of 5 cells"


def test_what_alarms_is_spelled_out(site: Written) -> None:
    text = Page(site.path).text
    assert "latency +10.0 % (95 % +9.0 to +11.0 %), allowed 2.0 %; 2 nights in a row" in text
    assert "out-of-memory: 41 GB" in text
    assert "cells compared with themselves: 1; called different: 0. Their median ratio was +0.1 %." in text


def test_every_link_leads_somewhere_and_nothing_is_asked_of_a_network(site: Written) -> None:
    folder = site.path.parent
    pages = [site.path, *(folder / "cells").iterdir()]
    assert len(pages) + 2 == site.files == 9
    for path in pages:
        page = Page(path)
        for tag, given in page.tags:
            assert not any(name.startswith("on") for name in given), (path, tag, given)
            for name in ("href", "src"):
                if name in given and tag != "use" and given[name] != "data:,":
                    target, _, place = given[name].partition("#")
                    assert (path.parent / target.partition("?")[0]).exists(), given
                    assert not place or page.having(id=place), given
        ids = [given["id"] for _, given in page.tags if "id" in given]
        assert len(ids) == len(set(ids))
        assert page.having(id="main")
        policies = [given["content"] for _, given in page.tags if given.get("http-equiv") == "Content-Security-Policy"]
        assert [policy.startswith("default-src 'none'; ") for policy in policies] == [True]
        assert "http" not in page.source.replace("http-equiv", "")


def test_what_comes_from_models_is_escaped(site: Written) -> None:
    for path in [site.path, *(site.path.parent / "cells").iterdir()]:
        page = Page(path)
        assert "<script>alert" not in page.source
        scripts = [given for tag, given in page.tags if tag == "script"]
        assert all(given.get("type") == "application/json" or "site.js" in given["src"] for given in scripts)
    assert EVIL in page_of(site, HOSTILE).text
    assert ".." not in index.href(HOSTILE.key)


def test_a_cell_that_is_worse_tells_all(site: Written) -> None:
    page = page_of(site, SLOW)
    assert "Worse: Latency +10.0 %" in page.text and "The same for 2 nights in a row." in page.text
    median = re.search(r"candidate, median (\d+\.\d)\sms", page.text)
    assert median
    assert float(median[1]) == pytest.approx(22, abs=0.5)  # of 20 ms, made 10 % slower
    assert "4 blocks; their median is +" in page.text and "onnxruntime 1.30 → 1.31" in page.text
    assert "Nothing has changed since 2026-01-02 03:00" in page.text and "100 B (100 bytes)" in page.text
    (told, *_) = re.findall(r'<script type="application/json">(.*?)</script>', page.source)
    assert json.loads(told)["rows"][0][1][-1].replace("\u00a0", " ") == "worse, +10.0 % (+9.0 to +11.0 %)"


def test_a_cell_with_flips_and_broken_times(site: Written) -> None:
    page = page_of(site, FINE)
    assert "2 lost, 1 won" in page.text
    assert page.text.count("cat → <script>alert(1)</script>") == 3
    assert "1 time left out: NaN, infinite or not positive" in page.text


def test_a_cell_that_failed_and_one_without_data(site: Written) -> None:
    failed = page_of(site, BROKEN)
    assert failed.text.count("out-of-memory") >= 2
    assert failed.having(class_="bad")
    assert {"2026-01-02 03:00:", "2026-01-03 03:00:"} <= set(re.findall(r"[-\d]+ \d\d:\d\d:", failed.text))
    away = page_of(site, AWAY)
    assert "Missing" in away.text and "The night has no result for this cell" in away.text
    assert "No night has measured this cell yet." in away.text


def test_a_cell_that_the_last_night_had_not_keeps_its_page(site: Written) -> None:
    assert {"href": index.href(RETIRED.key)} in [given for tag, given in Page(site.path).tags if tag == "a"]
    assert "2026-01-01 03:00" in page_of(site, RETIRED).text


def test_only_what_changed_is_written_again(story: Store, tmp_path: Path) -> None:
    store = Store.open(shutil.copytree(story.path, tmp_path / "store"))
    first = write(store, tmp_path / "site")
    assert first.changed == first.files
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "site").rglob("*.*")}
    assert write(store, tmp_path / "site").changed == 0
    done(store, AWAY, THIRD)
    again = write(store, tmp_path / "site")
    after = {path for path, stamp in before.items() if path.stat().st_mtime_ns != stamp}
    # measured and not decided: the grid shows it as before
    assert after == {tmp_path / "site" / index.href(AWAY.key)}
    assert again.changed == 1
    assert not list((tmp_path / "site").rglob(".*"))


def test_nothing_alarming_is_said_in_one_line(store: Store, tmp_path: Path) -> None:
    fill(store)
    store.begin(night(SECOND))
    for cell in CELLS:
        store.commit(result(cell, SECOND, baseline_sha256="b" * 64))
    store.decide(SECOND, [decided(cell, SECOND, "same", 0.0) for cell in CELLS])
    written = write(store, tmp_path / "site")
    assert written.verdict == "Nothing alarming"
    page = Page(written.path)
    assert "Nothing alarming." in page.text and "4 cells: 4 same." in page.text and not page.having(id="alarms")


def test_a_first_night_is_called_one(store: Store, tmp_path: Path) -> None:
    fill(store)
    store.decide(FIRST, [decided(cell, FIRST, "inconclusive", None) for cell in CELLS])
    assert write(store, tmp_path / "site").verdict == "The first night"


def test_a_store_without_nights(store: Store, tmp_path: Path) -> None:
    written = write(store, tmp_path / "site")
    assert written.verdict == "No night has run yet"
    assert (tmp_path / "site/index.html").exists()


def test_somebody_s_own_page_is_not_written_over(store: Store, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    with pytest.raises(InputError) as caught:
        write(store, tmp_path)
    assert caught.value.code == "out-exists"
    assert [path.name for path in tmp_path.glob("*.*")] == ["index.html"]


def test_a_folder_that_cannot_be_written(store: Store, tmp_path: Path) -> None:
    (tmp_path / "site").write_text("a file")
    with pytest.raises(InputError) as caught:
        write(store, tmp_path / "site")
    assert caught.value.code == "file-unwritable"
