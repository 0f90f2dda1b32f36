"""Bound and efficiency make a forecast; what is not known is said."""

from typing import Any

import pytest

from quantkit.model.sizes.architecture import Architecture, BlockShapes, Matrix
from quantkit.planning.efficiency import Sample
from quantkit.planning.forecast import Served
from quantkit.planning.roofline import Cache, ModelStep, RooflineProduct
from quantkit.target import Target

UP, DOWN = Matrix("model.layers.0.up_proj", N=1024, K=256), Matrix("model.layers.0.down_proj", N=256, K=1024)
MODEL = Architecture(
    "test",
    "decoder",
    "llama",
    "float32",
    256,
    [BlockShapes("model.layers.0", [UP, DOWN], None)],
    embeddings=0,
    others=0,
)
DECODE = ModelStep(4, 1, 100)


def target(read: float | str = 1e9) -> Target:
    def figure(value: float | str, unit: str) -> dict[str, object]:
        return {"value": value, "unit": unit, "source": "test"}

    return Target.from_dict(
        {
            "schema": 1,
            "summary": "test",
            "kind": "cpu",
            "arch": {"vendor": "x86", "isa": ["avx2"]},
            "memory": {
                "capacity": figure(8e9, "B"),
                "read_bandwidth": figure(read, "B/s"),
                "last_level_cache": figure(1e6, "B"),
            },
            "compute": {"fp32": figure(1e11, "flop/s"), "int8": figure(2e11, "op/s")},
            "formats": {"int4": {"onnxruntime": {"state": "native", "source": "test"}}},
            "runtimes": ["onnxruntime"],
            "baseline": "fp32",
            "batches": [1],
        },
        name="test",
    )


def step(slower: float, **more: Any) -> Sample:
    """The step of `DECODE`, which took so many times its shares at the ceilings."""
    shares = served().bound(DECODE).shares(target())
    total, together = sum(sum(both) for both in shares.values()), served().bound(DECODE).together(target())
    known = {"bound": together, "shares": shares, "model": "one"}
    return sample(together / (slower * total), **(known | more))


def sample(efficiency: float, **more: Any) -> Sample:
    known: dict[str, Any] = {"device": "here", "name": "a machine", "kind": "cpu", "runtime": "onnxruntime"}
    known |= {"format": "int4", "compute": "int8", "phase": "decode"} | {
        "rows": 4,
        "bound": 1e-3,
        "read": None,
        "subject": "one",
    }
    return Sample(**(known | {"efficiency": efficiency} | more))


def served(*samples: Sample, read: float | str = 1e9, down: str = "int4", devices: int = 1) -> Served:
    products = [
        RooflineProduct(UP, 131072.0, "int4", "int8", 4),
        RooflineProduct(DOWN, 131072.0, down, "int8" if down == "int4" else "fp32", 4),
    ]
    cache = Cache("float32", lambda each: 0.0)
    return Served(
        *(MODEL, products, cache, target(read), "onnxruntime", "int4", "int8", "fp32"),
        devices=devices,
        samples=samples,
        device="here",
    )


def test_a_step_that_was_measured_gives_forecast_and_interval() -> None:
    found = served(step(2.0), step(2.0), step(2.2, model="two")).timed(DECODE)
    seconds = sum(sum(both) for both in found.bound.shares(target()).values())
    assert found.forecast == pytest.approx(2.06 * seconds, rel=0.01)
    assert found.interval is not None and found.least is not None
    assert found.least <= found.interval[0] < found.forecast < found.interval[1]
    assert (found.because, found.here) == ("3 steps of 2 models measured on this machine", True)
    assert found.seconds == found.forecast


def test_of_one_model_it_is_said_that_the_interval_is_taken() -> None:
    found = served(step(2.0, device="away", name="another")).timed(DECODE)
    assert found.forecast is not None and found.interval is not None
    assert found.interval[1] == pytest.approx(2 * found.forecast)
    assert "another, another device" in found.because and "a factor of two is assumed" in found.because
    assert not found.here


def test_without_steps_products_stand_in_and_it_is_said() -> None:
    found = served(sample(0.25, phase="op", device="away", name="another")).timed(DECODE)
    assert found.forecast == pytest.approx(4 * (found.least or 0.0))
    assert "1 single product of 1 shape" in found.because and "another, another device" in found.because
    assert "host are not included" in found.because
    assert not found.here


def test_products_that_were_not_measured_leave_no_forecast() -> None:
    found = served(sample(0.25, phase="op"), down="nf4").timed(DECODE)
    assert found.forecast is None
    assert found.seconds == found.least
    assert "no measurement of" in found.because


def test_without_any_measurement_the_bound_stands_alone() -> None:
    found = served().timed(DECODE)
    assert (found.forecast, found.interval) == (None, None)
    assert found.least is not None and found.seconds == found.least


def test_without_figures_of_the_target_there_is_no_bound() -> None:
    without = served(sample(0.5), read="auto")
    found = without.timed(DECODE)
    assert found.seconds is None
    assert without.missing == ["memory.read_bandwidth"]
    assert "test has no figure for memory.read_bandwidth" in found.because


def test_several_devices_are_bound_but_not_forecast() -> None:
    one, two = served(step(2.0)).timed(DECODE), served(step(2.0), devices=2).timed(DECODE)
    assert one.forecast is not None
    assert two.forecast is None
    assert two.least == pytest.approx((one.least or 0.0) / 2)


def test_a_bound_by_memory_is_turned_to_the_targets_memory() -> None:
    """The run read 0.5 GB/s where the target promises 1: half of its efficiency is left."""
    plain, turned = (served(sample(0.5, phase="op", read=read)).timed(DECODE).forecast for read in (None, 0.5e9))
    assert turned == pytest.approx(2 * (plain or 0.0))
