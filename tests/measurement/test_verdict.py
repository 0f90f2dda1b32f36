"""Verdicts on measured rows, and prompts beside them."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.bundle import Check, Verdict
from quantkit.errors import InputError
from quantkit.measurement.operators.tax import Limits
from quantkit.measurement.rows import Baseline, Row
from quantkit.measurement.timing.latency import latency_row
from quantkit.measurement.verdict import MeasuredFormat, advise, state, verdict, verdicts, with_prompts
from quantkit.stats.abba import compare
from quantkit.stats.slowdown import Noise

BATCHES = (1, 2, 4, 8)
FAILED = Check(name="gate.kl_max", value=0.4, limit=0.25, ok=False)
PASSED = Check(name="gate.kl_max", value=0.1, limit=0.25, ok=True)


def row(batch, ratio, *, width=0.02, context=128, n=120, p99=None, p99_width=0.1, flags=(), **kept):
    low, high = ratio / (1 + width), ratio * (1 + width)
    tail = ratio if p99 is None else p99
    fields = {
        "name": "latency.decode_step",
        "value": 0.03 / ratio,
        "unit": "s",
        "subject": "a",
        "batch": batch,
        "shape": {"new_tokens": 1, "context": context},
        "baseline": Baseline(subject="b", value=0.03, ratio=ratio, ratio_ci95=(low, high)),
        "n": n,
        "settings": {
            "p99_ratio": tail,
            "p99_ratio_low": tail / (1 + p99_width),
            "p99_ratio_high": tail * (1 + p99_width),
        },
        "flags": list(flags),
    }
    return Row(**(fields | kept))


def missing(batch, flag="out-of-memory"):
    return Row(name="latency.decode_step", value=None, unit="s", subject="a", batch=batch, flags=[flag])


def of(*ratios, checks=(PASSED,), name="int4", **kept):
    rows = [row(batch, ratio, **kept) for batch, ratio in zip(BATCHES, ratios, strict=False)]
    return MeasuredFormat(name, rows, checks)


def answer(subject, batches=BATCHES, **kept):
    found = verdict(subject, batches, **kept)
    return found.answer, found.batch


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((2.5, 2.0, 1.5, 1.1), ("ship_it", None)),
        ((2.5, 2.0, 1.5, 0.9), ("ship_up_to", 4)),
        ((2.5, 2.0, 0.9, 0.9), ("ship_up_to", 2)),
        ((2.5, 2.0, 1.0, 0.9), ("ship_up_to", 2)),
        ((0.9, 0.8, 0.9, 0.5), ("do_not_quantize", None)),
        ((1.0, 1.0, 1.0, 1.0), ("do_not_quantize", None)),
        ((0.9, 2.0, 2.0, 2.0), ("intervals", None)),
        ((2.0, 0.9, 2.0, 0.9), ("intervals", None)),
    ],
)
def test_the_pattern_of_batches_decides(ratios, expected):
    assert answer(of(*ratios)) == expected


def test_swapped_times_swap_the_verdict():
    fast, slow = (2.5, 2.0, 1.5, 1.2), (0.4, 0.5, 0.7, 0.8)
    assert (answer(of(*fast, name="int4"))[0], answer(of(*slow, name="nf4"))[0]) == ("ship_it", "do_not_quantize")
    assert (answer(of(*slow, name="int4"))[0], answer(of(*fast, name="nf4"))[0]) == ("do_not_quantize", "ship_it")
    # and which of two is named when a third fails its gate
    third = MeasuredFormat("int3", [], [FAILED])
    for int4, nf4, named in ((fast, slow, "int4"), (slow, fast, "nf4")):
        found = verdict(third, BATCHES, others=[of(*int4, name="int4"), of(*nf4, name="nf4")])
        assert (found.answer, found.format) == ("use_instead", named)


def test_a_failed_gate_comes_before_any_speed():
    fast = of(3.0, 3.0, 3.0, 3.0, checks=(PASSED, FAILED))
    found = verdict(fast, BATCHES)
    assert found.answer == "do_not_quantize"
    assert found.because == ["int4 failed gate.kl_max: 0.4 against a limit of 0.25"]
    # another that fails as well, loses, or was only predicted, is no help
    others = [
        of(3.0, 3.0, 3.0, 3.0, checks=(FAILED,), name="nf4"),
        of(0.9, 0.9, 0.9, 0.9, name="int2"),
        of(3.0, 3.0, 3.0, 3.0, name="fp8_e4m3", flags=["predicted"]),
        MeasuredFormat("mxfp4", []),
    ]
    assert answer(fast, others=others)[0] == "do_not_quantize"
    found = verdict(fast, BATCHES, others=[*others, of(1.5, 1.2, 0.9, 0.9, name="int8")])
    assert (found.answer, found.format, found.batch) == ("use_instead", "int8", 2)
    assert len(found.because) == 3
    assert found.because[1].startswith("int8: batch 1")


def test_a_batch_wins_only_at_every_context():
    rows = [row(1, 2.0), row(1, 1.5, context=1024), row(2, 2.0), row(2, 0.9, context=1024)]
    assert answer(MeasuredFormat("int4", rows), (1, 2)) == ("ship_up_to", 1)


def test_a_worse_p99_loses_the_batch():
    assert state(row(1, 2.0, p99=0.7)) == "loses"
    assert answer(of(2.0, 2.0, 2.0, 2.0, p99=0.7))[0] == "do_not_quantize"
    # no interval above 1 is asked of it
    assert state(row(1, 2.0, p99=0.95)) == "wins"
    # and what noise swamps has no veto, and is said
    few = MeasuredFormat("int4", [row(1, 2.0, p99=0.7, n=30)])
    found = verdict(few, [1])
    assert found.answer == "ship_it"
    assert found.because[0].endswith("; p99 from 30 steps is not judged")
    wide = verdict(MeasuredFormat("int4", [row(1, 2.0, p99=0.9, p99_width=0.5)]), [1])
    assert wide.answer == "ship_it"
    assert "p99 not shown to differ (0.60 to 1.35)" in wide.because[0]


def test_a_gain_within_the_aa_spread_is_no_gain():
    """Both sides in one run: an interval of its own says nothing of what lasts as long as the run."""
    close = verdict(MeasuredFormat("int4", [row(1, 1.04, aa_spread=0.051)]), [1])
    assert close.answer == "inconclusive"
    assert close.because[0].endswith("not decided: with this machine's noise the interval is 0.99 to 1.10")
    assert "--seconds" in close.because[-1]
    # of a gain that is far smaller than anybody cares for, noise hides nothing
    none = verdict(MeasuredFormat("int4", [row(1, 1.01, width=0.005, aa_spread=0.015)]), [1])
    assert none.answer == "do_not_quantize"
    assert "two measurements of one side differ by 1.5 %" in none.because[0]
    clear = verdict(MeasuredFormat("int4", [row(1, 1.2, aa_spread=0.051)]), [1])
    assert clear.answer == "ship_it"
    assert "differ by" not in clear.because[0]


def test_two_measurements_of_one_side_that_differ_by_108_percent_ship_nothing():
    seen = row(1, 1.9, width=0.1, aa_spread=1.08)
    assert (state(seen), answer(MeasuredFormat("int8.dynamic", [seen]), [1])[0]) == ("open", "inconclusive")


def test_faster_than_bytes_and_operations_allow_is_not_believed():
    """24.13 times as fast (21.95 to 27.39), where the roofline promises 7.42 and is known to 5 %."""
    fast = row(1, 24.13, width=0.1, aa_spread=0.02)
    limits = Limits(10e9, {"fp32": 100e9}, error=0.05)
    fast = fast.model_copy(update={"settings": fast.settings | limits.promise(1.0, 7.42)})
    found = verdict(MeasuredFormat("int4", [fast, row(2, 2.0)]), [1, 2])
    assert found.answer != "ship_it"
    found = verdict(MeasuredFormat("int4", [fast]), [1])
    assert found.answer == "inconclusive"
    assert "bytes and operations allow 8.18 at most: a time or a ceiling is wrong" in found.because[0]
    # what is allowed is believed, though its interval reaches beyond
    near = row(1, 8.0, width=0.1)
    near = near.model_copy(update={"settings": near.settings | limits.promise(1.0, 7.42)})
    assert state(near) == "wins"


def test_equal_sides_ship_at_most_once_in_300():
    """Noise is planted, and both sides are one thing: an interval of 95 % alone would ship many of them."""
    noises = (Noise(), Noise(0.05, 0.05, 3.0, 0.9), Noise(0.2, 0.1, 3.0, 0.9))
    shipped = plain = 0
    for number in range(300):
        generator, rows = np.random.default_rng(number), []
        for batch in (1, 8):
            found = compare(*noises[number % 3].night(generator, blocks=8), resamples=99, seed=number)
            common = {"subject": "a", "batch": batch, "n": found.n, "aa_spread": found.aa_spread}
            rows.append(latency_row("latency.decode_step", found, "b", settings={}, flags=[], common=common))
        plain += any(each.baseline.ratio_ci95[0] > 1 for each in rows)
        shipped += verdict(MeasuredFormat("int4", rows), (1, 8)).answer not in ("inconclusive", "do_not_quantize")
    assert shipped <= 1
    assert plain >= 5, "else this noise is no test"


def test_noise_makes_it_inconclusive():
    noisy = of(1.2, 1.1, 1.1, 0.9, width=0.4)
    found = verdict(noisy, BATCHES)
    assert found.answer == "inconclusive"
    assert any("not decided: with this machine's noise" in reason for reason in found.because)
    # nor does a gain that is no larger than what a busy machine may hide, whatever its interval says
    busy = verdict(of(1.09, 1.09, 1.09, 1.09, flags=["noisy"]), BATCHES)
    assert (busy.answer, busy.batch) == ("inconclusive", None)
    assert all("not decided: the machine was busy" in reason for reason in busy.because[:-1])
    # a factor of two is seen on a busy machine too, but not where the interval is as wide
    assert answer(of(1.98, 1.98, 1.98, 1.98, flags=["noisy"]))[0] == "ship_it"
    assert answer(of(1.98, 1.98, 1.98, 1.98, width=0.8, flags=["noisy"]))[0] == "inconclusive"
    # a tie that is measured well is none
    assert answer(of(1.0, 1.0, 1.0, 1.0, width=0.03))[0] == "do_not_quantize"
    # one sure win is worth more than the open rest
    rows = [row(1, 2.0), row(2, 1.1, width=0.4)]
    assert answer(MeasuredFormat("int4", rows), (1, 2)) == ("ship_up_to", 1)


def test_what_does_not_fit_has_not_won():
    rows = [row(1, 2.0), row(2, 2.0), missing(4), missing(8)]
    found = verdict(MeasuredFormat("int4", rows), BATCHES)
    assert (found.answer, found.batch) == ("ship_up_to", 2)
    assert found.because[-1].endswith("Not measured: batch 4, 8 (out-of-memory)")


def test_a_reason_holds_its_three_numbers():
    found = verdict(of(2.66, 2.0, 1.5, 0.9), BATCHES)
    assert found.because == [
        "batch 1, context 128: 11.3 ms a step against 30 ms, 2.66 times as fast (2.61 to 2.71)",
        "batch 4, context 128: 20 ms a step against 30 ms, 1.50 times as fast (1.47 to 1.53)",
        "batch 8, context 128: 33.3 ms a step against 30 ms, 0.90 times as fast (0.88 to 0.92)",
    ]
    weakest = verdict(of(2.6, 1.3, 1.5, 1.4), BATCHES).because
    assert [reason.split(",")[0] for reason in weakest] == ["batch 1", "batch 2", "batch 8"]
    assert verdict(of(0.9, 2.0, 2.0, 0.9), BATCHES).because[0].startswith("wins at batch 2 to 4. batch 1,")
    few = verdict(MeasuredFormat("int4", [row(1, 2.0, n=60), row(2, 1.8, n=96), row(4, 1.5)]), [1, 2, 4]).because
    assert [reason.endswith("; p99 from 60 to 96 steps is not judged") for reason in few] == [False, False, True]


def test_a_prediction_is_a_forecast_and_gives_way_to_a_measurement():
    guess = of(3.0, 3.0, 3.0, 3.0, flags=["predicted"])
    found = verdict(guess, BATCHES)
    assert (found.answer, found.forecast) == ("ship_it", True)
    assert "would confirm it" in found.because[-1]
    both = MeasuredFormat("int4", [*guess.rows, *of(0.8, 0.8).rows])
    found = verdict(both, BATCHES)
    # batches 4 and 8 were only predicted: that is not measured
    assert (found.answer, found.forecast) == ("do_not_quantize", False)


def test_traffic_names_the_batches_and_weighs_the_time():
    found = verdict(of(2.0, 2.0, 0.5, 0.5), BATCHES, traffic={1: 0.75, 4: 0.25})
    assert (found.answer, found.batch) == ("ship_up_to", 1)
    # 0.75 · 15 + 0.25 · 60 ms against 30
    assert found.because[0].startswith("over the traffic: 26.2 ms a step against 30 ms, 1.14 times as fast. batch 1")
    assert answer(of(2.0, 2.0, 0.5, 0.5), traffic={1: 1.0, 8: 0.0}) == ("ship_it", None)
    with pytest.raises(InputError, match="traffic-invalid"):
        verdict(of(2.0), BATCHES, traffic={1: -1.0, 2: 1.0})


def test_a_model_that_does_not_decode_is_judged_by_its_prefill():
    rows = [row(b, 1.5, name="latency.prefill", shape={"new_tokens": 64, "context": 0}) for b in BATCHES]
    found = verdict(MeasuredFormat("int8", rows), BATCHES)
    assert found.answer == "ship_it"
    assert found.because[0].startswith("batch 1, 64 tokens: 20 ms a prefill")
    # the prefill of one that does is not asked
    assert answer(MeasuredFormat("int8", [*of(0.9, 0.9, 0.9, 0.9).rows, *rows]))[0] == "do_not_quantize"


def test_nothing_measured_is_no_verdict():
    for rows in ([], [missing(1)], [row(64, 2.0)]):
        with pytest.raises(InputError, match="not-measured"):
            verdict(MeasuredFormat("int4", rows), BATCHES)
    with pytest.raises(InputError, match="no-batches"):
        verdict(of(2.0), [])


ratios = st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4)
widths = st.floats(0.001, 0.5)


def winning(subject):
    return {b for b, r in zip(BATCHES, subject.rows, strict=True) if state(r) == "wins"}


@given(ratios, widths, st.floats(1.0, 3.0), st.integers(0, 3))
def test_a_faster_batch_never_loses_what_was_won(values, width, faster, which):
    quicker = [value * faster if i == which else value for i, value in enumerate(values)]
    before, after = of(*values, width=width), of(*quicker, width=width)
    assert winning(before) <= winning(after)
    if answer(before)[0] == "ship_it":
        assert answer(after)[0] == "ship_it"
    if answer(before)[0] == "ship_up_to" and answer(after)[0] == "ship_up_to":
        assert answer(after)[1] >= answer(before)[1]


@given(ratios, widths)
def test_the_answer_says_no_more_than_what_was_won(values, width):
    subject = of(*values, width=width)
    found, won = verdict(subject, BATCHES), winning(subject)
    prefix = [batch for batch in BATCHES if found.batch is not None and batch <= found.batch]
    assert (found.answer == "ship_it") == (won == set(BATCHES))
    assert not won or found.answer != "do_not_quantize"
    assert won or found.answer in {"do_not_quantize", "inconclusive"}
    assert set(prefix) <= won
    assert (found.answer == "ship_up_to") == (won == set(prefix) and bool(won) and won != set(BATCHES))
    assert 1 <= len(found.because) <= 3 + (found.answer == "inconclusive")  # what to do


@given(ratios, widths, st.floats(1.1, 3.0))
def test_more_noise_wins_nothing(values, width, noisier):
    assert winning(of(*values, width=width * noisier)) <= winning(of(*values, width=width))


@given(ratios, widths, ratios)
def test_a_failed_check_never_ships(values, width, others):
    failed = of(*values, width=width, checks=(PASSED, FAILED))
    found = verdict(failed, BATCHES, others=[of(*others, name="int8")])
    assert found.answer in {"use_instead", "do_not_quantize"}
    assert (found.answer == "use_instead") == (answer(of(*others))[0] in {"ship_it", "ship_up_to"})


@given(st.permutations(list(zip(BATCHES, (2.0, 1.5, 1.2, 0.8), strict=True))))
def test_the_order_of_rows_does_not_matter(pairs):
    subject = MeasuredFormat("int4", [row(batch, ratio) for batch, ratio in pairs])
    assert verdict(subject, BATCHES) == verdict(of(2.0, 1.5, 1.2, 0.8), BATCHES)


def beyond(batch, ratio, most):
    """A speed-up that bytes and operations do not allow, measured without noise."""
    found = row(batch, ratio, width=0.01, aa_spread=0.01)
    return found.model_copy(update={"settings": found.settings | {"promised_most": most}})


def test_traffic_is_not_told_with_a_time_that_is_not_believed():
    rows = [row(1, 1.2), beyond(8, 24.0, 7.0)]
    found = verdict(MeasuredFormat("int4", rows), (1, 8), traffic={1: 0.9, 8: 0.1})
    assert (found.answer, found.batch) == ("ship_up_to", 1)
    assert not any("over the traffic" in reason for reason in found.because)
    # most of the traffic is where nothing is known
    noisy = [row(1, 2.0), row(8, 9.0, aa_spread=8.0)]
    for known in (rows, noisy):
        assert verdict(MeasuredFormat("int4", known), (1, 8), traffic={1: 0.1, 8: 0.9}).answer == "inconclusive"


def test_gaps_that_only_noise_makes_are_no_pattern():
    rows = [row(1, 2.0), row(2, 2.0, aa_spread=1.5), row(4, 2.0)]
    assert answer(MeasuredFormat("int4", rows), (1, 2, 4)) == ("inconclusive", None)
    assert answer(MeasuredFormat("int4", [*rows[:1], row(2, 0.8), rows[2]]), (1, 2, 4)) == ("intervals", None)


def test_advice_ranks_by_what_is_believed():
    honest = MeasuredFormat("int8", [row(1, 1.6), row(8, 1.6)])
    liar = MeasuredFormat("int4", [row(1, 1.11), beyond(8, 24.0, 7.0)])
    for traffic in (None, {1: 0.5, 8: 0.5}):
        assert advise([liar, honest], (1, 8), traffic=traffic).format == "int8"


STEPS = Verdict(answer="ship_it", because=["batch 1: 2 times as fast"])


def prompt(tokens: int, ratio: float, *, batch: int = 1, width: float = 0.02, **settings: float) -> Row:
    interval = ratio / (1 + width), ratio * (1 + width)
    against = Baseline(subject="b", value=0.3, ratio=ratio, ratio_ci95=interval)
    shape = {"new_tokens": tokens, "context": 0}
    return Row(
        name="latency.prefill", value=0.3 / ratio, unit="s", subject="a", batch=batch, shape=shape, baseline=against,
        n=10, settings=settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "faster", "slower", "open_"),
    [
        ([prompt(64, 1.3), prompt(256, 1.0), prompt(1024, 0.8)], [64], [1024], [256]),
        ([prompt(1024, 2.0), prompt(256, 2.0)], [256, 1024], [], []),
        ([prompt(256, 1.1, width=0.2)], [], [], [256]),
        # the slowest batch decides a length
        ([prompt(256, 2.0), prompt(256, 0.7, batch=4)], [], [256], []),
        # more than bytes and operations allow is not believed
        ([prompt(256, 2.0, promised_most=1.2)], [], [], [256]),
    ],
)
def test_each_length_is_faster_slower_or_open(
    rows: list[Row], faster: list[int], slower: list[int], open_: list[int]
) -> None:
    found = with_prompts(STEPS, rows).prompts
    assert found is not None
    assert (found.faster, found.slower, found.open) == (faster, slower, open_)


def test_the_answer_is_that_of_the_steps_and_the_prompts_say_why() -> None:
    found = with_prompts(STEPS, [prompt(256, 0.8), prompt(1024, 0.5)])
    assert (found.answer, found.because[0]) == ("ship_it", STEPS.because[0])
    assert [each.partition(":")[0] for each in found.because[1:3]] == ["batch 1, 256 tokens", "batch 1, 1024 tokens"]
    assert found.because[3] == found.instead


def test_where_it_is_slower_something_else_is_named() -> None:
    slow = [prompt(256, 0.8)]
    assert with_prompts(STEPS, slow).instead == "for prompts of 256 tokens: use the float model (`--recipe float`)"
    found = with_prompts(Verdict(answer="ship_up_to", batch=4), slow, setting="onnx.prefill=int8").instead
    assert found.startswith("for batches above 4 and prompts of 256 tokens: compile with `--set onnx.prefill=int8`")


def test_a_setting_is_named_only_for_prompts_that_are_slower() -> None:
    level, up_to = [prompt(256, 1.0)], Verdict(answer="ship_up_to", batch=0)
    assert with_prompts(STEPS, level, setting="onnx.prefill=int8").instead == ""
    steps = [*level, *of(1.5).rows]
    said = with_prompts(up_to, steps, setting="onnx.prefill=int8").instead
    assert said == "for batches above 0: use the float model (`--recipe float`)"


def test_what_is_slower_nowhere_needs_nothing_instead() -> None:
    found = with_prompts(STEPS, [prompt(256, 1.5)], setting="onnx.prefill=int8")
    assert (found.instead, found.because[-1][:19]) == ("", "batch 1, 256 tokens")


def test_without_prompts_nothing_is_said_of_them() -> None:
    assert with_prompts(STEPS, []) == STEPS


SIZES = (1, 8, 64)
# milliseconds at each batch; float32 takes 10, 12, 40
FLOAT = {1: 10.0, 8: 12.0, 64: 40.0}
INT4 = {1: 2.5, 8: 8.0, 64: 50.0}
INT8 = {1: 4.0, 8: 6.0, 64: 25.0}
NF4 = {1: 50.0, 8: 55.0, 64: 70.0}


def timed(batch: int, time: float, spread: float = 0.02) -> Row:
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
    return MeasuredFormat(name, [timed(batch, time, spread) for batch, time in times.items()])


def test_the_best_of_those_that_win() -> None:
    found = advise([measured("int4", INT4), measured("int8", INT8), measured("nf4", NF4)], SIZES)
    assert (found.answer, found.format, found.batch) == ("ship_it", "int8", None)
    assert found.because[-1].startswith("batch 64, all linears: 25 ms against 40 ms, 1.60 times as fast")


def test_swapped_times_swap_the_advice() -> None:
    straight = advise([measured("a", INT4), measured("b", NF4)], SIZES)
    swapped = advise([measured("a", NF4), measured("b", INT4)], SIZES)
    assert (straight.answer, straight.format, straight.batch) == ("ship_up_to", "a", 8)
    assert (swapped.answer, swapped.format, swapped.batch) == ("ship_up_to", "b", 8)
    assert straight.because == swapped.because


def test_about_one_format_another_is_named_where_it_is_better() -> None:
    formats = [measured("nf4", NF4), measured("int4", INT4)]
    found = advise(formats, SIZES, subject="nf4")
    assert (found.answer, found.format, found.batch) == ("use_instead", "int4", 8)
    assert found.because[0].startswith("nf4: batch")
    assert "0.20 times as fast" in found.because[0], "in the order of the batches"
    assert all(reason.startswith("int4: ") for reason in found.because[1:])
    assert (len(found.because), advise(formats, SIZES, subject="int4").answer) == (3, "ship_up_to")


def test_traffic_decides_between_two_that_win() -> None:
    formats = [measured("int4", INT4), measured("int8", INT8)]
    assert advise(formats, SIZES, traffic={1: 1.0}).format == "int4"
    assert advise(formats, SIZES, traffic={1: 0.1, 8: 0.9}).format == "int8"
    mostly = advise(formats, SIZES, traffic={1: 0.999, 8: 0.001})
    assert (mostly.answer, mostly.format) == ("ship_it", "int4")
    assert "over the traffic" in mostly.because[0]
    # int4 loses at 64, which the traffic has
    assert advise([formats[0]], SIZES, traffic={1: 0.9, 64: 0.1}).batch == 1


def test_no_winning_format_says_do_not_quantize() -> None:
    found = advise([measured("nf4", NF4)], SIZES)
    assert (found.answer, found.format) == ("do_not_quantize", "nf4")
    several = advise([measured("nf4", NF4), measured("fp8", {1: 90.0, 8: 95.0, 64: 99.0})], SIZES)
    assert (several.answer, several.format) == ("do_not_quantize", None)
    assert [reason.partition(":")[0] for reason in several.because] == ["nf4", "fp8"]


def test_noise_is_no_loss() -> None:
    even = {batch: time / 1.02 for batch, time in FLOAT.items()}
    found = advise([measured("nf4", NF4), measured("int4", even, spread=0.2)], SIZES)
    assert (found.answer, found.format) == ("inconclusive", "int4")


def test_each_has_its_own_verdict() -> None:
    absent = Row.model_validate(
        {"name": "latency.op", "value": None, "unit": "s", "subject": "x", "batch": 1, "flags": ["wrong-result"]}
    )
    formats = [measured("int4", INT4), measured("int8", INT8), measured("nf4", NF4), MeasuredFormat("int2", [absent])]
    found = {own.format: own.answer for own in verdicts(formats, SIZES)}
    assert found == {"int4": "ship_up_to", "int8": "ship_it", "nf4": "do_not_quantize", "int2": "not_measured"}
    assert verdicts(formats, SIZES)[3].because == ["nothing was timed: wrong-result"]


def test_single_shapes_have_to_win_all() -> None:
    rows = [timed(1, 5.0), timed(1, 20.0)]
    assert verdicts([MeasuredFormat("int4", rows)], (1,))[0].answer == "do_not_quantize"


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(InputError, match="not-measured"):
        advise([], SIZES)
    with pytest.raises(InputError, match="traffic-invalid"):
        advise([measured("int4", INT4)], SIZES, traffic={1: -1.0})
