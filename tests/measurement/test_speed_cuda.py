"""What a GPU's ceilings say of themselves: the samples that were taken, planted here, and nothing besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")  # Linux alone has it

from quantkit.measurement.cuda import device as limits
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.operators.ceilings import Ceiling, joined, median_interval
from quantkit.measurement.operators.tax import Limits

DEVICE = GpuDevice("cpu", dry=True)
BEFORE = np.array([[101.0, 99.0], [100.0, 103.0], [98.0, 102.0], [97.0, 104.0]])
AFTER = BEFORE - 10


def read(taken: np.ndarray) -> Ceiling:
    return Ceiling("ceiling.read", "B/s", tuple(taken.ravel()), {}, {})


def test_every_sample_is_kept_in_the_order_in_which_it_was_taken() -> None:
    assert read(BEFORE).samples == (101.0, 99.0, 100.0, 103.0, 98.0, 102.0, 97.0, 104.0)
    (both,) = joined([read(BEFORE)], [read(AFTER)])
    row = both.row(device=DEVICE.identity(), versions={})
    values = sorted([*BEFORE.ravel(), *AFTER.ravel()])
    assert (row.n, row.value) == (16, np.median(values))
    assert row.ci95 == median_interval(values)
    assert row.quantiles == {f"p{q}": pytest.approx(np.percentile(values, q)) for q in (50, 90, 99)}
    # the halves are the run's start and its end
    assert row.aa_spread == pytest.approx(abs(np.median(BEFORE) / np.median(AFTER) - 1))


def test_of_few_samples_no_interval_is_stated() -> None:
    (both,) = joined([read(BEFORE[:1])], [read(AFTER[:1])])
    row = both.row(device=DEVICE.identity(), versions={})
    assert (row.n, row.value, row.ci95) == (4, 95.0, None)


def test_what_the_device_lacks_says_so_and_limits_nothing() -> None:
    reason = "not measured: no kernel"
    found = [read(BEFORE), Ceiling("ceiling.compute", "op/s", (), {"compute_type": "fp8_e4m3"}, {}, reason)]
    row = joined(found, found)[1].row(device=DEVICE.identity(), versions={})
    assert (row.value, row.n, row.quantiles, row.ci95) == (None, None, None, None)
    assert row.flags == ["not measured: no kernel"]
    known = Limits.of(found)
    assert (known.read, known.compute) == (100.5, {})
    assert 0 < known.error < 0.1  # as far as the order statistics of what was read lie apart


def test_a_run_hands_on_what_its_clock_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(samplers: Any, blocks: int, generator: Any) -> list[np.ndarray]:
        return [BEFORE[:blocks] for _ in samplers]

    monkeypatch.setattr(limits, "interleaved", planted)
    monkeypatch.setattr(limits.Implementation, "ready", lambda self: lambda: 1.0)
    generator = np.random.default_rng(0)
    found = {each.name: each for each in limits.sampled(DEVICE, 4, generator)}
    assert found["ceiling.launch"].samples == tuple(BEFORE.ravel())
    assert found["ceiling.copy"].samples == pytest.approx(tuple(8 * 1024 / BEFORE.ravel()))
    rows = limits.measured(DEVICE, 3, generator)
    assert {row["n"] for row in rows if row["value"] is not None} == {6}
    (copy,) = [row for row in rows if row["name"] == "ceiling.copy"]
    assert (copy["value"], copy["better"]) == (pytest.approx(np.median(8 * 1024 / BEFORE[:3])), "higher")


def test_of_one_block_nothing_can_be_drawn_again() -> None:
    from quantkit.measurement.cuda.device import ratio, summary

    generator = np.random.default_rng(0)
    found = summary(BEFORE[:1], generator)
    assert (found["n"], found["value"], found["ci95"]) == (2, 100.0, None)
    assert ratio(BEFORE[:1], AFTER[:1], generator)[1] is None
    low, high = summary(BEFORE, generator)["ci95"]
    assert BEFORE.min() <= low < high <= BEFORE.max()
