"""`quantkit nightly`: a group of commands, and what each of them says."""

import csv
import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quantkit.nightly import gate
from quantkit.nightly.records import Night, NightCell, Result, StoredDecision
from quantkit.nightly.store import QueryRows, Store

NIGHT = "20260101T030000Z-000001"
CELL = NightCell("tiny", "a", "cpu-x86", "onnxruntime", 1)
CONFIG = "models: [smollm2-135m]\nrecipes: [rtn-int4]\ntargets: [cpu-x86]\nstore: kept\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One cell, which was called worse."""
    store = Store.open(tmp_path / "kept", create=True)
    store.commit(Result.of(NIGHT, CELL, "done", seconds=float("nan")))
    store.decide(NIGHT, [StoredDecision(NIGHT, CELL.key, "latency", "worse", 0.05)])
    return store


def test_a_group_lists_its_commands(quantkit: Any) -> None:
    ran = quantkit("nightly")
    assert ran.code == 0
    assert "  query  " in ran.out
    assert quantkit("nightly", "--help").out == ran.out


def test_errors_name_the_command_of_the_group(quantkit: Any) -> None:
    ran = quantkit("nightly", "qeury", "FROM nights", "--json")
    assert (ran.code, ran.envelope["command"]) == (2, "nightly qeury")
    assert ran.envelope["error"]["where"] == "quantkit nightly"
    assert "query" in ran.envelope["error"]["value"]
    ran = quantkit("nightly", "query", "--json")
    assert ran.envelope["command"] == "nightly query"
    assert ran.envelope["error"]["where"] == "quantkit nightly query"


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["nightly", "query", "FROM nights", "--store", "x"], "pyarrow", "nightly"),
        (["nightly", "query", "FROM nights", "--store", "x"], "duckdb", "nightly"),
        (["nightly", "query", "FROM nights", "--store", "x"], "torch", "compile"),
        (["list"], "pyarrow", "compile"),
    ],
)
def test_a_missing_package_names_the_extra_of_its_command(
    arguments: list[str], package: str, extra: str, quantkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.report import catalog

    def fail(*_: object, **__: object) -> object:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(catalog, "listing", fail)
    monkeypatch.setattr(Store, "open", fail)
    ran = quantkit(*arguments)
    assert ran.code == 2
    assert f"pip install -e '.[{extra}]'" in ran.err


def test_a_question_and_its_answer(store: Store, quantkit: Any) -> None:
    ran = quantkit("nightly", "query", "SELECT cell, answer, value FROM decisions", "--store", store.path)
    assert ran.code == 0
    assert all(word in ran.out for word in ("answer", "worse", CELL.key, "0.05", "1 row"))
    found = quantkit("nightly", "query", "results", "--store", store.path, "--json").envelope
    assert found["command"] == "nightly query"
    (row,) = found["result"]["rows"]
    assert list(row) == found["result"]["columns"]
    assert (row["cell"], row["seconds"]) == (CELL.key, None)
    assert quantkit("nightly", "query", "SELECT 1 WHERE false", "--store", store.path).out.startswith("0 rows")


def test_the_store_is_the_one_that_the_file_names(store: Store, quantkit: Any) -> None:
    config = store.path.parent / "nightly.yaml"
    config.write_text(f"{CONFIG}baseline: {{bundle: ./deleted}}\n")  # what is kept can be asked without it
    asked = "SELECT answer FROM decisions"
    ran = quantkit("nightly", "query", asked, config)
    assert (ran.code, "worse" in ran.out) == (0, True)
    assert quantkit("nightly", "query", config, asked).out == ran.out
    ran = quantkit("nightly", "query", asked, config.with_name("other.yaml"))
    assert ran.code == 2
    assert "other.yaml" in ran.err


def test_what_reads_the_store_alone_needs_no_model_s_packages(
    store: Store, without_packages: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The job that holds back has the small install."""
    store.begin(Night(NIGHT, datetime(2026, 1, 1, 3, tzinfo=UTC), None, "", "here", (CELL.key,)))
    done = without_packages("nightly", "gate", "--store", str(store.path), "--junit", str(store.path.parent / "j.xml"))
    assert done.returncode == 1, done.stderr
    assert "[worse]" in done.stderr


def test_it_is_written_as_csv_or_json(store: Store, quantkit: Any, tmp_path: Path) -> None:
    for name in ("x.csv", "x.json"):
        out = tmp_path / name
        ran = quantkit("nightly", "query", "decisions", "--store", store.path, "--out", out, "--json")
        assert ran.envelope["result"] == {"out": str(out), "rows": 1}
        text = out.read_text()
        rows = json.loads(text) if out.suffix == ".json" else list(csv.DictReader(text.splitlines()))
        assert [row["answer"] for row in rows] == ["worse"]
    ran = quantkit("nightly", "query", "decisions", "--store", store.path, "--out", tmp_path / "x.xlsx")
    assert ran.code == 2
    assert ".csv" in ran.err


@pytest.mark.parametrize(
    ("name", "code"),
    [("store.json", "store-invalid"), ("nights.duckdb", "store-invalid"), (None, "store-missing")],
    ids=["Parquet", "damaged", "missing"],
)
def test_a_store_that_cannot_be_read_is_left_as_it_is(
    name: str | None, code: str, store: Store, quantkit: Any, tmp_path: Path
) -> None:
    store.file.unlink()
    if name is not None:
        (store.path / name).write_text('{"schema": 1}')
    before = sorted(store.path.rglob("*"))
    config = tmp_path / "n.yaml"
    ran = quantkit("nightly", "query", "decisions", config, "--store", store.path)
    assert ran.code == 2
    assert ran.err.startswith(f"error: [{code}] {store.path}")
    assert sorted(store.path.rglob("*")) == before
    if name == "store.json":
        remedy = f"`mv {store.path} {store.path}.parquet && quantkit nightly run {config}` makes a new one"
        assert remedy in " ".join(ran.err.split())


def test_rows_that_are_too_wide_stand_under_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from quantkit.report.kit.screen import write

    def text(found: QueryRows) -> str:
        out = StringIO()
        write(gate.rows(found), out)
        return out.getvalue()

    monkeypatch.setenv("COLUMNS", "40")
    assert text(QueryRows(("a", "b"), [("x", None)])).splitlines() == ["a  b", "x  –", "1 row"]
    wide = text(QueryRows(("first", "second"), [("x" * 30, ["y\x1b[2J"]), ("z", 1)])).splitlines()
    assert wide[0] == f"first   {'x' * 30}"
    assert "second" in wide[1]
    assert "\x1b" not in wide[1]
    many = text(QueryRows(("a",), [(i,) for i in range(200)])).splitlines()
    assert many[: gate.MOST + 1][-1] == str(gate.MOST - 1)
    assert many[gate.MOST + 1].startswith(f"the first {gate.MOST} of 200 rows")


def test_a_page_is_written_whatever_the_night_found(store: Store, quantkit: Any) -> None:
    config = store.path.parent / "nightly.yaml"
    config.write_text(f"{CONFIG}page: public\n")
    ran = quantkit("nightly", "page", config, "--json")
    assert ran.code == 0
    found = ran.envelope["result"]
    assert (found["verdict"], found["cells"], found["nights"]) == ("1 worse of 1 cell", 1, 1)
    assert Path(found["path"]) == config.parent / "public" / "index.html"
    assert "is gone" in ran.envelope["warnings"][0]  # the night never began
    ran = quantkit("nightly", "page", "--store", store.path, "--out", config.parent / "public")
    assert (ran.code, "0 files of 4 written" in ran.out) == (0, True)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(f"{CONFIG}set: ['export=[{{onnx: {{dialect: onnxruntime}}}}]']\nbatches: [1, 8]\n")
    return path


def test_a_dry_run_says_which_cells_there_are_and_writes_nothing(config: Path, quantkit: Any) -> None:
    ran = quantkit("nightly", "run", config, "--dry-run", "--json")
    assert ran.code == 0 and ran.envelope["command"] == "nightly run"
    cells = [each["cell"] for each in ran.envelope["result"]["cells"]]
    assert cells == [f"smollm2-135m|rtn-int4|cpu-x86|onnxruntime|{batch}" for batch in (1, 8)]
    said = quantkit("nightly", "run", config, "--dry-run", "--only", "*|8").out
    assert "1 row of 1 build" in said and "known after the first cell" in said
    assert list(config.parent.glob("kept")) == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--resume"], "nothing-to-resume"),
        (["--only", "nothing"], "no-such-cells"),
        (["--executor", "rai"], "usage"),
        (["--dry-run", "--executor", "rai"], "usage"),
    ],
)
def test_a_night_that_cannot_begin_is_refused(options: list[str], code: str, config: Path, quantkit: Any) -> None:
    ran = quantkit("nightly", "run", config, *options, "--json")
    assert (ran.code, ran.envelope["error"]["code"]) == (2, code)


def test_a_night_says_what_was_answered_and_exits_0_whatever_that_is(
    config: Path, quantkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.nightly.records import BuildJob
    from quantkit.pipeline.many import executors
    from quantkit.pipeline.many.jobs import JobOutcome

    class Failing:
        def __init__(self, prepare: Any) -> None: ...

        def ready(self) -> None: ...

        def run(self, jobs: list[BuildJob], work: Any, progress: Any) -> Any:
            store = Store.open(config.parent / "kept")
            for job in jobs:
                store.commit(Result.of(job.night, NightCell.of(job.cells[0]), "done", bytes=10, seconds=61.0))
                yield JobOutcome(job, "failed", {"code": "process-died", "value": "SIGKILL"})

    monkeypatch.setattr(executors, "Local", Failing)
    ran = quantkit("nightly", "run", config, "--json")
    assert ran.code == 0
    assert [each["state"] for each in ran.envelope["result"]["cells"]] == ["done", "failed"]
    assert ran.envelope["result"]["answers"]["failed"] == 1
    out = quantkit("nightly", "run", config).out
    assert "model smollm2-135m, recipe rtn-int4, target cpu-x86, runtime onnxruntime" in out
    assert "failed" in out and "SIGKILL" in out and "1 min" in out


def test_the_remedy_of_a_store_of_parquet_files_makes_a_new_one(
    config: Path, quantkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.pipeline.many import executors
    from quantkit.pipeline.many.jobs import JobOutcome

    class Failing:
        def __init__(self, prepare: Any) -> None: ...

        def ready(self) -> None: ...

        def run(self, jobs: Any, work: Any, progress: Any) -> Any:
            return (JobOutcome(job, "failed", {"code": "process-died", "value": "SIGKILL"}) for job in jobs)

    monkeypatch.setattr(executors, "Local", Failing)
    (config.parent / "kept").mkdir()
    (config.parent / "kept" / "store.json").write_text('{"schema": 1, "quantkit": "0.1.0"}')
    remedy = quantkit("nightly", "run", config, "--json").envelope["error"]["remedy"]
    move, _, run = remedy.split("`")[1].partition(" && quantkit ")
    subprocess.run(move.split(), check=True)
    ran = quantkit(*run.split())
    assert ran.code == 0, ran.err
    assert [path.name for path in (config.parent / "kept").iterdir()] == ["nights.duckdb"]
