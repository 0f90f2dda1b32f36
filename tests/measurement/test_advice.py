"""What to do about several formats: a pure function of times; swap two formats' times and it swaps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import MeasuredFormat, advise, verdicts

BATCHES = (1, 8, 64)
# milliseconds at each batch; float32 takes 10, 12, 40
FLOAT = {1: 10.0, 8: 12.0, 64: 40.0}
INT4 = {1: 2.5, 8: 8.0, 64: 50.0}
INT8 = {1: 4.0, 8: 6.0, 64: 25.0}
NF4 = {1: 50.0, 8: 55.0, 64: 70.0}


def row(batch: int, time: float, spread: float = 0.02) -> Row:
    ratio = FLOAT[batch] / time
    return Row.model_validate(
        {
            "name": "latency.op",
            "value": time / 1e3,
            "unit": "s",
            "subject": "op",
            "batch": batch,
            "n": 40,
            "op": {"layer": "all linears", "M": batch},
            "baseline": {
                "subject": "op:float32",
                "value": FLOAT[batch] / 1e3,
                "ratio": ratio,
                "ratio_ci95": [ratio * (1 - spread), ratio * (1 + spread)],
            },
        }
    )


def measured(name: str, times: Mapping[int, float], spread: float = 0.02) -> MeasuredFormat:
    return MeasuredFormat(name, [row(batch, time, spread) for batch, time in times.items()])


def test_the_best_of_those_that_win() -> None:
    found = advise([measured("int4", INT4), measured("int8", INT8), measured("nf4", NF4)], BATCHES)
    assert (found.answer, found.format, found.batch) == ("ship_it", "int8", None)
    assert found.because[-1].startswith("batch 64, all linears: 25 ms against 40 ms, 1.60 times as fast")


def test_swapped_times_swap_the_advice() -> None:
    straight = advise([measured("a", INT4), measured("b", NF4)], BATCHES)
    swapped = advise([measured("a", NF4), measured("b", INT4)], BATCHES)
    assert (straight.answer, straight.format, straight.batch) == ("ship_up_to", "a", 8)
    assert (swapped.answer, swapped.format, swapped.batch) == ("ship_up_to", "b", 8)
    assert straight.because == swapped.because


def test_about_one_format_another_is_named_where_it_is_better() -> None:
    formats = [measured("nf4", NF4), measured("int4", INT4)]
    found = advise(formats, BATCHES, subject="nf4")
    assert (found.answer, found.format, found.batch) == ("use_instead", "int4", 8)
    assert found.because[0].startswith("nf4: batch")
    assert "0.20 times as fast" in found.because[0], "in the order of the batches"
    assert all(reason.startswith("int4: ") for reason in found.because[1:])
    assert len(found.because) == 3
    assert advise(formats, BATCHES, subject="int4").answer == "ship_up_to"


def test_traffic_decides_between_two_that_win() -> None:
    formats = [measured("int4", INT4), measured("int8", INT8)]
    assert advise(formats, BATCHES, traffic={1: 1.0}).format == "int4"
    assert advise(formats, BATCHES, traffic={1: 0.1, 8: 0.9}).format == "int8"
    mostly = advise(formats, BATCHES, traffic={1: 0.999, 8: 0.001})
    assert (mostly.answer, mostly.format) == ("ship_it", "int4")
    assert "over the traffic" in mostly.because[0]
    # int4 loses at 64, which the traffic has
    assert advise([formats[0]], BATCHES, traffic={1: 0.9, 64: 0.1}).batch == 1


def test_none_wins() -> None:
    found = advise([measured("nf4", NF4)], BATCHES)
    assert (found.answer, found.format) == ("do_not_quantize", "nf4")
    several = advise([measured("nf4", NF4), measured("fp8", {1: 90.0, 8: 95.0, 64: 99.0})], BATCHES)
    assert (several.answer, several.format) == ("do_not_quantize", None)
    assert [reason.partition(":")[0] for reason in several.because] == ["nf4", "fp8"]


def test_noise_is_no_loss() -> None:
    even = {batch: time / 1.02 for batch, time in FLOAT.items()}
    found = advise([measured("nf4", NF4), measured("int4", even, spread=0.2)], BATCHES)
    assert (found.answer, found.format) == ("inconclusive", "int4")


def test_each_has_its_own_verdict() -> None:
    absent = Row.model_validate(
        {"name": "latency.op", "value": None, "unit": "s", "subject": "x", "batch": 1, "flags": ["wrong-result"]}
    )
    formats = [measured("int4", INT4), measured("int8", INT8), measured("nf4", NF4), MeasuredFormat("int2", [absent])]
    found = {own.format: own.answer for own in verdicts(formats, BATCHES)}
    assert found == {"int4": "ship_up_to", "int8": "ship_it", "nf4": "do_not_quantize", "int2": "not_measured"}
    assert verdicts(formats, BATCHES)[3].because == ["nothing was timed: wrong-result"]


def test_single_shapes_have_to_win_all() -> None:
    rows = [row(1, 5.0), row(1, 20.0)]
    assert verdicts([MeasuredFormat("int4", rows)], (1,))[0].answer == "do_not_quantize"


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(InputError, match="not-measured"):
        advise([], BATCHES)
    with pytest.raises(InputError, match="traffic-invalid"):
        advise([measured("int4", INT4)], BATCHES, traffic={1: -1.0})
