"""The plumbing of `benchmarks/gpu/tensorrt.py` on the CPU, with `fake_tensorrt`'s engines; its figures mean nothing."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
import small_onnx
from fake_tensorrt import GPU

from quantkit.exporters import load_exporter
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.rows import Row
from quantkit.runtimes.tensorrt import TensorrtRuntime
from quantkit.target import Profile

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/tensorrt.py"
PROFILES = [
    Profile(name="decode", batch=(1, 1, 2), length=(1, 1, 1), context=(1, 16, 60)),
    Profile(name="prefill", batch=(1, 1, 1), length=(2, 8, 16), context=(0, 0, 0)),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("engine_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert str(SCRIPT.parent) not in sys.path, "`import tensorrt` would find the script"
    return module


def test_engines_are_checked_and_timed_beside_torch(bench: Any, tmp_path: Path) -> None:
    made = small_onnx.export(
        tmp_path,
        "llama",
        None,
        exporter=load_exporter("tensorrt"),
        engine=False,
        changes=small_onnx.LAYERS,
        profiles=[each.model_dump() for each in PROFILES],
    )
    fake_tensorrt.engine(made.folder / "engine", PROFILES)
    small_onnx.bundle(made.folder)
    wanted = bench.expected(made.folder / "engine")
    off = {**wanted, "logits": np.roll(wanted["logits"], 1, axis=-1)}
    runtime = TensorrtRuntime("tensorrt_rtx", library=fake_tensorrt.library(), gpus=lambda: ([GPU], ""), device="cpu")
    how: dict[str, Any] = {"batches": [1, 2, 3], "context": 8, "blocks": 2, "seconds": 60.0}
    device = GpuDevice("cpu", dry=True)
    found = bench.run(
        [made.folder, tmp_path / "none"], runtime.load, device, expectations={made.folder.name: wanted}, **how
    )
    assert json.loads(json.dumps(found, allow_nan=False))
    assert [row["ok"] for row in found["correct"]] == [True]
    rows = [Row.model_validate(row) for row in found["rows"]]
    assert [(row.runtime, row.batch) for row in rows] == [
        ("16 bits", 1),
        (made.folder.name, 1),
        ("16 bits", 2),
        (made.folder.name, 2),
        ("16 bits", 3),
    ]
    reasons = " ".join(row["reason"] for row in found["skipped"])
    assert "not-a-bundle" in reasons and "shape-unsupported" in reasons
    # no layers: what the inspector says is opaque, and that is said
    assert "engine-opaque" in found["layers"][0]["reason"]
    assert bench.report(found, tmp_path / "run.json") == 0
    wrong = bench.run(
        [made.folder], runtime.load, device, expectations={made.folder.name: off}, **{**how, "batches": []}
    )
    assert bench.report(wrong, tmp_path / "run.json") == 1
