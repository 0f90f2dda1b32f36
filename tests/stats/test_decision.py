"""Decisions on all cells of a night, and the adjustment behind them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_decisions as plain

from quantkit.stats.decision import ALPHA, confirm, decide, holm
from quantkit.stats.evidence import Resampled
from quantkit.stats.flips import Flips, increase
from quantkit.stats.slowdown import BLOCKS, BURST, ROUNDS, Noise, slowdown

DEFAULT = [BLOCKS] * ROUNDS
OPPOSITE = {"better": "worse", "worse": "better", "same": "same", "inconclusive": "inconclusive"}


NOISE = Noise()


def timed(seed, *, slower=1.0, noise=NOISE, swap=False):
    a, b = noise.night(np.random.default_rng(seed), ROUNDS * BLOCKS, BURST)
    a = a * slower
    return slowdown(b, a, rounds=DEFAULT) if swap else slowdown(a, b, rounds=DEFAULT)


@pytest.mark.parametrize("slower, answer", [(1.0, "same"), (1.05, "worse"), (1 / 1.05, "better"), (1.005, "same")])
def test_a_slowdown_beyond_the_margin_is_worse(slower, answer):
    found = decide([timed(0, slower=slower)])[0]
    assert found.answer == answer
    assert found.ci95[0] < found.effect < found.ci95[1]
    assert found.effect == pytest.approx(slower - 1, abs=0.006)
    assert (found.ci95[1] < found.margin) == (answer != "worse")


def test_noise_that_hides_it_is_told():
    found = decide([timed(0, slower=1.05, noise=Noise(cv=0.3))])[0]
    assert found.answer == "inconclusive"
    assert found.detectable > 0.05
    assert found.ci95[1] >= found.margin


def test_as_large_as_the_margin_is_no_alarm():
    """Where a false alarm is likeliest, at the margin itself, it is as rare as it says."""
    false = sum(decide([timed(seed, slower=1.02)])[0].answer == "worse" for seed in range(60))
    assert false <= 4


@pytest.mark.parametrize(
    ("lost", "gained", "answer"),
    [(0, 0, "same"), (60, 10, "worse"), (10, 60, "better"), (12, 10, "same"), (200, 170, "inconclusive")],
)
def test_flips_decide_better_same_or_worse(lost, gained, answer):
    assert decide([Flips(lost, gained, 5000, margin=0.01)])[0].answer == answer


def test_a_sure_loss_within_the_margin_is_none():
    found = decide([Flips(40, 0, 20000, margin=0.01)])[0]
    assert found.p_worse < 1e-9
    assert found.answer == "same"


def test_no_worse_is_known_where_the_same_is_not():
    found = decide([Flips(2, 30, 1500, margin=0.01)], alpha=1e-9)[0]
    assert found.answer == "inconclusive"
    assert found.ci95[1] < found.margin


@pytest.mark.parametrize("slower", [1.0, 1.02, 1.03, 1.05])
@pytest.mark.parametrize("seed", range(3))
def test_exchanged_sides_have_the_opposite_answer(slower, seed):
    cells = [timed(seed, slower=slower), timed(seed + 10, slower=1.1)]
    swapped = [timed(seed, slower=slower, swap=True), timed(seed + 10, slower=1.1, swap=True)]
    for there, back in zip(decide(cells), decide(swapped), strict=True):
        assert back.answer == OPPOSITE[there.answer]
        assert (back.p_worse, back.p_better) == pytest.approx((there.p_better, there.p_worse))


@pytest.mark.parametrize("counts", [(60, 10), (12, 10), (200, 170), (3, 90)])
def test_exchanged_answers_have_the_opposite_answer(counts):
    there, back = (decide([Flips(*order, 5000, margin=0.01)])[0] for order in (counts, counts[::-1]))
    assert (back.answer, back.effect) == (OPPOSITE[there.answer], -there.effect)


def test_more_cells_ask_for_more():
    alone = decide([Flips(40, 18, 5000, margin=0.004)])[0]
    among = decide([Flips(40, 18, 5000, margin=0.004)] + [Flips(5, 5, 5000, margin=0.004)] * 99)
    assert (alone.answer, among[0].answer) == ("worse", "inconclusive")
    assert among[0].p_worse == pytest.approx(100 * alone.p_worse)
    assert among[0].detectable > alone.detectable
    # what the others are does not depend on their order
    again = decide([Flips(5, 5, 5000, margin=0.004)] * 99 + [Flips(40, 18, 5000, margin=0.004)])
    assert again[-1] == among[0]


def test_kinds_of_evidence_go_together():
    generator = np.random.default_rng(0)
    before = generator.gamma(2.0, size=500)
    risen = increase(before, before + generator.normal(0.05, 0.05, 500), margin=0.01)
    found = decide([timed(0, slower=1.05), Flips(60, 10, 5000, margin=0.01), risen])
    assert [each.answer for each in found] == ["worse"] * 3
    assert ([each.margin for each in found], decide([])) == (pytest.approx([0.02, 0.01, 0.01]), [])


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        ("worse", "worse", "worse"),
        ("worse", "same", "same"),
        ("worse", "inconclusive", "inconclusive"),
        ("worse", "better", "inconclusive"),
        ("inconclusive", "worse", "inconclusive"),
        ("same", "worse", "inconclusive"),
    ],
)
def test_an_alarm_takes_two_runs(first, second, answer):
    known = decide([timed(0)])[0]
    one, two = (replace(known, answer=each) for each in (first, second))
    found = confirm(one, two)
    assert found.answer == answer
    assert found.first is one
    assert found.effect == two.effect


def test_a_family_of_cells_at_their_alarms_seldom_calls_one():
    """Student's t, true effects at the alarm: one night in a hundred at most, and with a second run hardly one."""
    generator, calls, alarms = np.random.default_rng(3), 0, 0

    def cell():
        values = generator.normal(size=12)
        centre = values.mean() + generator.normal(0, values.std() / 12**0.5, 500)
        return Resampled(effect=values.mean(), draws=centre, groups=12, alarm=0.0, margin=0.0)

    for _ in range(200):
        found = [each for each in decide([cell() for _ in range(5)], alpha=0.05) if each.answer == "worse"]
        again = decide([cell() for _ in found], alpha=0.05)
        calls += bool(found)
        alarms += any(confirm(one, two).answer == "worse" for one, two in zip(found, again, strict=True))
    # 10 and 0.5 expected
    assert calls <= 20
    assert alarms <= 3
    assert ALPHA == 0.01


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1) | st.sampled_from([0.01, 0.02]), min_size=1, max_size=7))
def test_is_what_closed_testing_gives(p):
    assert holm(p) == pytest.approx(plain.holm(p), rel=1e-12)


def test_a_hundred_equal_cells_give_no_more_alarms_than_one():
    generator = np.random.default_rng(0)
    nights = sum(bool((holm(generator.random(100)) <= 0.05).any()) for _ in range(2000))
    # 98 expected, standard deviation 10; without it 99 nights of 100 have one
    assert 65 <= nights <= 130


@pytest.mark.parametrize("p", [[1.1], [-0.1], [float("nan")], [[0.1]]])
def test_what_is_no_p_value_is_refused(p):
    with pytest.raises(ValueError, match="within 0 and 1"):
        holm(p)


def test_holm_of_no_tests_is_empty():
    assert holm([]).size == 0
