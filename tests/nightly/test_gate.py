"""Which nights pass, and what is said of those that do not: to people, and in the files that CI reads."""

import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit import cli
from quantkit.errors import GateError, Inconclusive, InputError
from quantkit.nightly.gate import Gated, append, error, gate, github, gitlab, junit, write
from quantkit.nightly.records import NightCell, StoredDecision
from quantkit.nightly.store import Store

from .conftest import CELLS, FIRST, SECOND, decision, fill, night, result

HOSTILE = 'a|b <b>*x*</b> & "q" \x1b[2J\x00 ](http://e.vil) `c` @all\nnew ü'


def decided(store: Store, *answers: Any, first: tuple[NightCell, ...] = (), name: str = FIRST) -> Gated:
    """A night whose cells got these answers of latency, in order; the others are the same."""
    store.begin(night(name))
    for cell in CELLS:
        store.commit(result(cell, name, seconds=2.5, baseline_sha256=None if cell in first else "b" * 64))
    given = [*answers, *["same"] * (len(CELLS) - len(answers))]
    store.decide(name, [decision(cell, name, answer) for cell, answer in zip(CELLS, given, strict=True) if answer])
    return gate(store)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (("same", "better"), 0),
        (("worse",), 1),
        (("failed",), 1),
        (("inconclusive", "worse", "missing"), 1),
        (("inconclusive",), 3),
        (("missing",), 3),
        ((None,), 3),  # a cell that nothing was decided of
    ],
    ids=str,
)
def test_worse_or_failed_is_1_and_what_is_not_known_is_3(answers: tuple[Any, ...], code: int, store: Store) -> None:
    found = decided(store, *answers)
    assert found.exit == code
    kind = {0: type(None), 1: GateError, 3: Inconclusive}[code]
    assert isinstance(error(found), kind)
    assert isinstance(error(found, allow_inconclusive=True), GateError if code == 1 else type(None))
    assert len(found.decisions) == len(CELLS)


def test_a_first_night_passes_and_says_so(store: Store) -> None:
    found = decided(store, *["inconclusive"] * 4, first=CELLS)
    assert found.exit == 0 and found.counts == {"first": 4}
    # of a cell that had a baseline the same answer is not known
    other = decided(store, "inconclusive", "inconclusive", first=CELLS[:1], name=SECOND)
    assert other.exit == 3
    assert [each.cell for each in other.open] == [CELLS[1].key]


def test_a_baseline_that_does_not_load_is_no_first_night(store: Store) -> None:
    store.begin(night(cells=CELLS[:1]))
    store.commit(result(CELLS[0], flags=("baseline-unloadable: it is gone",)))
    store.decide(FIRST, [decision(CELLS[0], answer="inconclusive")])
    assert gate(store).exit == 3


def test_a_first_night_that_failed_or_drifted_does_not_pass(store: Store) -> None:
    assert decided(store, "failed", first=CELLS).exit == 1
    store.begin(night(SECOND))
    store.commit(result(CELLS[0], SECOND))
    rows = [decision(cell, SECOND) for cell in CELLS]
    store.decide(SECOND, [*rows, decision(CELLS[0], SECOND, "inconclusive", "drift")])
    assert gate(store).exit == 3


def test_a_night_that_was_not_decided_is_missing_whatever_the_one_before_was(store: Store) -> None:
    fill(store)
    assert gate(store).exit == 0
    store.begin(night(SECOND))
    found = gate(store)
    assert (found.night.night, found.exit) == (SECOND, 3)
    assert {each.answer for each in found.decisions} == {"missing"}
    assert gate(store, FIRST).exit == 0


def test_a_night_that_is_not_there_or_whose_row_is_gone_is_an_error(store: Store) -> None:
    with pytest.raises(InputError, match=r"night-missing.*quantkit nightly run"):
        gate(store)
    fill(store)
    with pytest.raises(InputError, match=f"night-missing.*{SECOND}.*the last is {FIRST}"):
        gate(store, SECOND)
    fill(store, SECOND)
    with store._writing() as database:
        database.execute("DELETE FROM nights WHERE night = $1", [SECOND])
    # not yesterday's answer in its place
    with pytest.raises(InputError, match=f"night-damaged.*{SECOND}"):
        gate(Store.open(store.path))
    with pytest.raises(InputError, match="night-damaged"):
        gate(Store.open(store.path), SECOND)
    assert gate(Store.open(store.path), FIRST).exit == 0


@pytest.fixture
def hostile(store: Store) -> Gated:
    """One decision of each kind, reasons that mean something in every format."""
    store.begin(night())
    for cell in CELLS:
        seconds = float("nan") if cell is CELLS[3] else 1e-5
        store.commit(result(cell, seconds=seconds, baseline_sha256="b" * 64))
    answers: tuple[Any, ...] = ("worse", "failed", "inconclusive", "missing")
    rows = [StoredDecision(FIRST, cell.key, "latency", answer, because=HOSTILE) for cell, answer in zip(CELLS, answers)]  # noqa: B905
    store.decide(FIRST, [*rows, decision(CELLS[0], answer="better", what="size")])
    return gate(store)


def test_junit_has_what_its_schemas_ask_for(hostile: Gated) -> None:
    """Those of Ant and Jenkins: elements in order, attributes by name and type."""
    root = ElementTree.fromstring(junit(hostile))
    assert (root.tag, root.attrib) == ("testsuites", {})
    seen: dict[str, str | None] = {}
    for number, suite in enumerate(root):
        assert suite.tag == "testsuite"
        names = {"id", "name", "package", "timestamp", "hostname", "tests", "failures", "errors", "skipped", "time"}
        assert suite.attrib.keys() == names
        assert suite.get("id") == str(number)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
        cases = suite.findall("testcase")
        order = ["properties", *["testcase"] * len(cases), "system-out", "system-err"]
        assert [each.tag for each in suite] == order
        assert all(each.attrib.keys() == {"name", "value"} for each in suite[0])
        inner = [child for case in cases for child in case]
        for case in cases:
            assert case.attrib.keys() == {"classname", "name", "time"} and len(case) <= 1
            assert re.fullmatch(r"\d+\.\d+", case.get("time", ""))
        for child in inner:
            assert child.attrib.keys() == {"message", "type"}
            assert HOSTILE.split(" ", maxsplit=1)[0] in child.get("message", "")
        tags = [child.tag for child in inner]
        assert int(suite.get("tests", "")) == len(cases)
        counted = [int(suite.get(name, "")) for name in ("failures", "errors", "skipped")]
        assert counted == [tags.count(tag) for tag in ("failure", "error", "skipped")]
        seen |= {child.get("type", ""): child.tag for child in inner}
    assert seen == {"worse": "failure", "failed": "error", "inconclusive": "skipped", "missing": "skipped"}
    assert sum(len(suite.findall("testcase")) for suite in root) == 5


def test_gitlab_has_its_fields_and_findings_keep_their_fingerprints(hostile: Gated, tmp_path: Path) -> None:
    config = tmp_path / "nightly.yaml"
    config.write_text("models: [tiny]\nrecipes:\n  - a\n  - b\n")
    found = json.loads(gitlab(hostile, config))
    assert [each["severity"] for each in found] == ["major", "critical", "info", "minor"]
    for each in found:
        assert each.keys() == {"description", "check_name", "fingerprint", "severity", "location"}
        assert each["location"].keys() == {"path", "lines"} and each["check_name"] == "quantkit-nightly-latency"
        assert "\x1b" not in each["description"]
    assert [each["location"]["lines"] for each in found] == [{"begin": 3}, {"begin": 3}, {"begin": 4}, {"begin": 4}]
    assert len({each["fingerprint"] for each in found}) == 4
    again = json.loads(gitlab(hostile, tmp_path / "elsewhere.yaml"))
    assert [each["fingerprint"] for each in again] == [each["fingerprint"] for each in found]
    assert {each["location"]["lines"]["begin"] for each in again} == {1}


def test_gitlab_of_a_night_that_is_fine_is_an_empty_list(store: Store, tmp_path: Path) -> None:
    fill(store)
    assert json.loads(gitlab(gate(store), tmp_path / "nightly.yaml")) == []


def test_github_s_table_holds_what_means_something_there(hostile: Gated) -> None:
    text = github(hostile)
    rows = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 4
    assert all(row.count("|") == 9 for row in rows)
    assert not set("*`@[]~\\") & set("".join(rows).replace("&#", ""))
    assert "<b>" not in text and "&lt;b&gt;" in text and "❌" in text
    assert "1 failed, 1 worse" in text


def test_github_s_table_is_bounded(store: Store) -> None:
    cells = tuple(NightCell("tiny", f"r{i}", "cpu-x86", "onnxruntime", 1) for i in range(300))
    store.begin(night(cells=cells))
    store.decide(FIRST, [StoredDecision(FIRST, each.key, "latency", "failed", because="x" * 5000) for each in cells])
    text = github(gate(store))
    assert len(text.encode()) < 300_000 and "And 200 more" in text


def test_the_command_writes_its_files_whatever_the_answer(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided(store, "worse", "inconclusive")
    summary = tmp_path / "summary.md"
    summary.write_text("what was there\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    junit, gitlab = tmp_path / "new" / "junit.xml", tmp_path / "gl.json"
    files = ["--junit", str(junit), "--gitlab", str(gitlab)]
    assert cli.run(["nightly", "gate", "--store", str(store.path), *files, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["error"]["code"]) == ("nightly gate", "worse")
    assert found["result"]["counts"] == {"worse": 1, "inconclusive": 1, "same": 2}
    assert [each["cell"] for each in found["result"]["alarms"]] == [CELLS[0].key]
    assert "testcase" in junit.read_text()
    assert len(json.loads(gitlab.read_text())) == 2
    assert summary.read_text().startswith("what was there\n## ❌ Night")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gl.json", "new", "store", "summary.md"]


def test_the_command_s_exit_and_its_warning(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    decided(store, "inconclusive")
    arguments = ["nightly", "gate", "--store", str(store.path)]
    assert cli.run(arguments) == 3
    assert "[inconclusive]" in capsys.readouterr().err
    assert cli.run([*arguments, "--allow-inconclusive"]) == 0
    decided(store, *["inconclusive"] * 4, first=CELLS, name=SECOND)
    assert cli.run([*arguments, "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"]
    assert warning.startswith("4 cells had no baseline yet")


def test_a_file_that_cannot_be_written_is_an_error(store: Store, tmp_path: Path) -> None:
    for writes in (lambda: write(tmp_path, b"x"), lambda: append(tmp_path / "nowhere" / "x", "x")):
        with pytest.raises(InputError, match="file-unwritable"):
            writes()  # type: ignore[no-untyped-call]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As `--junit /dev/stdout` would be, by root, for all that run there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, b"x")
    assert os.read(reader, 2) == b"x" and pipe.is_fifo()
    os.close(reader)


def test_json_has_no_nan(store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    store.begin(night())
    for cell in CELLS:
        store.commit(result(cell))
    store.decide(FIRST, [StoredDecision(FIRST, CELLS[0].key, "latency", "worse", float("nan"), high=float("inf"))])
    assert cli.run(["nightly", "gate", "--store", str(store.path), "--json"]) == 1
    (alarm,) = json.loads(capsys.readouterr().out)["result"]["alarms"]
    assert alarm["value"] is None and alarm["high"] is None
