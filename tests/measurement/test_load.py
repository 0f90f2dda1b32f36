"""A load's arithmetic on planted answers: latencies, goodput, its interval, and who serves more."""

from __future__ import annotations

from typing import Any

import numpy as np
import planted
import pytest
from planted_load import TOKENS, answer
from report.shown import page, text_of

from quantkit.bundle import Verdict
from quantkit.errors import InputError
from quantkit.measurement import load as loads
from quantkit.measurement.load import LoadVerdict, ServerLoad, outcome
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.stats.slowdown import slowdown

ABOUT: dict[str, Any] = {"subject": planted.CONTENT, "runtime": "vllm", "settings": {"dtype": "bfloat16"}}


def loaded(times: dict[float, tuple[Any, Any]], slo: dict[str, float], count: int = 40, **how: Any) -> list[Row]:
    """Return the rows of (bundle's gap, original's gap) at each rate, with noise."""
    answers, drawn = [], np.random.default_rng(0)
    for rate, gaps in times.items():
        for side, gap in zip(("bundle", "original"), gaps, strict=True):
            for turn in (0, 1):
                noise = drawn.normal(1, 0.02, count)
                answers.append(answer(side, turn, rate, 0.1 * noise, gap * noise, **how))
    load = ServerLoad(list(times), 16, TOKENS, slo, count)
    return loads.rows(load, answers, against="b" * 64, **ABOUT)


def one(rows: list[Row], name: str, quantile: str | None = None, rate: float | None = None) -> Row:
    (row,) = [
        row
        for row in rows
        if row.name == f"load.{name}"
        and row.settings.get("quantile") == quantile
        and rate in (None, row.settings.get("rate"))
    ]
    return row


def test_a_load_is_read_and_typos_are_refused() -> None:
    load = ServerLoad.parse("rate=4, 1,2.5", "ttft=500ms,tpot=.05s", prompt=32)
    assert load == ServerLoad([1.0, 2.5, 4.0], 32, slo={"ttft": 0.5, "tpot": 0.05})
    assert [run["requests"] for run in load.runs()] == [30, 75, 120]
    for words in (("rate=",), ("rate=1,,2",), ("rate=-1",), ("rate=inf",), ("rate=1", "ttft"), ("rate=1", "ttft=0ms")):
        with pytest.raises(InputError):
            ServerLoad.parse(*words)


def test_latencies_are_those_of_all_requests() -> None:
    gaps = np.linspace(0.01, 0.02, 40)
    answers = [answer("bundle", turn, 2, gaps, gaps) for turn in (0, 1)]
    answers += [answer("original", turn, 2, gaps, 3 * gaps) for turn in (0, 1)]
    rows = loads.rows(ServerLoad([2], 16, TOKENS), answers, against="b" * 64, **ABOUT)
    assert one(rows, "tpot", "p90").value == pytest.approx(float(np.quantile(gaps, 0.9)))
    assert one(rows, "itl", "p50").value == pytest.approx(0.015)
    assert one(rows, "e2el", "p50").value == pytest.approx(0.015 * TOKENS)
    row = one(rows, "tpot", "p50")
    assert row.baseline is not None and row.baseline.ratio_ci95 is not None and row.ci95 is not None
    assert row.baseline.ratio == pytest.approx(3) and row.n == 80 and row.aa_spread == pytest.approx(0)
    # requests rise along the visit, so that stretches of neighbours differ, and the interval shows it
    assert row.ci95[0] < 0.0145
    assert row.ci95[1] > 0.0155
    # the same stretches are drawn for both sides, which differ by a factor alone
    assert row.baseline.ratio_ci95 == pytest.approx((3, 3))
    assert one(rows, "tpot", "p99").flags == ["p99-from-few"]
    assert one(rows, "requests").value == pytest.approx(2) and one(rows, "tokens").value == pytest.approx(10)


def test_a_request_that_fails_is_not_within_the_limit() -> None:
    answers = [answer("bundle", turn, 2, np.full(20, 0.1), 0.01, failed=5) for turn in (0, 1)]
    rows = loads.rows(ServerLoad([2], 16, TOKENS, {"ttft": 1.0}), answers, against=None, **ABOUT)
    good = one(rows, "goodput")
    assert good.value == pytest.approx(1.5) and good.settings["share"] == 0.75 and good.settings["failed"] == 10
    assert one(rows, "requests").value == pytest.approx(1.5) and "failed-requests" in one(rows, "e2el", "p50").flags
    assert outcome(rows) is None


def test_two_visits_that_differ_are_the_spread_of_a_side() -> None:
    answers = [answer(side, turn, 2, np.full(20, 0.1), 0.01) for side in ("bundle", "original") for turn in (0, 1)]
    answers[3] = answer("original", 1, 2, np.full(20, 0.15), 0.01)
    row = one(loads.rows(ServerLoad([2], 16, TOKENS), answers, against="b", **ABOUT), "ttft", "p50")
    assert row.aa_spread == pytest.approx(0.5) and "noisy" in row.flags


def test_the_bundle_serves_more_within_the_limit() -> None:
    rows = loaded({1: (0.02, 0.04), 2: (0.03, 0.06), 4: (0.04, 0.09), 8: (0.09, 0.2)}, {"tpot": 0.05})
    judged = outcome(rows)
    assert judged is not None and judged.better is True
    assert judged.text.startswith("serves 4 requests/s within the limit, the original 1 requests/s (")
    judged = outcome(loaded({1: (0.04, 0.02), 2: (0.06, 0.03)}, {"tpot": 0.05}))
    assert judged is not None and judged.better is False
    assert "serves 1 requests/s within the limit, the original at least 2 requests/s" in judged.text


@pytest.mark.parametrize(
    ("times", "remedy"),
    [
        ({1: (0.02, 0.03), 2: (0.03, 0.04)}, "higher rates"),
        ({1: (0.0502, 0.0498), 2: (0.06, 0.06)}, "more requests"),
    ],
)
def test_what_the_figures_do_not_tell_apart_is_not_decided(times: Any, remedy: str) -> None:
    judged = outcome(loaded(times, {"tpot": 0.05}))
    assert judged is not None and judged.better is None
    assert judged.text.startswith("not decided: ") and remedy in judged.remedy


def test_a_side_of_which_one_visit_alone_serves_is_not_decided() -> None:
    answers = [answer(side, turn, 2, np.full(20, 0.1), 0.01) for side in ("bundle", "original") for turn in (0, 1)]
    answers[2:] = [answer("original", turn, 2, np.full(20, 0.9), 0.01) for turn in (0, 1)]
    load = ServerLoad([2], 16, TOKENS, {"ttft": 0.5})
    judged = outcome(loads.rows(load, answers, against="b", **ABOUT))
    assert judged is not None and judged.better is True
    answers[1] = answer("bundle", 1, 2, np.full(20, 0.9), 0.01)
    rows = loads.rows(load, answers, against="b", **ABOUT)
    judged = outcome(rows)
    assert judged is not None and judged.better is None
    assert one(rows, "goodput").aa_spread == 100


def test_a_side_that_serves_nothing_loses_to_one_that_serves_all() -> None:
    judged = outcome(loaded({1: (0.02, 0.2)}, {"tpot": 0.05}))
    assert judged == LoadVerdict("serves at least 1 requests/s within the limit, the original none", True)


def test_without_limits_the_median_request_at_the_largest_rate_decides() -> None:
    judged = outcome(loaded({1: (0.02, 0.02), 2: (0.02, 0.05)}, {}))
    assert judged is not None and judged.better is True
    assert judged.text.startswith("at 2 requests/s a request takes 179 ms, of the original 299 ms: 1.67 times as fast")
    judged = outcome(loaded({2: (0.02, 0.0201)}, {}))
    assert judged is not None and judged.better is None


def test_the_same_requests_of_two_sides_are_paired_in_blocks() -> None:
    gaps = np.linspace(0.01, 0.02, 43)
    order = [("baseline", 2), ("candidate", 1), ("candidate", 1), ("baseline", 2)]
    answers = [answer(side, n % 2, 2, 0.1, gaps * by, failed=3 * (n == 2)) for n, (side, by) in enumerate(order)]
    timing = loads.paired([*answers, {"side": "candidate", "kv_blocks": 3}], "tpot")
    assert {side: times.shape for side, times in timing.seconds.items()} == dict.fromkeys(
        ("baseline", "candidate"), (10, 2, 4)
    )
    assert timing.seconds["candidate"].reshape(10, 2, 4)[3, 1].tolist() == pytest.approx(gaps[12:16].tolist())
    steps = list(timing.steps())
    assert [side for side, *_ in steps[:16]] == ["baseline"] * 4 + ["candidate"] * 8 + ["baseline"] * 4
    found = slowdown(timing.seconds["candidate"], timing.seconds["baseline"], rounds=timing.rounds, quantile=0.5)
    assert found.effect == pytest.approx(-np.log(2))
    with pytest.raises(InputError, match="load-failed"):
        loads.paired([answer("candidate", 0, 2, 0.1, gaps, failed=42)], "tpot")


def test_the_load_of_one_bundle_stands_beside_that_of_another() -> None:
    a = loaded({1: (0.02, 0.04), 2: (0.06, 0.06)}, {"tpot": 0.05})
    b = loaded({1: (0.02, 0.04), 2: (0.03, 0.06), 4: (0.06, 0.06)}, {"tpot": 0.05})
    rows = loads.beside(a, b, "a" * 64)
    assert {row.settings["rate"] for row in rows if "rate" in row.settings} == {1, 2}
    good = one(rows, "goodput", rate=2)
    assert good.baseline is not None and (good.value, good.baseline.value, good.baseline.subject) == (2, 0, "a" * 64)
    assert one(rows, "tpot", "p50", 2).baseline.ratio == pytest.approx(2, rel=0.02)  # type: ignore[union-attr]
    judged = outcome(rows, "B", "A")
    assert judged is not None and judged.better is True
    assert judged.text.startswith("B serves at least 2 requests/s within the limit, A 1 requests/s (")
    # other requests are not comparable
    assert loads.beside(loaded({1: (0.02, 0.04)}, {"tpot": 0.1}), b, "a" * 64) == []


def test_the_page_draws_both_sides_against_the_rate() -> None:
    rows = loaded({1: (0.02, 0.04), 2: (0.03, 0.06)}, {"tpot": 0.05})
    shown = page(planted.manifest(), rows)
    text = text_of(shown)
    for part in ("Under load", "Serves at least 2 requests/s within the limit, the original 1 requests/s", "Goodput"):
        assert part in text
    for part in ("time per output token, p99", "Goodput counts requests within tpot 50.0\u00a0ms", "A B B A"):
        assert part in text
    assert "Under load" not in text_of(page(planted.manifest(), planted.rows()))


def test_the_headline_names_the_runtime_of_each_verdict() -> None:
    judged = Verdict(answer="ship_up_to", batch=1)
    step = Row.seconds("latency.decode_step", 5e-3, subject=planted.CONTENT, runtime="onnxruntime", batch=1)
    rows, manifest = [*planted.rows(), step], planted.manifest().model_copy(update={"verdict": judged})
    assert figures.verdict(manifest, rows, prompts=False)[0] == "ship it at batch 1"
    more = loaded({1: (0.04, 0.02), 2: (0.06, 0.03)}, {"tpot": 0.05})
    text = "ship it at batch 1 in ONNX Runtime; under load in vLLM the original serves more"
    assert figures.verdict(manifest, [*rows, *more], prompts=False)[0] == text
    unjudged = planted.manifest().model_copy(update={"verdict": None})
    assert figures.verdict(unjudged, more)[0] == "not timed by steps; under load in vLLM the original serves more"
    more = loaded({1: (0.02, 0.02), 2: (0.02, 0.05)}, {})
    text = "ship it at batch 1 in ONNX Runtime; under load in vLLM it answers sooner"
    assert figures.verdict(manifest, [*rows, *more], prompts=False)[0] == text
