"""Choosing a kernel is arithmetic on measured times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.kernels.dispatch import Config, KernelTiming, Table, candidates, fastest, unmeasured, width

SHAPE = (14336, 4096)
OURS = Config(64, 16, 2, 4, 4, 3).as_dict()
TIMES = [
    KernelTiming("weight_only", SHAPE, 1, 8e-6, 30_000_000, OURS),
    KernelTiming("torch._weight_int4pack_mm", SHAPE, 1, 12e-6, 30_000_000),
    KernelTiming("dequantize_matmul", SHAPE, 1, 60e-6, 30_000_000),
    KernelTiming("weight_only", SHAPE, 512, 90e-6, 30_000_000, OURS),
    KernelTiming("dequantize_matmul", SHAPE, 512, 85e-6, 30_000_000),
]


def test_the_fastest_wins_at_each_batch() -> None:
    table = fastest(TIMES)
    assert table.choose(SHAPE, 1).candidate == "weight_only"
    assert table.choose(SHAPE, 1).config == OURS
    assert table.choose(SHAPE, 512).candidate == "dequantize_matmul"


def test_swapped_times_swap_the_choice() -> None:
    ours, theirs, *others = TIMES
    swapped = [replace(ours, seconds=theirs.seconds), replace(theirs, seconds=ours.seconds), *others]
    assert fastest(swapped).choose(SHAPE, 1).candidate == "torch._weight_int4pack_mm"


def test_between_batches_the_larger_one_decides() -> None:
    table = fastest(TIMES)
    assert table.choose(SHAPE, 2).batch == 512
    assert table.choose(SHAPE, 100_000).batch == 512


def test_a_tie_goes_to_fewer_bytes() -> None:
    small = KernelTiming("b", SHAPE, 1, 8e-6, 1)
    assert fastest([*TIMES, small]).choose(SHAPE, 1).candidate == "b"


def test_what_failed_is_passed_over() -> None:
    failed = [KernelTiming("nan", SHAPE, 1, float("nan"), 1), KernelTiming("zero", SHAPE, 1, 0.0, 1), *TIMES]
    assert fastest(failed).choose(SHAPE, 1).candidate == "weight_only"
    with pytest.raises(InputError) as caught:
        fastest([KernelTiming("nan", SHAPE, 1, float("nan"), 1)])
    assert caught.value.code == "nothing-measured"


def test_a_layer_has_one_packing_by_the_sum_over_its_traffic() -> None:
    other = [KernelTiming("humming", SHAPE, 1, 12e-6, 1), KernelTiming("humming", SHAPE, 512, 60e-6, 1)]
    # ours 8 and 85
    for traffic, names in (
        ({1: 6.0, 512: 1.0}, {"humming"}),
        ({1: 7.0, 512: 1.0}, {"weight_only", "dequantize_matmul"}),
        # between two measured batches the larger one's time counts
        ({1: 7.0, 300: 2.0}, {"humming"}),
        (None, {"humming"}),
    ):
        table = fastest([*TIMES, *other], traffic=traffic)
        assert {choice.candidate for choice in table.choices[SHAPE]} == names
    # a packing that failed at one batch would be used there unmeasured
    table = fastest([*TIMES, *other[1:]], traffic={512: 1.0})
    assert table.choose(SHAPE, 1).candidate == "weight_only"
    # each shape for itself
    table = fastest([*TIMES, replace(other[0], shape=(8, 8))])
    assert [table.choices[shape][0].candidate for shape in (SHAPE, (8, 8))] == ["weight_only", "humming"]
    with pytest.raises(InputError, match="batches 1, 512; one packing needs"):
        fastest([TIMES[0], other[1]])


def test_a_table_is_plain_data() -> None:
    table = fastest(TIMES)
    again = Table.of(json.loads(json.dumps(table.as_dict())))
    assert again.as_dict() == table.as_dict()
    assert again.choose(SHAPE, 1) == table.choose(SHAPE, 1)
    assert Config.of(again.choose(SHAPE, 1).config or {}).block_n == 64
    for wrong in ({}, {"schema": 2, "choices": []}, {"schema": 1, "choices": [{"N": 1}]}):
        with pytest.raises(InputError, match="as `Table"):
            Table.of(wrong)


@pytest.mark.parametrize(("shape", "batch", "code"), [((1, 1), 1, "shape-unmeasured"), (SHAPE, 0, "batch-invalid")])
def test_what_was_not_measured_is_an_error(shape: tuple[int, int], batch: int, code: str) -> None:
    with pytest.raises(InputError) as caught:
        fastest(TIMES).choose(shape, batch)
    assert caught.value.code == code


@pytest.mark.parametrize("batch", [1, 9, 16, 17, 32, 33, 128, 512])
def test_configurations_can_run(batch: int) -> None:
    """Whole fragments for every warp, powers of two, and no more of K's splits than there are steps in the shapes."""
    for config in candidates(batch) + candidates(batch, native=True):
        if config.whole_k:
            assert config.block_n in (16, 32) and config.split == 1 and batch <= 32
            # whole steps in K = 4096 and 14336, of 64 columns a tile and of 32
            assert 14336 % (config.warps * config.unroll * 64) == 4096 % (config.warps * config.unroll * 64) == 0
            continue
        assert config.block_n % (16 * config.warps) == 0
        assert config.block_m & (config.block_m - 1) == 0
        assert config.split == 1 or batch <= 128 or config in candidates(batch, native=True)
        assert config.split * config.unroll * 64 <= 4096


def test_a_whole_k_is_tried_for_up_to_32_rows_and_not_chosen_before_it_was_timed() -> None:
    for batch in (1, 8, 16, 32):
        assert candidates(batch)[1].whole_k and not candidates(batch)[0].whole_k
        assert max(each.block_m for each in candidates(batch) if each.whole_k) <= width(batch)
        assert not unmeasured(4096, batch, 132).whole_k
    assert not any(each.whole_k for each in candidates(33) + candidates(1, native=True))
    config = candidates(1)[1]
    assert Config.of(config.as_dict()) == config


def test_where_nothing_was_measured_the_tile_sizes_are_those_that_an_h200_was_fast_with() -> None:
    record = json.loads((Path(__file__).parents[2] / "benchmarks/results/gpu-run-20261126.json").read_text())
    seconds: dict[tuple[str, int, int], dict[Config, float]] = {}
    for each in record["configs"]:
        if each["variant"].startswith("int4"):
            place = each["variant"], each["shape"][0] * each["shape"][1], each["batch"]
            seconds.setdefault(place, {})[Config.of(each["config"])] = each["seconds"]
    rows = {each["shape"][0] * each["shape"][1]: each["shape"][0] for each in record["configs"]}
    assert len(seconds) == 2 * 4 * 5
    off = []
    for (_, shape, batch), tried in seconds.items():
        chosen = unmeasured(rows[shape], batch, record["device"]["multiprocessors"])
        off.append(tried[chosen] / min(tried.values()))
    assert max(off) < 1.25
    assert sorted(off)[len(off) // 2] < 1.01
