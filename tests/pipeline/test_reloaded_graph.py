"""A graph's file against its pairs as they are written: what a network's own roundings carry far is no fault of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from quantkit.bundle import Check
from quantkit.errors import GateError
from quantkit.graph import run
from quantkit.pipeline.graphs.quantized import QuantizedGraph

WRITTEN = ir.Model(ir.Graph([], [ir.Value(name="y")], nodes=[]), ir_version=8)
INPUTS = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


class Calibration:
    """Eight samples are asked for."""

    def first(self, count: int) -> dict[str, Any]:
        return {"x": INPUTS, "ids": np.arange(4)}


class Prepared:
    calib = Calibration()


class Planted(QuantizedGraph):
    """Nothing is quantized: what runs is planted."""

    def __init__(self) -> None:
        self.prepared, self.model = Prepared(), WRITTEN  # type: ignore[assignment]

    def _kernels(self, path: Path) -> Check:
        return Check(name="integer.macs", value=1.0, limit=0.95, ok=True)


def checked(monkeypatch: pytest.MonkeyPatch, written: Any, loaded: Any) -> Any:
    class Runner:
        def __init__(self, model: Any, *_: Any, **__: Any) -> None:
            self.run = written if model is WRITTEN else loaded

        def __call__(self, feed: Any) -> dict[str, Any]:
            assert np.array_equal(feed["ids"], np.arange(4)), "what is no float stays as it is"
            return {"y": self.run(feed["x"])}

    monkeypatch.setattr(run, "Runner", Runner)
    return Planted().checks(Path("model.onnx"))


def steep(x: Any) -> Any:
    """The last bits of an input decide; a tenth of it is theirs."""
    return x + 0.2 * np.sin(3e8 * x.astype(np.float64))


def test_a_calm_network_is_held_to_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (reloaded, _), taken = checked(monkeypatch, lambda x: x, lambda x: 1.04 * x)
    assert (reloaded.value, reloaded.limit, taken) == (pytest.approx(0.04, abs=1e-6), 0.05, [])
    with pytest.raises(GateError, match=r"reload.onnxruntime is 0.06.*--recipe int8-dynamic"):
        checked(monkeypatch, lambda x: x, lambda x: 1.06 * x)


def test_a_network_whose_last_bits_carry_far_is_held_to_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # two draws of 0.2 sin differ by 0.2 for each 1 of x, whose mean square is 1 too
    (reloaded, _), taken = checked(monkeypatch, steep, lambda x: steep(x * np.float32(1 + 3e-7)))
    assert 0.15 < reloaded.value < 0.25 and 0.25 < reloaded.limit < 0.35 and reloaded.ok
    assert [(each.where, each.from_) for each in taken] == [("reload.onnxruntime", 0.05)]
    assert "carry far" in taken[0].reason
    # a fault is more than that
    with pytest.raises(GateError, match=r"reload\.onnxruntime"):
        checked(monkeypatch, steep, lambda x: 1.5 * steep(x))
