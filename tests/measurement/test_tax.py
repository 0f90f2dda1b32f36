from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import zoo
from exported import export, write_as

from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.measurement.operators.tax import Limits, StepCost, captured_gain, ideal, win_intervals
from quantkit.measurement.rows import Operation, Row
from quantkit.runtimes.llama_cpp.session import AttentionSizes, work_of_file
from quantkit.scheme import WeightScheme

LIMITS = Limits(10e9, {"fp32": 100e9, "int8": 400e9})


def test_cost_counts_each_byte_once():
    cost = StepCost("int4", 100.0, kv_bytes_per_token=2.0, io_bytes_per_token=3.0)
    assert (cost.bytes(1, 1, 0), cost.bytes(4, 1, 10)) == (100 + 2 + 3, 100 + 4 * (11 * 2 + 3))
    assert cost.bytes(1, 8, 0) == 100 + 8 * (2 + 3)


def test_many_rows_read_the_weights_of_their_way():
    cost = StepCost("int4", 100.0, io_bytes_per_token=3.0, many_rows=16, many_bytes=180.0)
    assert cost.bytes(batch=15, tokens=1, context=0) == 100 + 15 * 3
    assert cost.bytes(batch=16, tokens=1, context=0) == 180 + 16 * 3
    assert cost.bytes(batch=1, tokens=256, context=0) == 180 + 256 * 3


def test_bound_is_the_slower_of_reading_and_computing():
    cost = StepCost("float32", 1e9, flops_per_token=1e9, head_flops=1e8)
    assert cost.bound(1, 1, 0, LIMITS) == pytest.approx(0.1)
    assert cost.bound(64, 1, 0, LIMITS) == pytest.approx(64 * 1.1e9 / 100e9)
    assert cost.bound(1, 64, 0, LIMITS) == pytest.approx((64e9 + 1e8) / 100e9)
    # each new token looks at the cache and at those before it, itself too
    looks = StepCost("float32", 0.0, attention_flops=1.0)
    assert looks.bound(2, 3, 10, LIMITS) == pytest.approx(2 * (3 * 10 + 6) / 100e9)
    assert StepCost("int4", 1.0, flops_per_token=1.0, compute="int8").bound(1, 1, 0, Limits(1.0, {"fp32": 1.0})) is None
    assert cost.bound(1, 1, 0, Limits(None, {"fp32": 1.0})) is None


def tax(value, bound, hp_bound, hp):
    op = Operation(bound_s=bound, hp_bound_s=hp_bound, hp_s=hp)
    return Row(name="tax.total", value=value, unit="s", subject="a", op=op)


def test_captured_gain():
    # promised 4, delivered 2.5: half of what there was to gain
    assert captured_gain(tax(0.6, 1.0, 4.0, 4.0)) == pytest.approx(0.5)
    assert captured_gain(tax(0.0, 1.0, 4.0, 4.0)) == pytest.approx(1.0)
    assert captured_gain(tax(7.0, 1.0, 4.0, 4.0)) < 0
    assert captured_gain(tax(0.1, 1.0, 1.04, 2.0)) is None
    assert captured_gain(tax(None, None, None, 2.0)) is None


def test_ideal_break_even():
    ours, theirs = StepCost("int4", 1e9, flops_per_token=2e9), StepCost("float32", 8e9, flops_per_token=1e9)
    # 8e9/10e9 seconds of reading against m · 2e9/100e9 of computing: equal at m = 40
    assert ideal(ours, theirs, LIMITS, lambda m: (m, 1, 0)) == (pytest.approx(40, rel=1e-3), "")
    assert ideal(theirs, ours, LIMITS, lambda m: (m, 1, 0)) == (None, "ideal-wins-nowhere")
    assert ideal(StepCost("int4", 1e9), theirs, LIMITS, lambda m: (m, 1, 0)) == (None, "ideal-wins-everywhere")
    assert ideal(ours, theirs, Limits(None, {}), lambda m: (m, 1, 0)) == (None, "no-ceiling")


def wins(low, sizes=(1, 2, 4, 8), margin=1.02, noise=0.005):
    ratio = np.array(low) * margin
    draws = ratio[:, None] * np.exp(noise * np.random.default_rng(0).normal(size=(len(low), 400)))
    return win_intervals(sizes, low, ratio, draws)


def test_ends_are_interpolated_on_the_logarithm():
    (win,) = wins([2.0, 2.0, 2.0, 0.5])
    assert win.start is None
    # log 2 falls to −log 2 between 4 and 8: zero half way, at 4·√2
    assert win.end == pytest.approx(4 * 2**0.5)
    assert win.end_ci95[0] < win.end < win.end_ci95[1]
    assert win.end_ci95[1] / win.end_ci95[0] < 1.05


def test_several_ranges_and_ranges_without_end():
    first, second = wins([1.5, 0.8, 0.8, 1.5])
    assert (first.start, second.end) == (None, None)
    assert 1 < first.end < 2
    assert 4 < second.start < 8
    assert wins([0.9, 0.9, 0.99, 1.0]) == []
    (everywhere,) = wins([1.1, 1.2, 1.3, 1.4])
    assert (everywhere.start, everywhere.end, everywhere.end_ci95) == (None, None, None)
    (inner,) = wins([0.5, 2.0, 2.0, 0.5])
    assert 1 < inner.start < 2
    assert 4 < inner.end < 8


def test_more_noise_widens_the_interval_of_an_end():
    (sharp,), (blurred,) = wins([1.6, 1.3, 1.1, 0.8]), wins([1.6, 1.3, 1.1, 0.8], noise=0.05)
    assert blurred.end == sharp.end
    assert blurred.end_ci95[0] < sharp.end_ci95[0]
    assert blurred.end_ci95[1] > sharp.end_ci95[1]


def test_an_end_is_covered_by_its_interval():
    # the true curve 4/M crosses 1 at 4; each measurement is off by 3 %, and its interval 2 sigma wide
    rng, sizes, held = np.random.default_rng(1), np.array([1, 2, 8, 16]), 0
    for _ in range(60):
        ratio = 4 / sizes * np.exp(0.03 * rng.normal(size=4))
        draws = ratio[:, None] * np.exp(0.03 * rng.normal(size=(4, 300)))
        (win,) = win_intervals(sizes, ratio * np.exp(-0.06), ratio, draws)
        # what is estimated is where the lower end crosses: 4 · exp(−0.06)
        held += win.end_ci95[0] <= 4 * np.exp(-0.06) <= win.end_ci95[1]
    assert held >= 54


def test_one_size_has_no_ends():
    (win,) = wins([1.5], sizes=(1,))
    assert (win.start, win.end) == (None, None)


# of `zoo.tiny`
SIZES = AttentionSizes(layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=258)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("form", ["q8_0", "float32"])
def test_it_is_what_the_parameters_are(name: str, form: str, tmp_path: Path, merging_tokenizer: Any) -> None:
    model = zoo.tiny(name, vocab_size=len(merging_tokenizer))
    model.save_pretrained(tmp_path / "m")
    merging_tokenizer.save_pretrained(tmp_path / "m")
    how = None if form == "float32" else WeightScheme(format=form)
    made = export(tmp_path / "m", tmp_path / "b", how, layout="dense")
    write_as(EXPORT, made.folder, made.source, made.stream, made.results, {"floats": "float32"})
    path = made.folder / "gguf" / "model.gguf"
    found = StepCost(form, **work_of_file(path, SIZES))
    tied = name == "llama-tied"
    inside = [value for key, value in model.named_parameters() if value.dim() > 1 and ".layers." in key]
    table = model.get_input_embeddings().weight
    assert found.flops_per_token == 2 * sum(value.numel() for value in inside)
    assert found.head_flops == 2 * table.numel()
    stored = {each.name: int(each.n_bytes) for each in gguf.GGUFReader(path).tensors}
    assert ("output.weight" in stored) is not tied
    read = sum(stored.values()) - (0 if tied else stored["token_embd.weight"])
    assert (found.weight_bytes, found.compute) == (read, "fp32" if form == "float32" else "int8")
    assert found.float_bytes == (4 * table.numel() if form == "q8_0" else found.flops_per_token * 2 + 4 * table.numel())
    # keys and values of two layers, two heads of 16, in float16
    assert (found.kv_bytes_per_token, found.attention_flops) == (2 * 2 * 2 * 16 * 2, 4 * 2 * 4 * 16)
