"""`quantkit batch`: all jobs are checked before one runs, a finished one is not repeated, a failed one is told."""

import json
import os
from pathlib import Path
from typing import Any

import planted
import pytest
import yaml
import zoo

from quantkit.bundle import content_sha256, inventory
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.cli import run
from quantkit.measurement.rows import Baseline, write_rows
from quantkit.pipeline.many.batch import BatchRun
from quantkit.pipeline.many.jobs import contained

RECIPE = {
    "summary": "a test",
    "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": ["rtn"],
    "export": [{"checkpoint": {}}],
}

JOB = {"model": "./tiny", "recipe": "./own.yaml"}


@pytest.fixture
def home(tmp_path: Path, byte_tokenizer: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zoo.save(tmp_path / "tiny", byte_tokenizer, "llama", vocab_size=258, num_hidden_layers=1)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"schema": 1, **RECIPE}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(home: Path, **changes: Any) -> Path:
    told = {"models": ["./tiny"], "recipes": ["./own.yaml"], "speed": False, "vllm": False, "out": "out", **changes}
    (home / "jobs.yaml").write_text(yaml.safe_dump({key: value for key, value in told.items() if value is not None}))
    return home / "jobs.yaml"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = run([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_table_of_all_jobs_and_called_again_only_what_failed_runs(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"model": "./tiny", "recipe": "./own.yaml", "name": "odd", "set": ["scheme.weights.group=48"]}
    eights = {**odd, "name": "eights", "set": ["scheme.weights.format=int8"]}
    strict = {**odd, "name": "strict", "set": ["gates.kl_max=0"]}
    path = write(home, jobs=[odd, eights, strict], set=["seed=1"])
    code, told = said(capsys, "batch", path)
    rows = {row["job"]: row for row in told["result"]["jobs"]}
    assert [row["state"] for row in rows.values()] == ["done", "failed", "done", "gate-failed"]
    assert rows["odd"]["error"]["code"] == "group-indivisible" and rows["strict"]["error"]["code"] == "gate-failed"
    assert (code, told["error"]["code"]) == (2, "jobs-failed") and "odd" in told["error"]["value"]
    assert "2 of 4 jobs" in told["error"]["value"]
    assert rows["eights"]["kl"] < rows["tiny--own"]["kl"] and rows["tiny--own"]["kl_ci95"] is not None
    assert rows["eights"]["bits_per_weight"] > 8 and rows["tiny--own"]["seconds"] > 0
    assert rows["tiny--own"]["node"] == os.uname().nodename and (home / "out" / "tiny--own" / "manifest.json").exists()
    # again, with the wrong one corrected: the others are not even opened
    began: list[str] = []
    monkeypatch.setattr(
        "quantkit.pipeline.many.executors.contained",
        lambda job, *given, **named: began.append(job.name) or contained(job, *given, **named),  # type: ignore[func-returns-value]
    )
    path = write(home, jobs=[{**odd, "set": ["scheme.weights.group=16"]}, eights, strict], set=["seed=1"])
    code, again = said(capsys, "batch", path)
    assert began == ["odd"]
    assert (code, again["error"]["code"]) == (1, "jobs-failed")
    kept = [row for row in again["result"]["jobs"] if row["job"] != "odd"]
    assert kept == [row for row in rows.values() if row["job"] != "odd"]
    assert run(["batch", str(path)]) == 1
    out = capsys.readouterr()
    assert "gate-failed" in out.out and "KL" in out.out and out.err.count("error: [jobs-failed]") == 1
    # three rows of one model and one recipe are told apart by their names
    assert all(f"({name})" in out.out for name in ("odd", "eights", "strict")) and "(tiny--own)" not in out.out


def test_a_finished_bundle_has_its_figures_in_the_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted ones: only what was timed has a speed-up."""
    place = home / "out" / "tiny--own"
    (place / "model").mkdir(parents=True)
    (place / "model" / "model.safetensors").write_text("weights")
    faster = Baseline(subject="float", value=0.02, ratio=2.0, ratio_ci95=(1.9, 2.1))
    timed = {
        "name": "latency.decode_step",
        "value": 0.01,
        "unit": "s",
        "batch": 1,
        "baseline": faster,
        "aa_spread": 0.0,
    }
    write_rows(place / MEASUREMENTS, [*planted.rows(), planted.rows()[-1].model_copy(update=timed)])
    files = inventory(place)
    manifest = planted.manifest(
        files=[file.model_dump(by_alias=True) for file in files],
        verdict={"answer": "ship", "because": ["it is faster"]},
    )
    (place / MANIFEST).write_bytes(manifest.model_copy(update={"content_sha256": content_sha256(files)}).as_bytes())
    (job,) = BatchRun.load(write(home), trust_remote_code=False, allow_code=False).jobs
    (home / "out" / "jobs").mkdir()
    (home / "out" / "jobs" / "tiny--own.json").write_text(
        json.dumps({"inputs": job.inputs, "seconds": 61.4, "node": "n1"})
    )
    code, told = said(capsys, "batch", home / "jobs.yaml")
    (row,) = told["result"]["jobs"]
    assert (row["speed_ratio"], row["speed_ratio_ci95"]) == (2.0, [1.9, 2.1])
    assert (code, row["seconds"], row["node"]) == (row["exit"], 61.4, "n1")
    assert run(["batch", str(home / "jobs.yaml")]) == code
    out = capsys.readouterr().out
    assert "61\u00a0s" in out and row["verdict"].split()[0] in out and "not timed" not in out


def test_a_half_done_job_goes_on_and_a_bundle_without_a_record_is_taken(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(home)
    assert said(capsys, "batch", path)[0] == 0
    (home / "out" / "jobs" / "tiny--own.json").write_text("damaged")
    code, told = said(capsys, "batch", path)
    assert (code, told["result"]["jobs"][0]["state"]) == (0, "done")
    (home / "out" / "new.partial").mkdir()
    listed = said(
        capsys, "batch", write(home, jobs=[{"model": "./tiny", "recipe": "./own.yaml", "name": "new"}]), "--dry-run"
    )
    assert [row["state"] for row in listed[1]["result"]["jobs"]] == ["done", "half-done"]
    assert run(["batch", str(path), "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tiny ")]
    assert [(row[1], row[-1]) for row in rows] == [("own", "done"), ("own", "half-done")] and rows[1][2] == "(new)"


def test_a_model_that_changed_since_is_no_finished_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(home)
    assert said(capsys, "batch", path)[0] == 0
    code, told = said(capsys, "batch", write(home, strict=True), "--dry-run")
    assert (code, told["error"]["code"]) == (2, "out-exists")
    path = write(home)
    weights = home / "tiny" / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    code, told = said(capsys, "batch", path)
    assert (code, told["error"]["code"]) == (2, "out-exists") and "job 1" in told["error"]["where"]
    # the remedy
    assert said(capsys, "batch", write(home, out="other"))[0] == 0


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        (
            {"jobs": [{**JOB, "name": f"n{number}"} for number in range(5)] + [{**JOB, "recipe": "int44"}]},
            "unknown-recipe",
            "job 7",
        ),
        ({"models": ["./tiny", "smollm2-135n"]}, "unknown-model", "job 2 (smollm2-135n"),
        ({"models": ["./missing"]}, "file-missing", "job 1"),
        ({"jobs": [JOB]}, "batch-invalid", "job 2"),
        ({"models": None}, "batch-invalid", "jobs.yaml"),
        ({"models": None, "recipes": None}, "batch-invalid", "jobs.yaml"),
        ({"recipe": "rtn-int4"}, "batch-invalid", "recipe"),
        ({"jobs": [{**JOB, "name": "jobs"}]}, "batch-invalid", "job 2"),
        ({"jobs": [{**JOB, "name": "../up"}]}, "batch-invalid", "jobs.0.name"),
        ({"set": ["scheme.weights.grop=1"]}, "recipe-invalid", "job 1"),
        ({"device": "gpu"}, "unknown-device", "job 1"),
        ({"calibration": "./nothing.txt"}, "file-missing", "job 1"),
    ],
)
def test_all_jobs_are_checked_before_one_starts(
    changes: dict[str, Any], code: str, where: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, told = said(capsys, "batch", write(home, **changes))
    assert (exit_code, told["error"]["code"]) == (2, code), told["error"]
    assert where in told["error"]["where"]
    assert not (home / "out").exists()
    if changes.get("jobs", [JOB])[0].get("name") == "jobs":
        assert "the batch's records" in told["error"]["value"]


def test_a_folder_of_somebody_else_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "out" / "tiny--own").mkdir(parents=True)
    code, told = said(capsys, "batch", write(home))
    assert (code, told["error"]["code"]) == (2, "out-exists")


def test_a_batch_that_is_interrupted_keeps_what_is_done(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, prepare: Any) -> None: ...

        def run(self, jobs: Any, work: Any, progress: Any) -> Any:
            yield contained(jobs[0], work, progress)
            raise KeyboardInterrupt

    path = write(home, jobs=[{**JOB, "name": "second"}])
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.pipeline.many.executors.Local", Interrupted)
        code, told = said(capsys, "batch", path)
    assert (code, told["error"]["code"]) == (75, "interrupted")
    code, told = said(capsys, "batch", path)
    assert (code, [row["state"] for row in told["result"]["jobs"]]) == (0, ["done", "done"])
