"""From planted rows to decisions: what is found, what is not, and what is said where there is nothing to go by."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.nightly.config import Nightly
from quantkit.nightly.decide import Judged, decide_night, judge
from quantkit.nightly.evidence import FIRST as NEW
from quantkit.nightly.records import Item, NightCell, Result, StoredDecision, Time
from quantkit.nightly.store import Store
from quantkit.stats.slowdown import BLOCKS, ROUNDS

from .conftest import CELLS, FIRST, SECOND, night
from .planted import STEP, answered, timed

ONE, OTHER = CELLS[0], CELLS[2]
GATES = {"latency": 0.02, "accuracy": 0.01, "kl": 0.01, "size": 0.01}
EVERY = ("latency", "accuracy", "kl", "size")
RELEASED = {"release_sha256": "d" * 64}


def config(tasks: Any = None, **gates: Any) -> Nightly:
    data = {"models": ["tiny"], "recipes": ["a"], "targets": ["cpu-x86"], "gates": {**GATES, **gates}, "tasks": tasks}
    return Nightly.from_dict(data, look=False)


def done(cell: NightCell, **others: Any) -> Result:
    known = {"content_sha256": "c" * 64, "baseline_sha256": "b" * 64, "bytes": 1000, "baseline_bytes": 1000}
    return Result.of(FIRST, cell, "done", **{**known, **others})


def judged(
    results: Sequence[Result],
    times: Iterable[Time] = (),
    items: Iterable[Item] = (),
    cells: Sequence[NightCell] | None = None,
    **gates: Any,
) -> Judged:
    taken, scored = list(times), list(items)
    matrix = cells or list(dict.fromkeys(NightCell.of(each.cell) for each in results))
    return judge(
        config(**gates),
        night(cells=tuple(matrix)),
        results,
        lambda cell: [each for each in taken if each.cell == cell],
        lambda build: [each for each in scored if each.build == build],
    )


def row(found: Judged, what: str, cell: NightCell = ONE) -> StoredDecision:
    (one,) = (each for each in found.decisions if (each.cell, each.what) == (cell.key, what))
    return one


def judged_accuracy(items: Iterable[Item]) -> Any:
    return row(judged([done(ONE)], items=items), "accuracy")


def test_nothing_changed_and_nothing_is_called() -> None:
    found = judged([done(ONE)], timed(ONE), answered(ONE))
    assert {each.what: each.answer for each in found.decisions} == dict.fromkeys(EVERY, "same")
    latency: Any = row(found, "latency")
    assert latency.low < latency.value < latency.high
    assert (latency.margin, latency.n) == (pytest.approx(0.02), 160)
    assert 0.02 < latency.smallest < 0.1
    assert latency.because.startswith("time ") and "within 2.0 %" in latency.because
    assert row(found, "accuracy").n == 2000 and found.repeat == []


def test_five_percent_is_found_and_asked_for_again() -> None:
    found = judged([done(ONE), done(OTHER)], [*timed(ONE, slower=0.05), *timed(OTHER, seed=1)], answered(ONE))
    latency: Any = row(found, "latency")
    assert (latency.answer, latency.confirmed, latency.value) == ("worse", None, pytest.approx(0.05, abs=0.01))
    assert latency.p < latency.p_adjusted <= 0.01
    assert "not yet run again" in latency.because and found.repeat == [ONE]
    assert row(found, "latency", OTHER).answer == "same"
    faster: Any = row(judged([done(ONE)], timed(ONE, slower=-0.05)), "latency")
    assert faster.answer == "better" and faster.p_adjusted <= 0.01, "its p is of that"


@pytest.mark.parametrize(
    ("slower", "answer", "confirmed", "said"),
    [
        (0.05, "worse", True, "a second run said the same"),
        (0.0, "same", False, "a first run called it worse"),
        (-0.05, "inconclusive", False, "a first run called it worse"),
    ],
)
def test_a_second_run_confirms_an_alarm_or_takes_it_back(
    slower: float, answer: str, confirmed: bool, said: str
) -> None:
    times = [*timed(ONE, slower=0.05), *timed(ONE, slower=slower, attempt=2, seed=7)]
    found = judged([done(ONE), done(ONE, attempt=2)], times)
    latency = row(found, "latency")
    assert (latency.answer, latency.confirmed) == (answer, confirmed)
    assert latency.value == pytest.approx(slower, abs=0.01)  # of the second run's own times
    assert said in latency.because and found.repeat == []


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (done(ONE, attempt=2), "the candidate was not measured"),
        (Result.of(FIRST, ONE, "failed", attempt=2, error={"code": "broke", "value": "the disk"}), "[broke] the disk"),
    ],
)
def test_an_alarm_whose_second_run_failed_is_not_silent(second: Result, said: str) -> None:
    found = judged([done(ONE), second], timed(ONE, slower=0.05))
    latency = row(found, "latency")
    assert latency.answer == "failed" and said in latency.because and found.repeat == []
    assert "+5." in latency.because or "+4." in latency.because


def test_a_planted_loss_of_answers_is_found_and_stands_with_every_cell_of_the_build() -> None:
    both = [done(ONE), done(CELLS[1])]
    found = judged(both, items=answered(ONE, lost=100, gained=20))
    for cell in CELLS[:2]:
        accuracy: Any = row(found, "accuracy", cell)
        assert (accuracy.answer, accuracy.value) == ("worse", pytest.approx(80 / 2000))
        assert accuracy.low <= 0.04 <= accuracy.high and accuracy.p_adjusted < 0.01
        assert "answers lost +4.0 %" in accuracy.because
    assert found.repeat == []  # answers do not change by asking again
    lost = judged([done(ONE)], items=answered(ONE, lost=100, gained=20), accuracy=0.1)
    assert row(lost, "accuracy").answer == "same"  # what was lost is less than anybody cares for


def test_farther_from_the_float_model_or_less_likely_text_is_found() -> None:
    kl = row(judged([done(ONE)], items=answered(ONE, kl=0.05)), "kl")
    assert (kl.answer, kl.value) == ("worse", pytest.approx(0.05, abs=0.005))
    assert kl.because.startswith("KL from the float model +0.05")
    rise = row(judged([done(ONE)], items=answered(ONE, nll=0.05)), "kl")
    assert (rise.answer, rise.value) == ("worse", pytest.approx(0.05, abs=0.005))
    assert rise.because.startswith("log-perplexity +0.05")


def test_of_two_in_a_row_that_are_equally_grave_it_is_always_the_same_one() -> None:
    """Else the line that its nights make would jump between them."""
    for changes, answer in (({"kl": 0.03, "nll": 0.3}, "worse"), ({"kl": -0.0001, "nll": 0.001}, "same")):
        kl = row(judged([done(ONE)], items=answered(ONE, **changes)), "kl")
        assert kl.answer == answer and kl.because.startswith("KL ")


def test_labels_without_sequences_or_likelihoods_are_enough() -> None:
    items = [replace(each, kl=None, logp=None, sequence=None) for each in answered(ONE, lost=100)]
    found = judged([done(ONE)], items=items)
    assert row(found, "accuracy").answer == "worse"
    assert not any(each.what == "kl" for each in found.decisions)


def test_items_of_one_sequence_count_for_less() -> None:
    """All that was lost, was lost in one sequence of twenty."""
    items = [
        replace(each, correct=each.side == "baseline" and each.correct) if each.sequence == 3 else each
        for each in answered(ONE)
    ]
    alone = [replace(each, sequence=None) for each in items]
    clustered, single = (judged_accuracy(each) for each in (items, alone))
    assert (single.answer, clustered.answer) == ("worse", "inconclusive")
    assert clustered.value == single.value and clustered.smallest > single.smallest
    assert "would have been called worse" in clustered.because


def test_crops_of_few_photographs_are_no_more_than_those() -> None:
    """Words of few texts are told apart by where they stand; crops of a photograph are alike wherever they are."""
    items = [
        replace(each, correct=each.side == "baseline" and each.correct, sequence=each.item % 5)
        if each.item % 5 == 3 and each.item % 7 == 0
        else replace(each, sequence=each.item % 5)
        for each in answered(ONE)
    ]
    crops = [replace(each, logp=None, kl=None) for each in items]
    words, photographs = (judged_accuracy(each) for each in (items, crops))
    assert words.value == photographs.value and photographs.smallest > words.smallest


def test_blocks_of_one_round_count_for_less() -> None:
    """A load's luck lasts for its round: as if one round, the same times would seem to say more."""
    luck = np.random.default_rng(5).normal(0, 0.03, ROUNDS)
    times = [
        replace(each, seconds=each.seconds * float(np.exp(luck[each.round]))) if each.side == "candidate" else each
        for each in timed(ONE)
    ]
    flat = [replace(each, round=0, block=each.round * BLOCKS + each.block) for each in times]
    rounds, one = (row(judged([done(ONE)], taken), "latency") for taken in (times, flat))
    assert rounds.high - rounds.low > 1.2 * (one.high - one.low)  # type: ignore[operator]


def test_items_of_a_second_attempt_are_not_mixed_with_the_first_s() -> None:
    items = answered(ONE)
    again = [replace(each, attempt=2, correct=False) for each in items]
    assert judged_accuracy([*items, *again]).answer == "same"


def test_size_is_counted() -> None:
    larger = row(judged([done(ONE, bytes=1020)]), "size")
    assert (larger.answer, larger.value) == ("worse", pytest.approx(0.02))
    assert larger.because == "bytes +2.0 %, more than 1.0 %"
    for size, answer in ((1005, "same"), (900, "better"), (None, "missing")):
        assert row(judged([done(ONE, bytes=size)]), "size").answer == answer


@pytest.mark.parametrize(
    ("low", "answer", "said"),
    [
        (0.981, "same", "recovery of mine acc 99.0 % (98.1 % to 99.9 %), at least 98.0 %"),
        (0.97, "worse", "recovery of mine acc 99.0 % (97.0 % to 99.9 %), its lower bound is below 98.0 %"),
    ],
)
def test_the_lower_bound_of_recovery_decides_in_the_gravest_score_for_all_cells_of_a_build(
    low: float, answer: str, said: str
) -> None:
    scores = {"mine acc_norm": [1.0, 0.985, 1.02, 400], "mine acc": [0.99, low, 0.999, 500]}
    beside = CELLS[1]
    assert beside.build == ONE.build
    results = [done(ONE, recovery=scores), done(beside), done(OTHER, flags=("tasks-unasked: no template",))]
    found = judged(results, tasks={"names": ["piqa"], "recovery_min": 0.98})
    for cell in (ONE, beside):
        one = row(found, "tasks", cell)
        assert (one.answer, one.margin) == (answer, pytest.approx(0.02))
        if answer == "worse":
            assert one.because == said
            assert (one.value, one.low, one.high, one.n) == (
                *(pytest.approx(end) for end in (0.01, 0.001, 1 - low)),
                500,
            )
    assert (row(found, "tasks", OTHER).answer, row(found, "tasks", OTHER).because) == (
        *("inconclusive", "no recovery: no template"),
    )
    assert not [each for each in judged(results).decisions if each.what == "tasks"]


def test_drift_is_against_the_release_in_blocks_of_its_own() -> None:
    times = [*timed(ONE), *timed(ONE, slower=0.05, other="release", seed=3)]
    found = judged([done(ONE, **RELEASED)], times)
    assert row(found, "latency").answer == "same"
    drift = row(found, "drift")
    assert (drift.answer, drift.value) == ("worse", pytest.approx(0.05, abs=0.01))
    assert drift.because.startswith("against the last release: time ")
    assert found.repeat == [ONE]
    again = [*times, *(replace(each, attempt=2) for each in timed(ONE, slower=0.05, other="release", seed=4))]
    found = judged([done(ONE, **RELEASED), done(ONE, **RELEASED, attempt=2)], again)
    assert row(found, "drift").confirmed and row(found, "latency").confirmed is None


def test_drift_of_answers_is_the_graver_of_the_two() -> None:
    items = [*answered(ONE), *(each for each in answered(ONE, lost=100, other="release") if each.side == "release")]
    # the release was right where the candidate of these items is not: turn them round
    lost = {each.item: each.correct for each in answered(ONE, lost=100) if each.side == "candidate"}
    items = [
        replace(each, correct=lost[each.item]) if each.side in ("candidate", "baseline") else each for each in items
    ]
    times = [*timed(ONE), *timed(ONE, other="release", seed=3)]
    found = judged([done(ONE, **RELEASED)], times, items)
    drift = row(found, "drift")
    assert (row(found, "accuracy").answer, drift.answer, found.repeat) == ("same", "worse", [])
    assert drift.because.startswith("against the last release: answers lost +5.0 %")
    gone = row(judged([done(ONE, flags=("release-unloadable: it is gone",))], timed(ONE)), "drift")
    assert (gone.answer, gone.because) == ("inconclusive", "the last release could not be loaded: it is gone")


def test_holm_is_across_the_night() -> None:
    """What one cell alone would be called for, it is not among forty."""
    cells = [NightCell("tiny", f"r{i}", "cpu-x86", "onnxruntime", 1) for i in range(40)]
    # 10 of 2000 lost and none gained: p = 1/1024
    items = [*answered(cells[0], lost=10)]
    alone: Any = row(judged([done(cells[0])], items=items, accuracy=0.004), "accuracy", cells[0])
    items += [item for each in cells[1:] for item in answered(each, n=400)]
    among: Any = row(judged([done(each) for each in cells], items=items, accuracy=0.004), "accuracy", cells[0])
    assert (alone.answer, among.answer, among.p) == ("worse", "inconclusive", alone.p)
    assert among.p_adjusted > 40 * among.p and among.smallest > alone.smallest
    # drift is in the same family
    alone = judged_accuracy(answered(ONE, lost=10))
    both = row(judged([done(ONE, **RELEASED)], timed(ONE, other="release"), answered(ONE, lost=10)), "accuracy")
    assert both.p == alone.p
    assert both.p_adjusted == pytest.approx(alone.p_adjusted * 4 / 3)  # accuracy, KL, log-perplexity; and drift


def test_a_first_night_is_kept_and_says_so() -> None:
    first = done(ONE, baseline_sha256=None, baseline_bytes=None)
    times, items = ([each for each in rows if each.side == "candidate"] for rows in (timed(ONE), answered(ONE)))  # type: ignore[attr-defined]
    found = judged([first], times, items)
    said = {each.what: (each.answer, each.because) for each in found.decisions}
    assert said == dict.fromkeys(EVERY, ("inconclusive", NEW))
    assert (row(found, "latency").n, row(found, "latency").value) == (160, None)
    # a baseline that does not load is never the same
    gone = done(ONE, flags=("reused", "baseline-unloadable: no manifest.json"))
    latency = row(judged([gone], times), "latency")
    assert (latency.answer, latency.because) == ("inconclusive", "the baseline could not be loaded: no manifest.json")


def test_failed_and_missing_cells_have_answers_of_their_own() -> None:
    failed = Result.of(FIRST, ONE, "failed", error={"code": "out-of-memory", "where": "x", "value": "none left"})
    away = Result.of(FIRST, CELLS[1], "missing", error={"code": "no-machine", "value": "no node has l4"})
    found = judged([failed, away, done(CELLS[2])], timed(CELLS[2]), cells=CELLS)
    rows = [row(found, "latency", cell) for cell in CELLS]
    assert [each.answer for each in rows] == ["failed", "missing", "same", "missing"]
    assert rows[0].because == "[out-of-memory] x: none left" and "--resume" in rows[3].because
    assert row(judged([Result.of(FIRST, ONE, "failed")]), "latency").because == "the reason is unknown"
    order = [CELLS.index(NightCell.of(each.cell)) for each in found.decisions]
    assert order == sorted(order)


def test_a_cell_without_data_is_missing() -> None:
    found = judged([done(ONE, bytes=None)])
    assert {each.answer for each in found.decisions} == {"missing"}
    unscored = judged([done(ONE, flags=("accuracy-unscored: no labels",))])
    assert row(unscored, "accuracy").because == "not scored: no labels"


def test_which_side_was_not_scored_is_told_apart() -> None:
    ours = [each for each in answered(ONE) if each.side == "candidate"]
    flags = ("accuracy-unscored: release: another text", "accuracy-unscored: baseline: no items")
    accuracy = row(judged([done(ONE, flags=flags)], items=ours), "accuracy")
    assert (accuracy.answer, accuracy.because) == ("inconclusive", "not scored: baseline: no items")
    first = done(ONE, baseline_sha256=None, flags=flags[:1])
    assert row(judged([first], items=ours), "accuracy").because == NEW


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda each: replace(each, seconds=math.nan), "times-invalid"),
        (lambda each: replace(each, seconds=-STEP), "clock-backwards"),
        (lambda each: replace(each, seconds=0.0), "times-invalid"),
        (lambda each: None, "times-invalid"),
    ],
    ids=["nan", "backwards", "zero", "one step short"],
)
def test_times_that_are_none_fail_their_cell_alone(spoil: Callable[[Time], Time | None], code: str) -> None:
    times = timed(ONE)
    spoilt = spoil(times[5])
    times[5:6] = [] if spoilt is None else [spoilt]
    found = judged([done(ONE), done(OTHER)], [*times, *timed(OTHER, seed=1)], answered(ONE))
    latency = row(found, "latency")
    assert latency.answer == "failed" and latency.because.startswith(f"[{code}] {ONE.key}")
    assert row(found, "accuracy").answer == row(found, "latency", OTHER).answer == "same"


def test_a_wall_clock_that_goes_back_changes_nothing() -> None:
    times = timed(ONE, slower=0.05)
    turned = [replace(each, began=1.7e9 - i) for i, each in enumerate(times)]
    assert judged([done(ONE)], turned) == judged([done(ONE)], times)


def test_likelihoods_that_are_nan_fail_and_other_items_are_refused() -> None:
    items = answered(ONE)
    spoilt = [replace(each, logp=math.nan) if each.item == 7 else each for each in items]
    short = [each for each in items if (each.item, each.side) != (7, "baseline")]
    for what, given, code in (("kl", spoilt, "values-invalid"), ("accuracy", short, "items-differ")):
        failed = row(judged([done(ONE)], items=given), what)
        assert failed.answer == "failed" and f"[{code}]" in failed.because


def test_what_a_reader_must_know_is_said() -> None:
    times = [replace(each, throttled=i < 3) for i, each in enumerate(timed(ONE))]
    latency = row(judged([done(ONE, baseline_sha256="c" * 64)], times), "latency")
    assert "lowered its clock in 3 of 320 steps" in latency.because
    assert "both sides are the same bundle" in latency.because


def test_margins_are_the_cell_s() -> None:
    both = [done(ONE), done(CELLS[1])]
    times = [*timed(ONE, slower=0.05), *timed(CELLS[1], slower=0.05)]
    overrides = [{"batch": 8, "latency": 0.2, "accuracy": 0.2}]
    found = judged(both, times, answered(ONE, lost=100), overrides=overrides)
    assert [row(found, "latency", cell).answer for cell in CELLS[:2]] == ["worse", "same"]
    assert [row(found, "accuracy", cell).answer for cell in CELLS[:2]] == ["worse", "same"]


def test_a_night_is_decided_from_the_store(store: Store) -> None:
    store.begin(night(cells=(ONE,)))
    store.commit(done(ONE), timed(ONE, slower=0.05), answered(ONE))
    found = decide_night(store, FIRST, config())
    assert row(found, "latency").answer == "worse" and row(found, "accuracy").answer == "same"
    store.decide(FIRST, found.decisions)
    assert sorted(store.decisions(), key=str) == sorted(found.decisions, key=str)
    with pytest.raises(InputError, match=f"night-missing.*{SECOND}.*{FIRST}"):
        decide_night(store, SECOND, config())
