"""The GPU's bench, dry: tiny products in Triton's interpreter; what is right there is timed, and by which way."""

from typing import Any

import humming_library
import pytest
import torch

from quantkit.errors import InputError
from quantkit.kernels.dispatch import EXPANDED, INT_MM, LAYERS, OURS, Recorded
from quantkit.measurement.cuda import device, sides
from quantkit.measurement.cuda.device import GpuDevice, Implementation
from quantkit.measurement.cuda.sides import known
from quantkit.measurement.operators import cuda as ops_cuda
from quantkit.measurement.operators import run as ops_rows
from quantkit.measurement.operators import run as ops_run
from quantkit.measurement.operators.cuda import BASELINE, CudaBench, check_shape, foreign, torch_names, variant_of
from quantkit.measurement.operators.products import SweepPlan, measure
from quantkit.measurement.operators.run import Setting
from quantkit.measurement.operators.tax import Limits
from quantkit.measurement.rows import Operation, Row
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax import TaxAnswer

pytest.importorskip("triton")  # Linux alone has it


LINEAR = LinearShape(name="up", K=128, N=32)
DEVICE = GpuDevice("cpu", dry=True)


def bench() -> CudaBench:
    # the interpreter multiplies float16 exactly, and has no bfloat16 of its own
    return CudaBench(DEVICE, torch.float16)


def test_each_variant_is_ready_and_says_how_it_runs() -> None:
    names = [BASELINE, "int4.g32.zeros", "int4.g32.zeros without decoding", "int8.dynamic", "quantize int8"]
    found = bench().prepare(LINEAR, names, [3])
    assert not [side for side in found.values() if isinstance(side, str)]
    assert bench().quantizer("int8.dynamic") == "quantize int8"
    assert bench().twin("int4.g32.zeros") == "int4.g32.zeros without decoding"
    assert bench().twin("int8.dynamic") == bench().twin(BASELINE) == bench().twin("int4.g32.zeros.torch") == ""
    side: Any = found["int4.g32.zeros"]
    how = side.settings(3)
    assert how["kernel"] in (OURS, EXPANDED)
    assert (how["copies"], "config.block_n" in how) == (2, how["kernel"] == OURS)
    assert isinstance(side.step(3)(), float), "seconds by the device's own clock"
    assert side.cost.weight_bytes == 128 * 32 / 2 + 32 * 4 * 3
    assert found[BASELINE].resident_bytes == 2 * 128 * 32  # type: ignore[union-attr]


def test_the_fastest_way_is_taken_and_has_a_twin_if_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {OURS: 2.0, EXPANDED: 1.0, INT_MM: 1.5}
    monkeypatch.setattr(Implementation, "ready", lambda self: lambda: taken[self.name])
    one: Any = bench().prepare(LINEAR, ["int4.g32"], [3])["int4.g32"]
    assert one.settings(3)["kernel"] == EXPANDED
    with pytest.raises(InputError, match="no-twin"):
        one.twin(3)
    taken[EXPANDED] = 3.0
    one = bench().prepare(LINEAR, ["int4.g32"], [3])["int4.g32"]
    assert one.settings(3)["kernel"] == OURS
    whole: Any = bench().prepare(LINEAR, ["int8.dynamic"], [3])["int8.dynamic"]
    assert (whole.settings(3)["kernel"], one.settings(3)["config.block_m"]) == (INT_MM, 16)


def test_what_gives_wrong_numbers_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **more: Any) -> Implementation:
        made = real(*args, **more)
        return Implementation(made.name, [lambda: made.steps[0]() + 1.0], made.resident_bytes, made.settings)  # type: ignore[operator]

    real = sides.ours
    monkeypatch.setattr(ops_cuda, "_tried", lambda step: 1.0)  # ours, of equals
    assert not isinstance(bench().prepare(LINEAR, ["int8"], [3])["int8"], str)
    monkeypatch.setattr(sides, "ours", wrong)
    assert bench().prepare(LINEAR, ["int8"], [3]) == {"int8": "wrong-result"}


def test_torchs_own_operators_are_right_or_say_that_they_cannot() -> None:
    found: Any = bench().prepare(LINEAR, ["int8.dynamic.torch", "int4.g32.zeros.torch"], [3])
    assert found["int8.dynamic.torch"].settings(3)["kernel"] == "torch._int_mm"
    # it takes bfloat16 alone
    assert found["int4.g32.zeros.torch"] == "no-operator"


def test_a_full_gpu_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(variant: Any, *rest: Any) -> Any:
        if variant.format == "int4":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return real(variant, *rest)

    real = sides.held_copies
    monkeypatch.setattr(sides, "held_copies", full)
    found = bench().prepare(LINEAR, ["int4.g32", "int4.g32 without decoding", "int8"], [3])
    assert found["int4.g32"] == found["int4.g32 without decoding"] == "out-of-memory"
    assert not isinstance(found["int8"], str)


def test_codes_that_the_gpu_cannot_multiply_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuDevice, "sm", property(lambda self: 86))
    assert bench().prepare(LINEAR, ["fp8_e4m3.dynamic"], [1]) == {"fp8_e4m3.dynamic": "device-lacks-format"}


def test_groups_divide_the_inputs() -> None:
    check_shape(variant_of("int4.g64"), LinearShape(name="x", K=192, N=8))
    with pytest.raises(InputError, match=r"group-indivisible.*groups of 32 or 64"):
        check_shape(variant_of("int4.g128"), LinearShape(name="x", K=192, N=8))
    assert set(torch_names()) <= {f"{name}.torch" for name in known()}


def test_the_tax_is_split_where_the_kernel_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"torch.linear": 4e-3, OURS: 2e-3, EXPANDED: 9e-3, "quantkit raw twin": 1.5e-3, "quantize_tokens": 1e-4}
    seconds[INT_MM] = 9e-3
    monkeypatch.setattr(Implementation, "ready", lambda self: lambda: seconds[self.name])
    variants = ["int4.g32", "int8.dynamic"]
    timed = measure(bench(), [LINEAR], BASELINE, variants, SweepPlan([3], seconds=0.2, rounds=2))
    limits = Limits(1e9, {"bf16": 1e12, "fp16": 1e12, "int8": 1e12})
    setting = Setting("torch", None, DEVICE.identity(), {}, limits, 1e-6, 1, BASELINE)
    rows = ops_rows.rows(timed, setting, model="m")
    taxes = {(r.name, r.settings["variant"], r.op.layer): r for r in rows if r.name.startswith("tax.") and r.op}
    for layer in (None, "all linears"):
        bound = taxes["tax.total", "int4.g32", layer].op.bound_s  # type: ignore[union-attr]
        assert taxes["tax.streaming", "int4.g32", layer].value == pytest.approx(1.5e-3 - bound)
        assert taxes["tax.decode", "int4.g32", layer].value == pytest.approx(0.5e-3)
        assert taxes["tax.total", "int4.g32", layer].value == pytest.approx(2e-3 - bound)
        assert "sum-only" not in taxes["tax.total", "int4.g32", layer].flags
        assert "sum-only" in taxes["tax.total", "int8.dynamic", layer].flags
    assert taxes["tax.activation", "int8.dynamic", None].value == pytest.approx(1e-4)
    (base,) = [r for r in rows if r.name == "latency.op" and r.settings["variant"] == BASELINE and not r.op.layer]  # type: ignore[union-attr]
    # 2 bytes a weight, and 16-bit inputs and outputs
    assert base.op.hp_bound_s == pytest.approx((2 * 128 * 32 + 3 * 2 * (128 + 32)) / 1e9)  # type: ignore[union-attr]


def test_slower_products_at_the_end_are_throttling() -> None:
    def of(rate: float) -> list[dict[str, Any]]:
        return [{"name": "ceiling.compute", "settings": {"compute_type": "bf16"}, "value": rate}]

    assert device.slower(of(1.0), of(0.85))
    assert not device.slower(of(1.0), of(0.95))
    assert not device.slower(of(1.0), [])


@pytest.mark.thorough
def test_a_whole_run_in_a_process_of_its_own() -> None:
    linear = {"name": "up", "K": 128, "N": 32}
    rows = ops_run.run(ops_run.SweepJob([linear], "", "bfloat16", ["int8.dynamic"], [3], 0, 0.2, rounds=1))
    names = {row.name for row in rows}
    assert {"ceiling.read", "ceiling.compute", "latency.op", "tax.total", "tax.activation"} <= names
    assert all(row.settings.get("threads") is None for row in rows)
    (read,) = [row for row in rows if row.name == "ceiling.read"]
    assert read.settings["last_level_cache"] == 1


WIDE = LinearShape(name="up", K=256, N=128)
NAMES = list(foreign())


def prepared_foreign() -> Any:
    return CudaBench(GpuDevice("cpu", dry=True), torch.bfloat16).prepare(WIDE, NAMES, [3])


def test_each_format_is_timed_in_the_library_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    humming_library.install(monkeypatch)
    bench, found = CudaBench(GpuDevice("cpu", dry=True), torch.bfloat16), prepared_foreign()
    assert not [side for side in found.values() if isinstance(side, str)]
    for name, bits in zip(NAMES, (4.5, 4.25, 8, 4.125, 4.5, 4.625, 4.25, 4.3125, 4.125, 4.15625), strict=True):
        side = found[name]
        assert (bench.quantizer(name), bench.twin(name)) == ("", "")
        assert side.settings(3)["kernel"] in LAYERS
        assert abs(8 * side.resident_bytes / (128 * 256) - bits) < 0.01, name
        assert isinstance(side.step(3)(), float)


def test_what_was_timed_is_a_choice_that_a_bundle_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    humming_library.install(monkeypatch)
    device = GpuDevice("cpu", dry=True)
    timed = measure(
        CudaBench(device, torch.bfloat16), [WIDE], BASELINE, ["mxfp4"], SweepPlan([3], seconds=0.05, rounds=1)
    )
    setting = Setting("torch", None, device.identity(), {}, Limits(1e9, {"bf16": 1e12}), 1e-6, 1, BASELINE)
    answer: Any = TaxAnswer(None, ops_rows.rows(timed, setting), {}, {})  # type: ignore[arg-type]
    found = Recorded.of(answer.choices("mxfp4").as_bytes())
    choice = found.table.choose((128, 256), 3)
    # the codes and an exponent for 32 of them
    assert (choice.candidate, choice.config, choice.resident_bytes) == ("humming", None, 128 * 256 // 2 + 128 * 8)


def test_a_bundle_takes_the_packing_that_is_faster_over_its_traffic() -> None:
    shape = (128, 256)

    def row(variant: str, kernel: str, M: int, seconds: float) -> Row:
        op = Operation(layer=None, N=shape[0], K=shape[1], M=M, format="int4")
        settings = {"variant": variant, "kernel": kernel}
        device = {"id": "gpu", "kind": "gpu", "name": "a GPU"}
        common = {"name": "latency.op", "unit": "s", "stat": "median", "better": "lower", "runtime": "torch", "op": op}
        return Row(**common, subject="m", value=seconds, settings=settings, device=device, versions={"driver": "1"})  # type: ignore[arg-type]

    rows = [row("int4.g64", OURS, 1, 1.0), row("int4.g64", EXPANDED, 512, 9.0), row("int8", OURS, 1, 0.1)]
    rows += [row("int4.g64.humming", "humming", M, seconds) for M, seconds in ((1, 1.5), (512, 4.0))]

    def chosen(traffic: dict[int, float] | None) -> tuple[list[str], Any]:
        answer = TaxAnswer(None, rows, {}, {}, traffic=traffic)  # type: ignore[arg-type]
        kept = Recorded.of(answer.choices("int4.g64").as_bytes())  # type: ignore[union-attr]
        return [kept.table.choose(shape, M).candidate for M in (1, 512)], kept.traffic

    assert chosen({1: 0.99, 512: 0.01}) == ([OURS, EXPANDED], {1: 0.99, 512: 0.01})
    assert chosen({1: 0.5, 512: 0.5})[0] == ["humming", "humming"]
    # a step of one sequence, and a prompt for every 256 of them: 1,024 rows count as twice 512
    assert chosen(None) == ([OURS, EXPANDED], {1: 1.0, 512: 2 / 256})


def test_wrong_numbers_are_not_timed_and_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(prepared_foreign().values()) == {"kernel-unsupported"}
    humming_library.install(monkeypatch)
    forward = humming_library.HummingLayer.forward
    monkeypatch.setattr(humming_library.HummingLayer, "forward", lambda self, x: forward(self, x) * 1.1)
    assert set(prepared_foreign().values()) == {"wrong-result"}
