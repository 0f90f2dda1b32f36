"""Loads against queues whose answers are known, Little's law, and what is said where there is no answer."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.planning import load
from quantkit.planning.batching import Server, TimeGrid, run
from quantkit.planning.load import QUANTILES, capacity, simulate, visit
from quantkit.planning.traffic import RequestKind, Traffic
from quantkit.stats.clustered import student

ONE = [RequestKind(1000, 1)]


class Exponential(Traffic):
    """Prompts of exponential length, mean 1,000, and one token of output."""

    def draw(self, count: int, generator: np.random.Generator, limit: int | None = None) -> Any:
        prompts = np.maximum(1, np.rint(generator.exponential(1000, count))).astype(int)
        return prompts, np.ones(count, int), 0


def alone() -> Server:
    """One at a time, a millisecond for each token of the prompt: mean service 1 s."""
    return Server(TimeGrid([1, 2], [1], [[0.001], [0.002]]), TimeGrid([1], [1], [[1e-12]]), 10**9, 1, 10**9)


def ordinary(**changed: Any) -> Server:
    def seconds(batch: int, tokens: int, past: int) -> float:
        return max(2e-3, 2e-5 * batch * tokens) + 4e-8 * batch * (past + tokens)

    chosen: dict[str, Any] = {"longest": 320, "cache_tokens": 6000, "max_batch": 32, "chunk": 256}
    return Server.of(seconds, **chosen | changed)


@pytest.mark.parametrize("rho", [0.5, 0.7, 0.8])
def test_a_queue_with_fixed_services_waits_as_pollaczek_and_khinchine_say(rho: float) -> None:
    """M/D/1: rho / (2 (1 - rho)) services of waiting, then one."""
    found = simulate(alone(), Traffic(ONE), rho).latency["mean"]
    assert found.ci95[0] <= 1 + rho / (2 * (1 - rho)) <= found.ci95[1]


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_a_queue_with_lognormal_services_waits_as_pollaczek_and_khinchine_say(variation: float) -> None:
    """M/G/1: rho (1 + v^2) / (2 (1 - rho)); capacity, which the draw moves by a few percent, is not asked for."""
    found = simulate(alone(), Traffic([RequestKind(1000, 1, 1.0, variation)]), 0.5, most=1.0).latency["mean"]
    assert found.ci95[0] <= 1 + 0.5 * (1 + variation**2) / (2 * 0.5) <= found.ci95[1]


def test_intervals_cover_the_percentiles_of_a_queue_with_exponential_services() -> None:
    """M/M/1: the time in it is exponential with rate 1 - rho."""
    covered = {"mean": 0, **dict.fromkeys(QUANTILES, 0)}
    rates = [0.3, 0.5, 0.7] * 4
    for seed, rho in enumerate(rates):
        found = simulate(alone(), Exponential(ONE), rho, seed=seed, most=1.0).latency
        truth = {name: -math.log(1 - quantile) / (1 - rho) for name, quantile in QUANTILES.items()}
        for name, value in {"mean": 1 / (1 - rho), **truth}.items():
            low, high = found[name].ci95 or (0.0, 0.0)
            covered[name] += low <= value <= high
    assert min(covered["mean"], covered["p50"], covered["p90"]) >= 10
    assert covered["p99"] >= 9


def test_the_quantile_of_student_is_that_of_scipy() -> None:
    assert student(0.95, load.RUNS - 1) == pytest.approx(load._STUDENT, abs=1e-4)


def test_littles_law() -> None:
    """To the last bit over a whole run; of what is reported, as far as its edges allow."""
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.integers(0, 9, 200) / 8).tolist()
    quarter = TimeGrid([1], [1], [[0.25]])
    trace = run(arrivals, [5] * 200, draw.integers(1, 30, 200).tolist(), Server(quarter, quarter, 10**6, 8, 64))
    events = sorted([(each, 1) for each in trace.arrival] + [(each, -1) for each in trace.finish])
    area = there = 0.0
    for (now, change), (after, _) in pairwise(events):
        there += change
        area += there * (after - now)
    assert area == sum(finish - came for finish, came in zip(trace.finish, trace.arrival, strict=True))
    on, asked = ordinary(), Traffic([RequestKind(200, 50)])
    found = simulate(on, asked, 0.6 * capacity(on, asked))
    assert found.in_system == pytest.approx(found.rate * found.latency["mean"].value, rel=0.05)


def test_throughput_equals_the_arriving_load() -> None:
    on, asked = ordinary(), Traffic([RequestKind(100, 20, 0.7), RequestKind(250, 60, 0.3)])
    found = simulate(on, asked, 0.5 * capacity(on, asked))
    assert found.stable
    assert found.tokens_per_second == pytest.approx(found.rate * asked.output, rel=0.05)
    assert found.prompt_tokens_per_second == pytest.approx(found.rate * asked.prompt, rel=0.05)
    assert 0.5 < found.busy <= 1
    assert found.load == pytest.approx(0.5)
    assert found.ttft["p50"].value < found.ttft["p90"].value < found.ttft["p99"].value
    assert found.latency["p50"].value > found.ttft["p50"].value


def test_a_full_server_gives_a_batch_of_tokens_each_step() -> None:
    quarter = TimeGrid([1], [1], [[0.25]])
    on = Server(quarter, quarter, 10**6, 8, 64)
    assert capacity(on, Traffic([RequestKind(1, 20)])) == 8 / 0.25 / 20


def test_a_visit_counts_every_request_of_a_few() -> None:
    """One request at a time, each for a second, the last after 2 s: the tenth waits for all others."""
    short = visit(alone(), Traffic(ONE), 5.0, 10)
    assert short["latency"] == pytest.approx(5, rel=0.2) and short["ttft"] == short["latency"]
    assert 0.9 < short["requests"] == short["tokens"] <= 1
    assert "tpot" not in short
    slow = visit(alone(), Traffic(ONE), 0.01, 10)
    assert slow["latency"] == pytest.approx(1) and slow["requests"] == pytest.approx(0.01, rel=0.01)


def test_more_than_it_can_serve_is_said_and_has_no_percentiles() -> None:
    on, asked = ordinary(), Traffic([RequestKind(200, 50)])
    most = capacity(on, asked)
    found = simulate(on, asked, 1.1 * most)
    assert not found.stable
    assert found.growth == pytest.approx(0.1 * most)
    assert not (found.ttft or found.tpot or found.latency)
    assert found.in_system is None
    assert "unstable" in found.notes[0]
    assert found.tokens_per_second == pytest.approx(most * 50)
    assert json.loads(json.dumps(found.as_dict()))["latency"] is None


def test_a_queue_that_grows_is_seen_even_where_the_capacity_is_thought_higher() -> None:
    on, asked = ordinary(), Traffic([RequestKind(200, 50)])
    most = capacity(on, asked)
    found = simulate(on, asked, 1.2 * most, most=2 * most)
    assert not found.stable
    assert found.growth == pytest.approx(0.2 * most, rel=0.3)
    assert "arriving requests stay" in found.notes[1]


@pytest.mark.parametrize("policy", ["chunked", "prefill-first"])
def test_more_load_is_more_waiting(policy: Any) -> None:
    on, asked = ordinary(policy=policy, max_batch=16), Traffic([RequestKind(200, 50, 1.0, 0.5)])
    most = capacity(on, asked)
    several = [simulate(on, asked, share * most, requests=500, most=most) for share in (0.1, 0.4, 0.7, 0.9)]
    for metric in load.METRICS:
        for name in ("mean", "p50", "p90", "p99"):
            values = [getattr(each, metric)[name].value for each in several]
            assert values == sorted(values), (metric, name)
    assert [each.batch for each in several] == sorted(each.batch for each in several)
    assert "single bursts" in several[-1].notes[0]


def test_the_same_seed_gives_the_same_answer_and_another_another() -> None:
    on, asked = ordinary(), Traffic([RequestKind(200, 50, 1.0, 1.0)], rate=20.0)
    first, again, other = (simulate(on, asked, limit=300, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.latency != other.latency


def test_what_does_not_fit_is_counted_or_refused() -> None:
    asked = Traffic([RequestKind(100, 20, 0.9), RequestKind(5000, 2000, 0.1)])
    found = simulate(ordinary(longest=7000), asked, 1.0)
    assert found.refused == pytest.approx(0.1, abs=0.02)
    assert "need more than the whole cache" in found.notes[0]
    longest = ordinary(longest=7000)
    assert capacity(longest, asked) == pytest.approx(capacity(longest, Traffic([RequestKind(100, 20)])) / 0.9, rel=0.03)
    cut = simulate(ordinary(), asked, 1.0, limit=320)
    assert cut.refused == 0
    assert cut.cut == pytest.approx(0.1, abs=0.02)
    assert "cut to the longest context" in cut.notes[0]
    with pytest.raises(InputError, match=r"request-too-long.*7,000 tokens; the cache holds 6,000"):
        simulate(ordinary(), Traffic([RequestKind(5000, 2000)]), 1.0)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"rate": 0.0}, "load-invalid"),
        ({"rate": -1.0}, "load-invalid"),
        ({"rate": math.nan}, "load-invalid"),
        ({"rate": math.inf}, "load-invalid"),
        ({"rate": None}, "load-invalid"),
        ({"rate": 1.0, "requests": 10}, "load-invalid"),
    ],
)
def test_loads_that_cannot_be(changed: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError, match=code):
        simulate(ordinary(), Traffic([RequestKind(200, 50)]), **changed)


def test_outputs_of_one_token_have_no_time_between_tokens() -> None:
    found = simulate(ordinary(), Traffic([RequestKind(200, 1)]), 1.0)
    assert found.tpot == {}
    assert found.as_dict()["tpot"] is None
    assert found.ttft == found.latency
