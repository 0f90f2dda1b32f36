"""Single products: the plumbing on a clock that only steps move, the formulas by hand, the real thing small."""

import json
from dataclasses import replace
from typing import Any

import pytest
from planted_ops import DOWN, FP32, INT8, LAUNCH, READ, SETTING, TWO, UP, FakeBench, FakeSide, World, falling, sweep

from quantkit.errors import InputError
from quantkit.measurement.operators import products as ops
from quantkit.measurement.operators import run as ops_rows
from quantkit.measurement.operators.products import SweepPlan, TimedVariant
from quantkit.measurement.operators.run import ALL
from quantkit.measurement.operators.tax import StepCost, captured_gain
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import Timing
from quantkit.model.sizes.shapes import LinearShape


def rows_of(timed: list[TimedVariant], model: str = "") -> list[Row]:
    return ops_rows.rows(timed, SETTING, model=model)


def named(rows: list[Row], name: str, layer: str | None = None, **op: Any) -> list[Row]:
    wanted = [row for row in rows if row.name == name and row.op.layer == layer]
    return [row for row in wanted if all(getattr(row.op, key) == value for key, value in op.items())]


def test_each_variant_is_timed_against_the_baseline_at_each_batch() -> None:
    timed = sweep(TWO)
    assert [(each.M, each.variant) for each in timed] == [(M, v) for M in (1, 8, 64) for v in ("float32", "int4")]
    for each in timed:
        if each.variant == "int4":
            assert each.times.ratio == pytest.approx(1e-3 / falling(each.M), rel=0.02)
            low, high = each.times.ratio_ci95
            assert low < each.times.ratio < high
            assert each.times.n >= 16


def test_a_step_of_several_products_is_counted_once_each() -> None:
    (_, one), (_, many) = sweep(TWO, (1,)), sweep(TWO, (1,), products=16)
    assert many.times.quantiles["p50"] == pytest.approx(one.times.quantiles["p50"], rel=0.02)


def test_what_cannot_run_is_skipped_with_its_flag_and_the_rest_goes_on() -> None:
    timed = sweep({**TWO, "int8": falling}, (1, 8), absent={"int8": "wrong-result"}, fits=lambda M: M < 8)
    flags = {(each.M, each.variant): each.skipped for each in timed}
    assert flags[1, "int4"] == ""
    assert flags[1, "int8"] == flags[8, "int8"] == "wrong-result"
    assert flags[8, "int4"] == flags[8, "float32"] == "out-of-memory"
    rows = rows_of(timed)
    (row,) = named(rows, "latency.op", M=1, format=None)
    assert row.value is None
    assert row.flags == ["wrong-result"]


def test_a_batch_that_would_take_too_long_is_skipped_before_it_is_run() -> None:
    slow = {"float32": lambda M: 1e-3 * M, "int4": lambda M: 1e-2 * M}
    timed = sweep(slow, (64, 4096), seconds=20.0)
    assert {each.skipped for each in timed if each.M == 64} == {""}
    assert {each.skipped for each in timed if each.M == 4096} == {"too-slow"}


def test_steps_that_take_longer_than_they_tell_end_with_their_time() -> None:
    """A step on a GPU is two replays of a graph of many products, and tells the seconds of one."""
    world, told = World(), {"float32": lambda M: 1e-3, "int4": falling}

    class Graphs(FakeSide):
        def step(self, M: int) -> Any:
            def one() -> float:
                world.now += 0.01
                return float(self.seconds(M))

            return one

    timed = sweep(told, (1, 8), seconds=0.1, world=world, side=Graphs)
    # two rounds of two blocks, of two visits of three steps, and two steps before; all eight would take four times that
    assert world.now == pytest.approx(2 * 2 * (12 + 2) * 2 * 0.01, rel=0.05)
    assert {each.times.n for each in timed} == {16}


def test_without_a_baseline_nothing_is_compared() -> None:
    with pytest.raises(InputError, match=r"wrong-result.*float32 cannot run"):
        sweep(TWO, absent={"float32": "wrong-result"})


def test_a_shape_whose_baseline_does_not_fit_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeBench.prepare

    def prepare(self: Any, linear: LinearShape, variants: Any, largest: int) -> Any:
        sides = real(self, linear, variants, largest)
        return {**sides, "float32": "out-of-memory"} if linear is DOWN else sides

    monkeypatch.setattr(FakeBench, "prepare", prepare)
    timed = sweep(TWO, (1,), (UP, DOWN))
    assert [each.skipped for each in timed] == ["", "", "out-of-memory", "out-of-memory"]


def test_the_tax_of_one_product_by_hand() -> None:
    rows = rows_of(sweep(TWO, (8,)))
    (row,) = named(rows, "tax.total", format="int4")
    moved = 1024 * 4096 * 4.5 / 8 + 8 * 4 * (1024 + 4096)
    bound = max(moved / READ, 2 * 8 * 1024 * 4096 / INT8)
    hp_moved = 1024 * 4096 * 4 + 8 * 4 * (1024 + 4096)
    hp_bound = max(hp_moved / READ, 2 * 8 * 1024 * 4096 / FP32)
    assert (row.op.bound_s, row.op.hp_bound_s) == (pytest.approx(bound), pytest.approx(hp_bound))
    assert row.value == pytest.approx(falling(8) - bound, rel=0.05)
    assert row.baseline.value == pytest.approx(1e-3 - hp_bound, rel=0.05)
    assert row.settings["promised"] == pytest.approx(hp_bound / bound)
    assert row.settings["share_of_baseline"] == pytest.approx(row.value / 1e-3, rel=0.02)
    assert row.settings["launch_s"] == LAUNCH
    assert "sum-only" in row.flags
    gain = (1e-3 / falling(8) - 1) / (hp_bound / bound - 1)
    assert captured_gain(row) == pytest.approx(gain, rel=0.06)
    assert (row.op.K, row.op.N, row.op.M, row.resident_bytes) == (1024, 4096, 8, 5)


def test_faster_than_its_bound_is_flagged() -> None:
    (row,) = named(
        rows_of(sweep({"float32": lambda M: 1e-3, "int4": lambda M: 1e-5}, (1,))), "tax.total", format="int4"
    )
    assert row.value < 0
    assert "negative-tax" in row.flags


def test_quantizing_the_input_has_a_row_of_its_own_where_it_can_be_had_apart() -> None:
    rows = rows_of(sweep({**TWO, "int8": falling}, (1,)))
    (row,) = named(rows, "tax.activation")
    assert (row.op.format, row.value) == ("int8", pytest.approx(1e-6, rel=0.02))


def test_where_it_stops_winning() -> None:
    rows = rows_of(sweep(TWO, (1, 2, 4, 8, 16, 32, 64)))
    (row,) = named(rows, "tax.break_even")
    assert 14 < row.value < 16.5  # the whole interval lies above 1 a little short of 16
    assert row.ci95[0] <= row.value <= row.ci95[1]
    assert row.settings["wins"] == 1
    assert row.settings["ideal"] is None
    assert "ideal-wins-everywhere" in row.flags  # the integer units are four times as fast


def test_a_break_even_is_bisected_with_the_same_batches_for_all_linears() -> None:
    timed = sweep(TWO, (1, 8, 64), (UP, DOWN), bisections=2)
    # it is at 16: between 8 and 64 comes 23, between 8 and 23 comes 14
    by_shape = {
        label: [one.M for one in timed if one.linear.label == label and one.variant == "int4"]
        for label in (UP.label, DOWN.label)
    }
    assert by_shape == {key: [1, 8, 14, 23, 64] for key in by_shape}
    (row,) = named(rows_of(timed, "m"), "tax.break_even", ALL)
    assert 14 < row.value < 17
    won = {"float32": lambda M: 1e-3, "int4": lambda M: 5e-4}
    assert {one.M for one in sweep(won, (1, 8), bisections=2)} == {1, 8}


def test_a_model_is_the_sum_of_its_linears_as_often_as_they_occur() -> None:
    rows = rows_of(sweep(TWO, (1, 8), (UP, DOWN)), "a model")
    for M in (1, 8):
        parts = {each.op.K: each for each in named(rows, "latency.op", format="int4", M=M)}
        (whole,) = named(rows, "latency.op", ALL, format="int4", M=M)
        assert whole.value == pytest.approx(2 * parts[1024].value + parts[4096].value)
        hp = 2 * parts[1024].baseline.value + parts[4096].baseline.value
        assert whole.baseline.value == pytest.approx(hp)
        assert whole.baseline.ratio == pytest.approx(hp / whole.value, rel=0.01)
        assert whole.baseline.ratio_ci95[0] < whole.baseline.ratio < whole.baseline.ratio_ci95[1]
        (tax,) = named(rows, "tax.total", ALL, format="int4", M=M)
        bounds = [each.op.bound_s for each in named(rows, "tax.total", format="int4", M=M)]
        assert (tax.op.bound_s, whole.settings["linears"]) == (pytest.approx(2 * bounds[0] + bounds[1]), 3)
    assert len(named(rows, "tax.break_even", ALL)) == 1
    assert not named(rows_of(sweep(TWO, (1,), (UP, DOWN))), "latency.op", ALL)


def test_a_model_with_a_linear_that_was_not_timed_has_no_sum() -> None:
    timed = sweep(TWO, (1,), (UP, DOWN))
    timed[1] = replace(timed[1], times=None, timing=Timing(skipped="too-slow"))
    (row,) = [each for each in named(rows_of(timed, "m"), "latency.op", ALL) if each.settings["variant"] == "int4"]
    assert row.value is None
    assert row.flags == ["incomplete", "too-slow"]


def test_copies_are_three_times_the_cache() -> None:
    assert ops.copies(StepCost("int4", 1e6), 32 * 10**6) == 96
    assert ops.copies(StepCost("float32", 2e8), 32 * 10**6) == 1


def test_onnx_runtime_times_what_is_right_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.exporters.onnx import single_op as single
    from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench

    bench = OnnxRuntimeBench(threads=1, cache=40_000)
    linear = LinearShape(name="x", K=128, N=64)
    real = single.SingleProduct.error
    wrong = single.variant("int4.g32.level0")
    monkeypatch.setattr(
        single.SingleProduct, "error", lambda self, *args: 1.0 if self.variant == wrong else real(self, *args)
    )
    asked = ["float32", "int4.g32.level4", wrong.name, "int8.dynamic", "quantize.dynamic"]
    sides = bench.prepare(linear, asked, [512])
    assert sides[wrong.name] == "wrong-result"
    int4, whole = sides["int4.g32.level4"], sides["float32"]
    assert whole.products(1) == int4.products(1) == 4, "as many products a step on both sides"
    assert whole.products(256) == int4.products(512) == 1, "a prefill's products one by one"
    assert int4.settings(1)["copies"] * int4.cost.weight_bytes >= 3 * 40_000
    assert int4.settings(1)["kernel"] == "MatMulNBits"
    assert int4.resident_bytes == pytest.approx(int4.cost.weight_bytes, rel=0.1)
    for side in sides.values():
        if not isinstance(side, str):
            for M in (1, 3, 256):
                step = side.step(M)
                for _ in range(40):  # round all sessions
                    step()
    assert int4.hot(2) is not None
    timed = ops.measure(bench, [linear], "float32", ["int4.g32.level4"], SweepPlan((1, 2), 0.05, rounds=2))
    for row in rows_of(timed):
        assert json.loads(row.line())["schema"] == 1
    assert all(each.times for each in timed)
