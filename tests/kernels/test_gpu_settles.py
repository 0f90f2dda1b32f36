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
            if line in pending:
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
    # with a cell missing, which could not be timed, nothing is said of all
    del sweep._cells[slowest]
    assert set(settled()) == {"peers", "speeds", "settings"}


def test_counters_are_read_behind_what_the_tool_says() -> None:
    from parts.counters import table

    text = """==PROF== Connected to process 12
==PROF== Profiling "weight_only_matmul": 0%....100%
"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","Mbyte","us"
"0","weight_only_matmul","60.2","17.9"
"1","weight_only_matmul","30.1","9.1"
"""
    assert [row["gpu__time_duration.sum"] for row in table(text)] == ["17.9", "9.1"]


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
