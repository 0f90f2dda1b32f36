"""What figures of `benchmarks/gpu/run_all.py` settle: the lines of PENDING.md, each by a stage or a command."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # Linux alone has it

from quantkit.kernels.dispatch import Config

HERE = Path(__file__).parents[2] / "benchmarks/gpu"


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run imports by its own names."""
    monkeypatch.syspath_prepend(str(HERE))


def test_every_line_names_what_settles_it() -> None:
    run_all = import_module("run_all")
    named: set[str] = set()
    pending, settled = ((HERE / name).read_text().splitlines() for name in ("PENDING.md", "SETTLED.md"))
    for line in (*pending, *settled):
        if not line.startswith("| ") or line.startswith("| what | "):
            continue
        settled_by = line.split(" | ")[1]
        assert "`" in settled_by, f"no stage and no command: {line}"
        for stage, names in re.findall(r"stage `([\w-]+)`(?:: ((?:`[\w-]+`,? ?)+))?", settled_by):
            assert stage in run_all.STAGES, line
            if line in pending and f"--only {stage}" not in settled_by:
                (script,) = set(re.findall(r"script `(\w+)`", settled_by))
                assert stage in run_all.SCRIPTS[script], line
            named |= set(re.findall(r"`([\w-]+)`", names))
    # what a record settles is a line there
    assert set(import_module("parts.stages").LINES) == named


@pytest.mark.parametrize("variant", ["int4.g64.zeros", "int4.g128"])
@pytest.mark.parametrize(
    ("ours", "expanded", "holds"),
    [
        (1.5, None, {"int4-bound": True, "int4-never-behind": True, "decoding-hidden": True}),
        (1.7, None, {"int4-bound": False, "int4-never-behind": True, "decoding-hidden": False}),
        (4.2, None, {"int4-bound": False, "int4-never-behind": False, "decoding-hidden": False}),
        (4.2, 3.9, {"int4-bound": False, "int4-never-behind": True, "decoding-hidden": False}),
    ],
)
def test_what_a_sweep_settles(variant: str, ours: float, expanded: float | None, holds: dict[str, bool]) -> None:
    from parts.shapes import WHOLE_MODEL
    from parts.sweep import Sweep

    sweep = Sweep(*[None] * 7)  # type: ignore[arg-type]
    seconds = {"torch.linear": 4.0, "quantkit": 1.0, "quantkit raw twin": 1.45, "humming": 0.5}
    slowest = (WHOLE_MODEL[0], variant, 1)
    for shape in WHOLE_MODEL:
        for name in ("int4.g64.zeros", "int4.g128"):
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
    first, others = "whole model in int4", "whole model in int4, other batches"
    sweep.reached = dict.fromkeys((first, "peers"), 1.0) | {others: 0.99}
    assert set(settled()) == {"int4-bound", "decoding-hidden", "peers"}
    sweep.reached |= {others: 1.0}
    assert settled() == holds | {"peers": True}
    sweep.reached |= {"whole model": 1.0, "whole model, other batches": 1.0}
    assert settled() == holds | {"peers": True, "speeds": True}
    sweep.reached |= {"whole model, all settings": 1.0}
    assert settled() == holds | {"speeds": True, "settings": True, "peers": True}
    # the kernel of a whole K is meant to take 1.1 times the bound and 3 us; another's time says nothing of it
    for shape in WHOLE_MODEL:
        for name in ("int4.g64.zeros", "int4.g128"):
            sweep._cells[shape, name, 1] = (seconds, 10e-6, None)  # type: ignore[assignment]
            sweep._settings[shape, name, 8] = {Config(64, 16, 2, 8, 4, 3): 9e-6, Config(16, 8, 2, 1, 8, 0): 13.9e-6}
    assert settled()["whole-k"]
    sweep._settings[slowest[0], variant, 8] = {Config(16, 8, 2, 1, 8, 0): 14.1e-6}
    assert not settled()["whole-k"]
    del sweep._settings[slowest[0], variant, 8]
    # with a cell missing, which could not be timed, nothing is said of all
    del sweep._cells[slowest]
    assert set(settled()) == {"peers", "speeds", "settings"}


def test_a_table_of_every_section_is_printed_with_its_heads() -> None:
    from parts.sections import _joined, lines

    op = {"N": 4096, "K": 14336, "M": 16, "bound_s": 10e-6}
    row = {"name": "latency.op", "runtime": "quantkit", "value": 12e-6, "op": op, "baseline": {"ratio": 2.5}}
    row |= {"settings": {"variant": "int4.g128", "stages": 0}}
    own = row | {"runtime": "torch.linear", "value": 30e-6}
    step = {"name": "latency.decode_step", "value": 2.4e-3, "batch": 1, "shape": {"context": 512}}
    step |= {"settings": {"variant": "int4", "fuse": "inductor", "residual_s": 7e-4}, "baseline": {"ratio": 1.8}}
    even = {"name": "tax.break_even", "op": None, "value": 96.0, "ci95": [90.0, 101.0]}
    even |= {"settings": {"variant": "int4.g128", "win_intervals": "1 to 96"}}
    asked = {"command": ["measure", "b"], "exit": 0, "seconds": 12.0, "verdict": {"answer": "ship_it"}}
    sections = {
        "rows": [own, row, step],
        "commands": [{"command": ["tax"], "exit": 0, "rows": [even]}, asked],
        "launches": [{"side": "int4", "fuse": "", "kernel": "a", "count": 2, "us": 3.0}] * 2,
        "real": [{"recipe": "nf4", "at": "cuda", "exit": 0, "kl": 0.0512, "failed": []}],
        "model": [{"what": "compile 1", "seconds": 58.5, "exit": 0, "gpu_peak_bytes": 12e9, "reached": {"export": 40}}],
        "functions": [{"function": "f (a.py)", "seconds": 2.0}],
        "rtx": [{"version": "1.4.0", "capability": "9.0", "built": False, "ran": False, "said": ["no kernel"]}],
        "ceilings": [{"name": "ceiling.read", "settings": {}, "value": 4.57e12, "unit": "B/s", "flags": []}],
    }
    told = [" ".join(line.split()) for line in lines(_joined([]) | sections)]
    for wanted in (
        *("read 4.57 TB/s", "format N x K M torch.linear quantkit K quantkit: times as fast bound"),
        *("int4.g128 4096x14336 16 30.00 12.00 whole 2.50 10.00", "int4.g128 all 96 90 to 101 1 to 96"),
        *("int4 inductor 1 512 2.400 1.80 0.70", "int4 no 4 6.0 all", "int4 no 2 3.0 a", "nf4 cuda 0 0.0512 0"),
        *("compile 1 58.5 0 12.0 {'export': 40}", "2.0 f (a.py)", "measure b 0 12 ship_it"),
        *("1.4.0 9.0 False False no kernel",),
    ):
        assert wanted in told


@pytest.mark.thorough
def test_an_engine_of_one_product_is_built_without_a_gpu() -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    from parts.rtx import tried

    row = tried("cpu")
    assert (row["built"], row["ran"], row["ok"], row["said"]) == (True, False, False, [])


def test_counters_are_read_behind_what_the_tool_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tool that runs what stands behind its options, and prints as Nsight Compute does."""
    from parts import counters
    from parts.sections import _joined, lines

    (tmp_path / "ncu").write_text(
        f"""#!{sys.executable}
import subprocess, sys
subprocess.run(sys.argv[sys.argv.index(sys.executable):], check=True)
print('==PROF== Profiling "whole_k_matmul": 0%....100%')
print('"ID","Kernel Name","{counters.DURATION}","{counters.BANDWIDTH}","{counters.ISSUE}"')
print('"","","ns","%","%"')
for number in range({len(counters.of("int8 whole K"))}):
    print(f'"{{number}}","whole_k_matmul","17900","91.5","40.25"')
"""
    )
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(counters, "PROFILED", {"int8 whole K": ("int8", True)})
    (row,) = counters.profiled(str(tmp_path / "ncu"), "fp16", time.monotonic() + 60)
    assert row["reason"] == "" and len(row["launches"]) == len(row["of"])
    (told,) = [line for line in lines(_joined([]) | {"profile": [row]}) if " 4096x14336, M = 16 " in line]
    assert told.split() == ["int8", "whole", "K", "4096x14336,", "M", "=", "16", "17.90", "91.5", "40.2"]
    # a tool that fails says why, and one without time is not begun
    (tmp_path / "ncu").write_text("#!/bin/sh\necho no permission >&2; exit 9\n")
    (row,) = counters.profiled(str(tmp_path / "ncu"), "fp16", time.monotonic() + 60)
    assert (row["launches"], row["reason"]) == ([], "exit 9: no permission\n")
    (row,) = counters.profiled(str(tmp_path / "ncu"), "fp16", time.monotonic())
    assert row["reason"] == "the time was up"


@pytest.mark.parametrize("kernel", ["int4.g64.zeros split K", "attention", "torch.linear"])
def test_what_the_tool_launches_runs(kernel: str) -> None:
    from parts.counters import launched
    from parts.shapes import PROFILED

    assert kernel in PROFILED and len(PROFILED) == 5
    launched(kernel, "bf16")


def test_a_compile_is_told_by_its_envelope() -> None:
    from parts.compile_model import command, compiled

    envelope = {"result": {"content_sha256": "ab", "seconds": {"total": 7.0}}, "error": None, "warnings": []}
    program = f"import sys; print({json.dumps(envelope)!r}); sys.exit(1)"
    told = compiled([sys.executable, "-c", program], time.monotonic() + 60)
    assert (told["exit"], told["content_sha256"], told["told_seconds"]) == (1, "ab", {"total": 7.0})
    assert 0 < told["seconds"] < 60
    # and when it reached each stage
    program = "import sys; print(' 64%  export  checkpoint  about 10 s left', file=sys.stderr); print('{}')"
    assert set(
        compiled(
            [sys.executable, "-c", program.replace("{}", '{"result": null, "error": 1, "warnings": []}')],
            time.monotonic() + 60,
        )["reached"]
    ) == {"export"}
    # what its limit stops is told apart from what something else has ended
    late = compiled([sys.executable, "-c", "import time; time.sleep(60)"], time.monotonic() + 1)
    assert (late["exit"], late["reason"]) == (None, "the time was up")
    ended = compiled([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], time.monotonic() + 60)
    assert (ended["exit"], ended["reason"]) == (-9, "no answer: ")
    # what is no answer is told by its last words
    told = compiled([sys.executable, "-c", "raise SystemExit('no such option')"], time.monotonic() + 60)
    assert (told["exit"], told["reason"]) == (1, "no answer: no such option\n")
    asked = " ".join(command(Path("m"), Path("b"), "h200", None)[2:])
    assert asked == "quantkit compile m --recipe gptq-int4 --device cuda --target h200 --out b --json"


def test_the_first_compile_settles_its_time_and_the_second_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("change", "ok", "layers"),
    [
        ({}, True, 0.02),
        ({"exit": 1}, False, 0.02),
        ({"checks": [{"ok": False}]}, False, 0.02),
        ({"exit": None, "reason": "the time was up", "layers": {}}, False, None),
    ],
)
def test_two_compiles_of_a_recipe_are_held_against_each_other(
    change: dict[str, Any], ok: bool, layers: float | None
) -> None:
    from parts.recipes import compared

    cpu = {"exit": 0, "kl": 0.5, "checks": [{"ok": True}], "layers": {"a": 1.0, "b": 2.0}, "content_sha256": "x"}
    row = compared("int8", cpu | {"kl": 0.25, "layers": {"a": 1.01, "b": 1.96}} | change, cpu)
    assert (row["ok"], row["kl"]) == (ok, 0.25)
    assert row["layers"] == (None if layers is None else pytest.approx(layers))
    assert row.get("where") == (None if layers is None else "b")


def test_functions_of_a_compile_have_their_seconds_once_a_stack() -> None:
    from parts.compile_model import functions

    stacks = """process 1:"python (x)";main (cli.py:3);solve (gptq.py:10);solve (gptq.py:20) 30
process 1:"python (x)";main (cli.py:4);read (weights.py:7) 10
not a stack
"""
    found = {row["function"]: row["seconds"] for row in functions(stacks)}
    assert {name: found[name] for name in ("main (cli.py)", "solve (gptq.py)", "read (weights.py)")} == {
        **{"main (cli.py)": 2.0, "solve (gptq.py)": 1.5, "read (weights.py)": 0.5}
    }


def test_what_a_script_cannot_do_without_has_its_time() -> None:
    run_all = import_module("run_all")
    needed = {"tax": "tax", "accuracy": "real", "step": "steps"}
    for script, stage in needed.items():
        stages = run_all.SCRIPTS[script]
        before = stages[: stages.index(stage)]
        # all before it take all that they may, and ten seconds each to start
        minutes = run_all._parsed([script], run_all.STAGES).minutes
        left = 60 * minutes - sum(run_all.STAGES[name].seconds + 10 for name in before)
        assert left >= min(run_all.STAGES[stage].seconds, 180), script
