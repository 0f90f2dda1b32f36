"""`benchmarks/gpu/run_all.py`: dry, in the interpreter, without what a GPU machine lacks; what it keeps at its end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux alone has it


from quantkit.kernels.dispatch import KernelTiming, Table  # noqa: E402
from quantkit.measurement.rows import Row  # noqa: E402

HERE = Path(__file__).parents[2] / "benchmarks/gpu"
# read by every Python that starts: the machine has no more than torch, Triton and NumPy
MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "yaml", "rich", "transformers", "gguf", "scipy", "bitsandbytes"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
PLANTED = """
import os, signal, sys, time
def crash(job, caller):
    caller.row(["kept", job["stage"]])
    os.kill(os.getpid(), signal.SIGKILL)
def hang(job, caller):
    caller.row(["kept", job["stage"]])
    time.sleep(600)
def fail(job, caller):
    caller.row(["kept", job["stage"]])
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def fine(job, caller):
    caller.row(["skipped", {"fine": job["stage"]}])
def stopped(job, caller):
    fine(job, caller)
    time.sleep(0.2)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
def main(stages):
    import run_all
    known = {name: run_all.STAGES[name] if not work else run_all.Stage(globals()[work], seconds)
             for name, work, seconds in stages}
    sys.exit(run_all.main(sys.argv[1:], known))
"""


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run imports by its own names."""
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "sitecustomize.py").write_text(MISSING)
    (folder / "gpu_plants.py").write_text(PLANTED)
    return folder


def ran(folder: Path, stages: list[tuple[str, str, float]], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with these stages: name, what is planted there or nothing, seconds."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # a dry run sees to that
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")])
    program = f"import gpu_plants; gpu_plants.main({stages!r})"
    command = [sys.executable, "-c", program, "--dry", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def states(record: dict[str, Any]) -> dict[str, str]:
    return {stage["stage"]: stage["state"] for stage in record["stages"]}


@pytest.fixture(scope="module")
def out(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a whole run, in which one stage died, one hung and one failed."""
    folder = tmp_path_factory.mktemp("gpu") / "results"
    names = ("compile", "correct", "race", "solvers", "ceilings", "tax", "sweep", "profile", "steps", "model")
    plants = {"race": ("crash", 60.0), "ceilings": ("hang", 0.7), "steps": ("fail", 60.0)}
    stages = [(name, *plants.get(name, ("", 0.0))) for name in names]
    done = ran(planted, stages, "--dtype", "fp16", "--out", str(folder))
    assert done.returncode == 2, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "run.json").read_text())
    return loaded


class Told:
    """A stage in this process: the sections of what it tells."""

    def __init__(self, stage: str, out: Path) -> None:
        self.sections: dict[str, list[Any]] = {}
        work = import_module("parts.stages")
        job = {"stage": stage, "results": str(out), "dry": True, "dtype": "fp16", "blocks": 1, "soft": 600.0}
        getattr(work, stage)(job, self)

    def row(self, row: list[Any]) -> None:
        json.dumps(row, allow_nan=False)
        self.sections.setdefault(row[0], []).append(row[1])


@pytest.mark.thorough
def test_a_crash_a_hang_and_an_error_lose_a_stage_each(found: dict[str, Any]) -> None:
    told = {stage["stage"]: stage["error"] for stage in found["stages"] if stage["state"] == "lost"}
    assert {name: error["code"] for name, error in told.items()} == {
        "race": "stage-died",
        "ceilings": "timeout",
        "steps": "stage-died",
    }
    assert "SIGKILL" in told["race"]["value"]
    assert "illegal memory access" in told["steps"]["value"]
    # what they had found before is kept
    assert found["kept"] == ["race", "ceilings", "steps"]
    assert {name for name, state in states(found).items() if state == "done"} == {"correct", "solvers", "sweep"}


def test_a_stage_that_cannot_be_done_here_says_why(found: dict[str, Any]) -> None:
    why = {stage["stage"]: stage["error"]["value"] for stage in found["stages"] if stage["state"] == "skipped"}
    assert why["compile"] == "the interpreter compiles nothing"
    assert why["model"] == "a dry run has no GPU to compile on"
    # without pydantic a stage is done that tried nothing
    assert [(row["ok"], "pydantic" in row["reason"]) for row in found["solvers"]] == [(None, True)]
    assert found["settles"] == {}


def test_every_check_of_correctness_was_made_and_holds(found: dict[str, Any]) -> None:
    assert len(found["correct"]) == 8
    assert all(row["ok"] and row.get("not_numbers", True) and 0 < row["worst"] <= 1 for row in found["correct"])


def test_a_kernel_with_a_split_k_has_no_race(out: Path) -> None:
    rows = Told("race", out).sections["race"]
    assert [(row["how"], row["launches"]) for row in rows] == 2 * [("alone", 4), ("beside", 2)]
    for row in rows:
        assert row["config"].get("split", row["config"].get("splits")) > 1
        assert (row["ok"], row["differing"], row["counters_left"]) == (True, 0, 0)


def test_every_solver_is_held_against_the_cpu(out: Path) -> None:
    told = Told("solvers", out).sections
    assert {row["solver"]: row["ok"] for row in told["solvers"]} == dict.fromkeys(
        ("gptq", "gptq sweep", "range", "awq hessian", "awq importance", "gptq, torch's loop"), True
    )
    assert all(row["seconds"] > 0 for row in told["solvers"])


def test_rows_are_those_of_measurements(found: dict[str, Any]) -> None:
    rows = [Row.model_validate(row) for row in (*found["rows"], *found["ceilings"])]
    names = {row.name for row in rows}
    assert {"latency.op", "tax.total", "tax.streaming", "tax.decode", "tax.activation"} <= names
    assert {"ceiling.read", "ceiling.copy", "ceiling.compute", "ceiling.launch"} <= names
    timed = [row for row in rows if row.name == "latency.op"]
    sides = {row.runtime for row in timed}
    assert {"torch.linear", "quantkit", "quantkit raw twin", "dequantize_matmul", "torch._int_mm"} <= sides
    assert all("dry-run" in row.flags for row in timed)
    # a dry run takes one block of two samples: nothing can be drawn again, so no interval is stated
    assert {(row.n, row.ci95) for row in rows if row.quantiles is not None} == {(2, None)}
    assert {row.baseline.ratio_ci95 for row in timed if row.baseline is not None} == {None}


@pytest.mark.thorough
def test_steps_of_the_product_path_are_timed_apart_and_fused(out: Path) -> None:
    from parts.steps import BASELINE, BY_TORCH, SIDES

    told = Told("steps", out).sections
    assert told.get("skipped", []) == []
    steps = [Row.model_validate(row) for row in told["rows"]]
    cells = {(row.settings["variant"], row.settings["fuse"]) for row in steps}
    assert cells == {(side, fuse) for side in (BASELINE, *SIDES, BY_TORCH) for fuse in ("", "aot_eager")}
    assert {(row.name, row.batch) for row in steps} == {("latency.decode_step", 2)}
    # a dry run times one shape, which the model has not
    assert {row.settings["residual_s"] for row in steps} == {None}
    # a step has four products of weights, and the head's where it is packed
    counts = {
        kernel: {(row["side"], row["fuse"]): row["count"] for row in told["launches"] if row["kernel"] == kernel}
        for kernel in ("quantkit::linear", "quantkit::attend")
    }
    both, ours = ("", "aot_eager"), (BASELINE, *SIDES)
    assert counts["quantkit::linear"] == {
        (side, fuse): 4 + ("head" in side) for side in (*SIDES, BY_TORCH) for fuse in both
    }
    assert counts["quantkit::attend"] == {(side, fuse): 1 for side in ours for fuse in both}


def test_ceilings_are_told_row_by_row(out: Path, found: dict[str, Any]) -> None:
    rows = [Row.model_validate(row) for row in Told("ceilings", out).sections["ceilings"]]
    # those that the sweep measured itself, since the stage had died
    assert [(row.name, row.settings) for row in rows] == [(row["name"], row["settings"]) for row in found["ceilings"]]


def test_the_table_of_a_step_is_of_what_a_layer_runs() -> None:
    from parts.sections import _table
    from parts.steps import tables

    shape = (256, 128)
    timings = [KernelTiming("quantkit", shape, 4, 2.0, 1, {"block_n": 64}), KernelTiming("humming", shape, 4, 0.1, 1)]
    timings += [
        KernelTiming("dequantize_matmul", shape, 4, 1.5, 1),
        KernelTiming("torch._weight_int4pack_mm", shape, 4, 0.1, 1),
    ]
    (choice,) = tables({"int4": timings})["int4"].choices[shape]
    assert (choice.candidate, choice.seconds) == ("dequantize_matmul", 1.5)
    assert tables({"int4": timings[1:2]}) == {}
    # the record has the same choices
    assert _table([asdict(timing) for timing in timings]) == tables({"int4": timings})["int4"].as_dict()


def test_packings_are_compared_where_both_were_timed() -> None:
    from parts.sections import packings

    def rows(variant: str, kernel: str, N: int, *seconds: float) -> list[dict[str, Any]]:
        settings = {"variant": variant, "kernel": kernel}
        ops = [{"N": N, "K": 64, "M": M} for M in (1, 2048)]
        return [
            {"name": "latency.op", "settings": settings, "op": op, "value": value}
            for op, value in zip(ops, seconds, strict=False)
        ]

    timed = [*rows("int4.g64", "quantkit", 16, 1.0, 9.0), *rows("int4.g64.humming", "humming", 16, 1.1, 5.0)]
    # a prompt for every 256 steps: 2,048 rows for 1,024
    assert packings(timed) == {"int4.g64": {"16x64": "quantkit"}}
    timed += [*rows("int4.g64", "quantkit", 32, 1.1, 9.0), *rows("int4.g64.humming", "humming", 32, 1.0, 50.0)]
    timed += [*rows("int4.g64", "quantkit", 48, 1.0), *rows("int4.g64.humming", "humming", 48, 1.1, 5.0)]
    timed += [*rows("nf4", "quantkit", 16, 1.0, 9.0), *rows("bfloat16", "torch.linear", 16, 1.0, 9.0)]
    assert packings(timed) == {"int4.g64": {"16x64": "quantkit", "32x64": "quantkit", "48x64": "humming"}}


def test_taxes_add_up(found: dict[str, Any]) -> None:
    taxes = {
        (row["name"], row["settings"]["variant"]): row["value"]
        for row in found["rows"]
        if row["name"].startswith("tax.")
    }
    for variant in ("int4.g64", "int8.dynamic"):
        parts = taxes["tax.streaming", variant] + taxes["tax.decode", variant]
        assert math.isclose(taxes["tax.total", variant], parts, rel_tol=1e-9)


def test_a_peer_that_cannot_be_loaded_is_listed_with_its_reason(found: dict[str, Any]) -> None:
    reasons = {skipped["reason"] for skipped in found["skipped"]}
    assert "ModuleNotFoundError: No module named 'bitsandbytes'" in reasons
    assert all({"shape", "variant", "reason"} <= skipped.keys() for skipped in found["skipped"])


def test_the_choice_can_be_read_back_and_keeps_no_copy(found: dict[str, Any]) -> None:
    for table in found["dispatch"].values():
        choice = Table.of(table).choose((16, 64), 3)
        assert choice.resident_bytes < 16 * 64 * 2
    assert set(found["dispatch"]) == {"int4.g64", "int8.dynamic"}


# --- what a run keeps -------------------------------------------------------------------------------------------------


def test_sigterm_keeps_what_is_there_and_resume_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planted: Path, tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path))
    done = ran(planted, [("correct", "fine", 60), ("race", "stopped", 60), ("steps", "fine", 60)], *out)
    assert done.returncode == 75, done.stdout + done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert states(record) == {"correct": "done", "race": "stopped", "steps": "stopped"}
    assert record["skipped"] == [{"fine": "correct"}, {"fine": "race"}]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]

    monkeypatch.syspath_prepend(str(planted))
    run_all, plants = import_module("run_all"), import_module("gpu_plants")
    known = {name: run_all.Stage(plants.fine, 60.0) for name in ("correct", "race", "steps")}
    before = (tmp_path / "correct.json").stat().st_mtime_ns
    # one that no time is left for is not begun, and the rest is not touched
    assert run_all.main(["--dry", *out, "--resume", "--minutes", "0"], known) == 75
    assert "race: no-time" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["skipped"] == [{"fine": "correct"}, {"fine": "race"}]
    assert run_all.main(["--dry", *out, "--resume"], known) == 0
    assert set(states(json.loads((tmp_path / "run.json").read_text())).values()) == {"done"}
    assert (tmp_path / "correct.json").stat().st_mtime_ns == before
    # what is not begun again is kept, and the run says that it was not
    assert run_all.main(["--dry", *out, "--minutes", "0"], known) == 75
    assert set(states(json.loads((tmp_path / "run.json").read_text())).values()) == {"done"}
    # with other settings the results would be of two kinds
    capsys.readouterr()
    assert run_all.main(["--dry", *out, "--resume", "--dtype", "fp16"], known) == 2
    said = capsys.readouterr().err
    assert said.startswith("[results-differ]")
    assert said.count("\n") == 1


def test_a_script_is_its_stages_in_order() -> None:
    run_all = import_module("run_all")
    for name, stages in run_all.SCRIPTS.items():
        args = run_all._parsed([name], run_all.STAGES)
        assert args.only == list(stages)
        assert [each for each in run_all.STAGES if each in stages] == list(stages)
        assert args.minutes <= 8
    assert run_all._parsed([], run_all.STAGES).only == list(run_all.STAGES)
    assert run_all._parsed(["tax", "--only", "race"], run_all.STAGES).only == ["race"]


def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_all = import_module("run_all")
    with pytest.raises(SystemExit) as stopped:
        run_all.main(["--only", "corect"])
    assert stopped.value.code == 2
    assert "no stage is called 'corect'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run_all.main(["--out", str(tmp_path / "none")]) == 2
        assert "[no-gpu]" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    assert run_all.main(["--dry", "--out", str(tmp_path / "file")]) == 2
    assert "[not-writable]" in capsys.readouterr().err
    for wrong in (("--blocks", "0"), ("--minutes", "nan"), ("--minutes", "-1"), ("--sm", "42"), ("--layers", "x")):
        with pytest.raises(SystemExit) as stopped:
            run_all.main(["--dry", "--out", str(tmp_path / "none"), *wrong])
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert wrong[0] in said
        assert wrong[1] in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "rubbish",
    [
        *("[", "[]", '{"state": "done"}'),
        # what a stage wrote, but for one thing
        *({"sections": wrong} for wrong in ([], {"device": []}, {"correct": [1]}, {"correct": [{}]})),
        *({"seconds": math.nan}, {"error": {}}, {"settings": None}),
        # deep inside a row
        {"sections": {"rows": [{"name": "latency.op", "runtime": "quantkit", "settings": {"variant": "a"}, "op": 1}]}},
        {"sections": {"ceilings": [{"name": "a", "value": 1, "unit": "s", "settings": [], "flags": []}]}},
        {"sections": {"timings": [{"variant": "a", "candidate": "quantkit", "shape": 3}]}},
        {"sections": {"settles": [{"line": ["a"], "holds": True, "by": "it"}]}},
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_what_no_stage_has_written_is_not_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rubbish: Any, resume: bool
) -> None:
    run_all = import_module("run_all")
    settings = {"quantkit": run_all.quantkit.__version__, "dtype": "bf16", "dry": True, "blocks": 6}
    whole = {"schema": 1, "stage": "race", "state": "done", "error": None, "seconds": 1.0, "settings": settings}
    known = dict.fromkeys(("correct", "race"), run_all.Stage(None, 60.0))
    (tmp_path / "race.json").write_text(json.dumps({**whole, "sections": {}}))
    text = rubbish if isinstance(rubbish, str) else json.dumps({**whole, "sections": {}, **rubbish})
    (tmp_path / "correct.json").write_text(text)
    asked = ["--dry", "--out", str(tmp_path), "--minutes", "0", *(["--resume"] if resume else [])]
    assert run_all.main(asked, known) == 75
    assert capsys.readouterr().err == f"{tmp_path / 'correct.json'}: not what a stage writes, taken as not done\n"
    assert states(json.loads((tmp_path / "run.json").read_text())) == {"correct": "no-time", "race": "done"}


def test_a_step_takes_the_fastest_settings_of_its_linears_and_of_its_head() -> None:
    from parts.steps import BASELINE, BY_TORCH, FIRST, SIDES, table_of, tables

    inside, head = (256, 128), (512, 128)
    whole = {"block_n": 16, "block_m": 8, "unroll": 2, "split": 1, "warps": 8, "stages": 0}
    timings = {
        "int4.g64.zeros": [KernelTiming("quantkit", inside, 1, 2.0, 1, whole)],
        "int8": [KernelTiming("quantkit", shape, 1, 3.0, 1, whole) for shape in (inside, head)],
    }
    with_head = next(side for side, (_, variant) in SIDES.items() if variant)
    for side, seconds in ((FIRST, {inside: 2.0}), (BY_TORCH, {inside: 2.0}), (with_head, {inside: 2.0, head: 3.0})):
        table = table_of(side, tables(timings))
        assert table is not None
        assert {shape: one.seconds for shape, (one,) in table.choices.items()} == seconds
    assert table_of(BASELINE, tables(timings)) is None and table_of(FIRST, {}) is None
