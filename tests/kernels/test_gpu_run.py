"""`benchmarks/gpu/run_all.py`: dry, in the interpreter, without what a GPU machine lacks; what it keeps at its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux alone has it

import triton.language as tl  # noqa: E402

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
    names = ("compile", "correct", "race", "solvers", "ceilings", "sweep", "profile", "whole", "model", "engines")
    plants = {"race": ("crash", 60.0), "ceilings": ("hang", 0.7), "whole": ("fail", 60.0)}
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
        job = {"stage": stage, "results": str(out), "dry": True, "dtype": "fp16", "blocks": 1, "soft": 60.0}
        getattr(work, stage)(job, self)

    def row(self, row: list[Any]) -> None:
        json.dumps(row, allow_nan=False)
        self.sections.setdefault(row[0], []).append(row[1])


def test_a_crash_a_hang_and_an_error_lose_a_stage_each(found: dict[str, Any]) -> None:
    told = {stage["stage"]: stage["error"] for stage in found["stages"] if stage["state"] == "lost"}
    assert {name: error["code"] for name, error in told.items()} == {
        "race": "stage-died",
        "ceilings": "timeout",
        "whole": "stage-died",
    }
    assert "SIGKILL" in told["race"]["value"]
    assert "illegal memory access" in told["whole"]["value"]
    # what they had found before is kept
    assert found["kept"] == ["race", "ceilings", "whole"]
    assert {name for name, state in states(found).items() if state == "done"} == {"correct", "solvers", "sweep"}


def test_a_stage_that_cannot_be_done_here_says_why(found: dict[str, Any]) -> None:
    why = {stage["stage"]: stage["error"]["value"] for stage in found["stages"] if stage["state"] == "skipped"}
    assert why["compile"] == "the interpreter compiles nothing"
    assert why["model"] == "a dry run has no GPU to compile on"
    # without pydantic a stage is done that tried nothing
    assert [(row["ok"], "pydantic" in row["reason"]) for row in found["solvers"]] == [(None, True)]
    assert found["settles"] == {}


def test_every_check_of_correctness_was_made_and_holds(found: dict[str, Any]) -> None:
    assert len(found["correct"]) == 6
    assert all(row["ok"] and 0 < row["worst"] <= 1 for row in found["correct"])


def test_a_kernel_with_a_split_k_has_no_race(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    (row,) = Told("race", out).sections["race"]
    assert row["config"]["split"] > 1
    assert (row["ok"], row["launches"], row["differing"], row["counters_left"]) == (True, 4, 0, 0)


def test_every_solver_is_held_against_the_cpu(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE))
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


def test_steps_of_a_whole_model_stand_beside_the_sum_of_its_linears(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    told = Told("whole", out).sections["rows"]
    steps = {row["settings"]["variant"]: row for row in told if row["name"] == "latency.decode_step"}
    assert set(steps) == {"16 bits", "int8.dynamic"}
    assert all(Row.model_validate(row).batch == 3 for row in steps.values())
    assert steps["16 bits"]["baseline"]["ratio"] == 1.0
    # a dry run times one shape, which the model has not
    assert all(row["settings"]["residual_s"] is None for row in steps.values())


def test_ceilings_are_told_row_by_row(monkeypatch: pytest.MonkeyPatch, out: Path, found: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    rows = [Row.model_validate(row) for row in Told("ceilings", out).sections["ceilings"]]
    # those that the sweep measured itself, since the stage had died
    assert [(row.name, row.settings) for row in rows] == [(row["name"], row["settings"]) for row in found["ceilings"]]


def test_the_sum_of_linears_is_of_what_a_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.decoder import Sizes
    from parts.end_to_end import linears_seconds, tables

    sizes = Sizes(hidden=128, wide=256, layers=3, heads=4, kv_heads=2, vocabulary=8)
    assert sizes.linears() == ((256, 128), (128, 128), (512, 128), (128, 256))
    seconds = dict(zip(sizes.linears(), (1.0, 2.0, 4.0, 8.0), strict=True))
    timings = [KernelTiming("quantkit", shape, 4, taken, 1, {"block_n": 64}) for shape, taken in seconds.items()]
    # the faster way counts, but not one that a layer cannot run
    timings.append(KernelTiming("dequantize_matmul", (128, 128), 4, 1.5, 1))
    timings += [KernelTiming(name, (256, 128), 4, 0.1, 1) for name in ("torch._weight_int4pack_mm", "humming")]
    known = {"int4": timings, "int8.dynamic": [*timings, KernelTiming("torch._int_mm", (512, 128), 4, 3.0, 1)]}
    assert linears_seconds(sizes, 4, "int4", tables(known)) == 3 * (1.0 + 1.5 + 4.0 + 8.0)
    assert linears_seconds(sizes, 4, "int8.dynamic", tables(known)) == 3 * (1.0 + 1.5 + 3.0 + 8.0)
    # the record has the same choices
    from parts.sections import _table

    assert _table([asdict(timing) for timing in timings]) == tables(known)["int4"].as_dict()
    # nothing is guessed for a batch, a shape or a format that was not timed
    assert linears_seconds(sizes, 8, "int4", tables(known)) is None
    assert linears_seconds(sizes, 4, "int4", tables({"int4": timings[1:]})) is None
    assert linears_seconds(sizes, 4, "fp8", tables(known)) is None


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
    done = ran(planted, [("correct", "fine", 60), ("race", "stopped", 60), ("whole", "fine", 60)], *out)
    assert done.returncode == 75, done.stdout + done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert states(record) == {"correct": "done", "race": "stopped", "whole": "stopped"}
    assert record["skipped"] == [{"fine": "correct"}, {"fine": "race"}]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]

    monkeypatch.syspath_prepend(str(planted))
    monkeypatch.syspath_prepend(str(HERE))
    run_all, plants = import_module("run_all"), import_module("gpu_plants")
    known = {name: run_all.Stage(plants.fine, 60.0) for name in ("correct", "race", "whole")}
    before = (tmp_path / "correct.json").stat().st_mtime_ns
    # one that no time is left for is not begun, and the rest is not touched
    assert run_all.main(["--dry", *out, "--resume", "--minutes", "0"], known) == 75
    assert "race no-time" in capsys.readouterr().out
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


def test_wrong_words_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
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
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_what_no_stage_has_written_is_not_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rubbish: Any, resume: bool
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
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


def test_every_line_that_is_pending_names_what_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    run_all = import_module("run_all")
    named: set[str] = set()
    for line in (HERE / "PENDING.md").read_text().splitlines():
        if not line.startswith("| ") or line == "| what | what would confirm it |":
            continue
        settled_by = line.split(" | ")[1]
        assert "`" in settled_by, f"no stage and no command: {line}"
        for stage, names in re.findall(r"stage `([\w-]+)`(?:: ((?:`[\w-]+`,? ?)+))?", settled_by):
            assert stage in run_all.STAGES, line
            named |= set(re.findall(r"`([\w-]+)`", names))
    # what a record settles is a line there
    assert set(import_module("parts.stages").LINES) == named


# --- what its figures settle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["int4.g128", "int4.g128.zeros"])
@pytest.mark.parametrize(
    ("ours", "expanded", "holds"),
    [
        (1.5, None, {"int4-bound": True, "int4-never-behind": True, "decoding-hidden": True}),
        (1.7, None, {"int4-bound": False, "int4-never-behind": True, "decoding-hidden": False}),
        (4.2, None, {"int4-bound": False, "int4-never-behind": False, "decoding-hidden": False}),
        (4.2, 3.9, {"int4-bound": False, "int4-never-behind": True, "decoding-hidden": False}),
    ],
)
def test_what_a_sweep_settles(
    monkeypatch: pytest.MonkeyPatch, variant: str, ours: float, expanded: float | None, holds: dict[str, bool]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.shapes import WHOLE_MODEL
    from parts.sweep import Sweep

    sweep = Sweep(*[None] * 7)  # type: ignore[arg-type]
    seconds = {"torch.linear": 4.0, "quantkit": 1.0, "quantkit raw twin": 1.45, "humming": 0.5}
    slowest = (WHOLE_MODEL[0], variant, 1)
    for shape in WHOLE_MODEL:
        for name in ("int4.g128", "int4.g128.zeros"):
            for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                sweep._cells[shape, name, batch] = (seconds, 1.0, None)  # type: ignore[assignment]
    # one shape of four is enough to miss it; a peer is nothing that a layer runs, nor is torch's product of 4 bits
    slow = seconds | {"quantkit": ours, "torch._weight_int4pack_mm": 0.1}
    slow |= {"dequantize_matmul": expanded} if expanded else {}
    sweep._cells[slowest] = (slow, 1.0, None)  # type: ignore[assignment]

    def settled() -> dict[str, bool]:
        return {line: held for line, held, _ in sweep.settled()}

    # until the passes are through, whose cells a line speaks of
    assert settled() == {"int4-bound": holds["int4-bound"]}
    sweep.reached = dict.fromkeys(("whole model", "peers"), 1.0) | {"whole model, other batches": 0.99}
    assert set(settled()) == {"int4-bound", "decoding-hidden", "peers"}
    sweep.reached |= {"whole model, other batches": 1.0}
    assert set(settled()) == {"int4-bound", "decoding-hidden", "peers", "speeds"}
    sweep.reached |= {"whole model, all settings": 1.0}
    assert settled() == holds | {"speeds": True, "settings": True, "peers": True}
    # with a cell missing, which could not be timed, nothing is said of all
    del sweep._cells[slowest]
    assert set(settled()) == {"peers", "speeds", "settings"}


def test_counters_are_read_behind_what_the_tool_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.counters import table

    text = """==PROF== Connected to process 12
==PROF== Profiling "weight_only_matmul": 0%....100%
"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","Mbyte","us"
"0","weight_only_matmul","60.2","17.9"
"1","weight_only_matmul","30.1","9.1"
"""
    assert [row["gpu__time_duration.sum"] for row in table(text)] == ["17.9", "9.1"]


def test_a_compile_is_told_by_its_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.compile_model import command, compiled

    envelope = {"result": {"content_sha256": "ab", "seconds": {"total": 7.0}}, "error": None, "warnings": []}
    program = f"import sys; print({json.dumps(envelope)!r}); sys.exit(1)"
    told = compiled([sys.executable, "-c", program], time.monotonic() + 60)
    assert (told["exit"], told["content_sha256"], told["told_seconds"]) == (1, "ab", {"total": 7.0})
    assert 0 < told["seconds"] < 60
    # what is no answer is told by its last words
    told = compiled([sys.executable, "-c", "raise SystemExit('no such option')"], time.monotonic() + 60)
    assert (told["exit"], told["reason"]) == (1, "no answer: no such option\n")
    asked = " ".join(command(Path("m"), Path("b"), "h200", None)[2:])
    assert asked == "quantkit compile m --recipe gptq-int4 --device cuda --target h200 --out b --json"


def test_the_first_compile_settles_its_time_and_the_second_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    part = import_module("parts.compile_model")
    monkeypatch.setattr(part, "made", lambda *_: None)
    job = {"layers": 32, "target": "h200", "bundle": str(tmp_path), "work": str(tmp_path)}

    def settled(*seconds: float | None) -> list[tuple[str, bool]]:
        answers = [{"exit": None if each is None else 0, "seconds": each, "content_sha256": "a"} for each in seconds]
        monkeypatch.setattr(part, "compiled", lambda *_: answers.pop(0))
        found = []
        with contextlib.suppress(part.InputError):
            found.extend(
                (data["line"], data["holds"]) for section, data in part.measured(job, math.inf) if section == "settles"
            )
        return found

    assert settled(61.0, 59.0) == [("compile-8b", False), ("compile-8b", True), ("compile-same", True)]
    assert settled(59.0, 61.0) == [("compile-8b", True), ("compile-8b", True), ("compile-same", True)]
    assert settled(59.0, None) == [("compile-8b", True)]


def test_the_third_run_leaves_a_compile_of_8b_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    run_all = import_module("run_all")
    (asked,) = [
        line for line in (HERE / "README.md").read_text().splitlines() if "run_all.py" in line and ",model" in line
    ]
    words = asked.split("run_all.py ")[1].split()
    args = run_all._parsed(words, run_all.STAGES)
    before = [name for name in run_all.STAGES if name in args.only]
    before = before[: before.index("model")]
    # all before it take all that they may, and ten seconds each to start
    left = 60 * args.minutes - sum(run_all.STAGES[name].seconds + 10 for name in before)
    assert left >= run_all.STAGES["model"].seconds


# --- a race is seen ---------------------------------------------------------------------------------------------------


@triton.jit
def split_sum(x_ptr, y_ptr, sums_ptr, count_ptr, WAITS: tl.constexpr, RESETS: tl.constexpr):
    """y [16] = x [2, 16] summed over rows, each by one program; the last to arrive adds, or, planted, the first."""
    row, column = tl.program_id(0), tl.arange(0, 16)
    tl.store(sums_ptr + row * 16 + column, tl.load(x_ptr + row * 16 + column).to(tl.float32))
    arrived = tl.atomic_add(count_ptr, 1) % 2
    if (arrived == 1 and WAITS) or (arrived == 0 and not WAITS):
        total = tl.load(sums_ptr + column) + tl.load(sums_ptr + 16 + column)
        tl.store(y_ptr + column, total.to(tl.float16))
    if RESETS and arrived == 1:
        tl.store(count_ptr, 0)


@pytest.mark.parametrize(
    ("waits", "resets", "seen"), [(True, True, set()), (False, True, {"differing"}), (True, False, {"counters_left"})]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NaN, in the interpreter
def test_a_race_and_a_counter_left_behind_are_seen(
    monkeypatch: pytest.MonkeyPatch, waits: bool, resets: bool, seen: set[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.race import raced

    def product(x: torch.Tensor, memory: Any) -> torch.Tensor:
        y = torch.empty(16, dtype=torch.float16)
        sums, counts = memory.of(32, 1, x.device)
        split_sum[(2,)](x, y, sums, counts, WAITS=waits, RESETS=resets)
        return y

    inputs = [torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3)]
    got = raced(product, inputs, 6)
    assert {name for name in ("differing", "counters_left") if got[name]} == seen
    if not seen:
        assert torch.equal(got["first"], torch.stack([x.float().sum(0).half() for x in inputs]))


def test_a_result_of_the_last_input_and_one_not_written_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from parts.race import raced

    kept: list[torch.Tensor] = []

    def late(x: torch.Tensor, memory: Any) -> torch.Tensor:
        """What was asked before: on one input alone it would be right each time."""
        kept.append(x.sum(0).half())
        return kept[-2 if len(kept) > 4 else -1].clone()

    inputs = [torch.full((2, 4), float(number)).half() for number in range(3)]
    assert raced(late, inputs[:1], 9)["differing"] == 0
    kept.clear()
    assert raced(late, inputs, 9)["differing"] > 0

    y = torch.zeros(4, dtype=torch.float16)

    def unwritten(x: torch.Tensor, memory: Any) -> torch.Tensor:
        y[:3] = x.sum(0)[:3]
        return y

    assert raced(unwritten, inputs, 9)["differing"] == 8


# --- compiled before --------------------------------------------------------------------------------------------------

COMPILED = """
import json, sys, time
import torch
from parts import precompile
from parts.shapes import WHOLE_MODEL, settings
from quantkit.kernels.layout import KINDS
from quantkit.kernels.matmul import weight_only
from quantkit.measurement.cuda.weights import known
from triton import knobs

config = settings(known()["int4.g128"], 1)[0]
wanted = [one for one in precompile.launches(["sweep"], "fp16")
          if (one.what, one.variant, one.config, one.decode) == ("product", "int4.g128", config, True)]
assert len(wanted) == 1
done = precompile.compiled(wanted, 90, time.monotonic() + 600)
hits = []
knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
small = precompile._weight(known()["int4.g128"], True)
from quantkit.kernels import matmul

# what a kernel's launch asks of its input on a GPU is answered as there
class OnGpu(torch.Tensor):
    is_cuda = True
torch.cuda.get_device_capability = lambda *_: (9, 0)
for rows, columns in WHOLE_MODEL:
    big = {"words": torch.empty(rows // 16, columns // KINDS["int4"].columns, 128, dtype=torch.int32),
           "scale": torch.empty(columns // 128, rows, dtype=torch.float16), "shape": (rows, columns)}
    packed = type(small)(**{**small.__dict__, **big})
    for batch in (1, 16):
        # as in another process: nothing is known but the files
        matmul.weight_only_matmul.device_caches.clear()
        weight_only(torch.empty(batch, columns, dtype=torch.float16).as_subclass(OnGpu), packed, config)

# a solver's kernel, looked for by its operator at shapes of a block, whose memory nobody touches
solving = [one for one in precompile.launches(["solvers", "model"], "fp16") if one.what in ("solver", "block")]
wanted = [one for one in solving if (one.variant, one.solver) == ("nf4 g64", "gptq")]
found, hits = hits, []
solved = precompile.compiled(wanted, 90, time.monotonic() + 600)
hits.clear()
from quantkit.kernels.solving import choose

for rows, columns in WHOLE_MODEL[:2]:
    target, row = torch.empty(columns, rows), torch.empty(columns)
    order = torch.empty(columns, dtype=torch.int64)
    for group in (64, columns):
        choose.choose_rows.device_caches.clear()
        scale = torch.empty(columns // group, rows)
        choose.choose(target, torch.empty(columns, columns), row, order, scale, None, row[:16], row[:16],
                      -1.0, 1.0, group, "ieee")
print(json.dumps([done, found, solved, hits, len(solving)]))
"""


def test_what_is_compiled_before_is_what_the_stages_look_for(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made, hits, solved, found, count = json.loads(done.stdout)
    assert made == [1, []]
    assert hits == [True] * 8
    # three schemes by GPTQ, its sweeps and ranges, one by AWQ's two searches as well; a factor; what a compile has
    assert count == 3 * 3 + 2 + 1 + 4
    assert solved == [1, []]
    # of two weights, in groups of 64 and by channels: one kernel
    assert found == [True] * 4


# --- what is carried there --------------------------------------------------------------------------------------------


def test_the_bundle_is_made_once_and_never_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    carried = import_module("carried")
    needed, peers = carried.wanted()
    # the tested versions, of all that is needed
    assert all("==" in requirement for requirement in needed)
    asked: list[str] = []

    def fetch(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        folder.mkdir(exist_ok=True)
        if requirement == peers[0]:
            raise carried.InputError("wheel-missing", where=requirement, value="no such wheel")
        name = requirement.partition("=")[0]
        (folder / f"{name}.whl").write_bytes(bytes(90 if requirement == peers[1] else 10))

    def describe(folder: Path) -> None:
        (folder / "ids.jsonl").write_bytes(bytes(20))

    limit = 20 + 10 * len(needed) + 10 * (len(peers) - 2)
    out = tmp_path / "bundle"
    found = carried.build(out, limit, fetch, describe)
    # one that is too large does not keep out those after it
    assert set(found["left_out"]) == set(peers[:2])
    wheels = {each.partition("=")[0] for each in (*needed, *peers[2:])}
    assert {path.stem for path in (out / "wheels").iterdir()} == wheels
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and path.name != "bundle.json") == limit

    asked.clear()
    assert carried.build(out, limit, fetch, describe) == found
    assert asked == []
    (out / "wheels" / f"{needed[0].partition('=')[0]}.whl").unlink()
    carried.build(out, limit, fetch, describe)
    assert asked == [*needed, *peers]

    with pytest.raises(carried.InputError, match="over-limit") as refused:
        carried.build(out, 25, fetch, describe)
    assert refused.value.remedy.startswith("largest: ids.jsonl")
    # what was there is there, and nothing half-made
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert len(list((out / "wheels").iterdir())) == len(wheels)
