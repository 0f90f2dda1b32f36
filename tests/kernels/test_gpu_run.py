"""The plumbing of `benchmarks/gpu/run_all.py`, dry: tiny sizes in the interpreter, without what a GPU machine lacks."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.kernels.dispatch import KernelTiming, Table
from quantkit.measurement.rows import Row

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/run_all.py"
PROGRAM = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "yaml", "rich", "transformers", "gguf", "scipy", "bitsandbytes"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "run.json"
    done = ran("--dry-run", "--dtype", "fp16", "--out", str(path))
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_every_check_of_correctness_was_made_and_holds(found: dict[str, Any]) -> None:
    assert len(found["correct"]) == 6
    assert all(row["ok"] and 0 < row["worst"] <= 1 and row["repeats_agree"] for row in found["correct"])


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


def test_steps_of_a_whole_model_stand_beside_the_sum_of_its_linears(found: dict[str, Any]) -> None:
    steps = {row["settings"]["variant"]: row for row in found["rows"] if row["name"] == "latency.decode_step"}
    assert set(steps) == {"16 bits", "int4.g128.zeros", "int8.dynamic"}
    assert all(Row.model_validate(row).batch == 3 for row in steps.values())
    assert steps["16 bits"]["baseline"]["ratio"] == 1.0
    # a dry run times one shape, which the model has not
    assert all(row["settings"]["residual_s"] is None for row in steps.values())


def test_the_sum_of_linears_is_of_what_a_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from parts.decoder import Sizes
    from parts.end_to_end import linears_seconds, tables

    sizes = Sizes(hidden=128, wide=256, layers=3, heads=4, kv_heads=2, vocabulary=8)
    assert sizes.linears() == ((256, 128), (128, 128), (512, 128), (128, 256))
    seconds = dict(zip(sizes.linears(), (1.0, 2.0, 4.0, 8.0), strict=True))
    timings = [KernelTiming("quantkit", shape, 4, taken, 1, {"block_n": 64}) for shape, taken in seconds.items()]
    # the faster way counts, but not one that a layer cannot run
    timings.append(KernelTiming("dequantize_matmul", (128, 128), 4, 1.5, 1))
    timings.append(KernelTiming("torch._weight_int4pack_mm", (256, 128), 4, 0.1, 1))
    known = {"int4": timings}
    assert linears_seconds(sizes, 4, "int4", tables(known)) == 3 * (1.0 + 1.5 + 4.0 + 8.0)
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
    for variant in ("int4.g128.zeros", "int8.dynamic"):
        parts = taxes["tax.streaming", variant] + taxes["tax.decode", variant]
        assert math.isclose(taxes["tax.total", variant], parts, rel_tol=1e-9)


def test_a_peer_that_cannot_be_loaded_is_listed_with_its_reason(found: dict[str, Any]) -> None:
    reasons = {skipped["reason"] for skipped in found["skipped"]}
    assert "ModuleNotFoundError: No module named 'bitsandbytes'" in reasons
    assert all({"shape", "variant", "reason"} <= skipped.keys() for skipped in found["skipped"])


def test_the_choice_can_be_read_back_and_keeps_no_copy(found: dict[str, Any]) -> None:
    for table in found["dispatch"].values():
        choice = Table.of(table).choose((32, 128), 3)
        assert choice.resident_bytes < 32 * 128 * 2
    assert set(found["dispatch"]) == {"int4.g128.zeros", "int8.dynamic"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert "no GPU is at hand" in capsys.readouterr().err
