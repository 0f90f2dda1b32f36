"""Formats of another library's kernels on the GPU's bench, dry: what is timed was checked, what lacks is named."""

from __future__ import annotations

from typing import Any

import humming_library
import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.kernels.dispatch import LAYERS, Recorded
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.operators import run as ops_rows
from quantkit.measurement.operators.cuda import BASELINE, CudaBench, foreign
from quantkit.measurement.operators.products import SweepPlan, measure
from quantkit.measurement.operators.run import Setting
from quantkit.measurement.operators.tax import Limits
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax import TaxAnswer

LINEAR = LinearShape(name="up", K=256, N=128)
NAMES = list(foreign())


def prepared() -> Any:
    return CudaBench(GpuDevice("cpu", dry=True), torch.bfloat16).prepare(LINEAR, NAMES, [3])


def test_each_format_is_timed_in_the_library_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    humming_library.install(monkeypatch)
    bench, found = CudaBench(GpuDevice("cpu", dry=True), torch.bfloat16), prepared()
    assert not [side for side in found.values() if isinstance(side, str)]
    for name, bits in zip(NAMES, (4.5, 4.25, 8, 4.125), strict=True):
        side = found[name]
        assert (bench.quantizer(name), bench.twin(name)) == ("", "")
        assert side.settings(3)["kernel"] in LAYERS
        assert abs(8 * side.resident_bytes / (128 * 256) - bits) < 0.01, name
        assert isinstance(side.step(3)(), float)


def test_what_was_timed_is_a_choice_that_a_bundle_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    humming_library.install(monkeypatch)
    device = GpuDevice("cpu", dry=True)
    timed = measure(
        CudaBench(device, torch.bfloat16), [LINEAR], BASELINE, ["mxfp4"], SweepPlan([3], seconds=0.05, rounds=1)
    )
    setting = Setting("torch", None, device.identity(), {}, Limits(1e9, {"bf16": 1e12}), 1e-6, 1, BASELINE)
    answer: Any = TaxAnswer(None, ops_rows.rows(timed, setting), {}, {})  # type: ignore[arg-type]
    found = Recorded.of(answer.choices("mxfp4").as_bytes())
    choice = found.table.choose((128, 256), 3)
    # the codes and an exponent for 32 of them
    assert (choice.candidate, choice.config, choice.resident_bytes) == ("humming", None, 128 * 256 // 2 + 128 * 8)


def test_wrong_numbers_are_not_timed_and_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(prepared().values()) == {"kernel-unsupported"}
    humming_library.install(monkeypatch)
    forward = humming_library.HummingLayer.forward
    monkeypatch.setattr(humming_library.HummingLayer, "forward", lambda self, x: forward(self, x) * 1.1)
    assert set(prepared().values()) == {"wrong-result"}
