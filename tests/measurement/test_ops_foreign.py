"""Formats of another library's kernels on the GPU's bench, dry: what is timed was checked, what lacks is named."""

from __future__ import annotations

from typing import Any

import humming_library
import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.kernels.dispatch import LAYERS
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.operators import foreign
from quantkit.measurement.operators.cuda import CudaBench
from quantkit.planning.model.shapes import LinearShape

LINEAR = LinearShape(name="up", K=256, N=128)
NAMES = list(foreign.known())


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


def test_wrong_numbers_are_not_timed_and_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(prepared().values()) == {"kernel-unsupported"}
    humming_library.install(monkeypatch)
    forward = humming_library.HummingLayer.forward
    monkeypatch.setattr(humming_library.HummingLayer, "forward", lambda self, x: forward(self, x) * 1.1)
    assert set(prepared().values()) == {"wrong-result"}
