"""The event-by-event simulation against the plain one, against closed forms, and its laws of conservation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_batching

from quantkit.errors import InputError
from quantkit.planning.batching import Server, TimeGrid, run

CONSTANT = TimeGrid([1], [1], [[0.25]])
# all values and slopes are sums of powers of two, so that every order of adding up gives the same bits
DYADIC = TimeGrid([1, 2, 4, 8], [1, 9, 17, 33], [[a + b for b in (0.25, 0.5, 0.5, 1.5)] for a in (0.5, 0.5, 1.0, 2.0)])
ANY = TimeGrid([1, 3, 7], [1, 5, 26], [[0.11, 0.13, 0.29], [0.17, 0.19, 0.37], [0.31, 0.41, 0.83]])


def server(**changed: Any) -> Server:
    chosen: dict[str, Any] = {"prefill": CONSTANT, "decode": CONSTANT, "cache_tokens": 10**9, "max_batch": 8}
    return Server(**chosen | {"chunk": 64} | changed)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    several = st.lists(st.tuples(st.integers(0, 24), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=24)
    found = draw(several)
    arrivals = np.cumsum([gap / 4 for gap, _, _ in found]).tolist()
    return arrivals, [prompt for _, prompt, _ in found], [output for _, _, output in found]


@st.composite
def servers(draw: st.DrawFn, grid: TimeGrid) -> Server:
    most = draw(st.integers(1, 6))
    policy = draw(st.sampled_from(["chunked", "prefill-first"]))
    chunk = draw(st.integers(most, 64))
    return Server(grid, grid, draw(st.integers(70, 200)), most, chunk, policy)


def same(asked: Any, on: Server, rel: float) -> None:
    fast, plain = run(*asked, on), plain_batching.serve(*asked, on)
    assert list(fast.first) == pytest.approx([each.first for each in plain], rel=rel, abs=0)
    assert list(fast.finish) == pytest.approx([each.finish for each in plain], rel=rel, abs=0)


@settings(deadline=None, max_examples=150)
@given(requests(), servers(DYADIC))
def test_skipping_steps_changes_nothing(asked: Any, on: Server) -> None:
    """Means over three or more sequences are no sums of powers of two, so a few bits remain beyond two of them."""
    same(asked, on, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(requests(), servers(CONSTANT))
def test_skipping_steps_changes_no_bit_where_nothing_is_rounded(asked: Any, on: Server) -> None:
    same(asked, on, rel=0)


@pytest.mark.parametrize("policy", ["chunked", "prefill-first"])
@pytest.mark.parametrize("seed", range(6))
def test_skipping_steps_changes_nothing_under_any_seconds(policy: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    asked = (
        np.cumsum(draw.exponential(2.0, 80)).tolist(),
        draw.integers(1, 60, 80).tolist(),
        draw.integers(1, 40, 80).tolist(),
    )
    on = Server(ANY, ANY, 300, 7, 16, policy)
    same(asked, on, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(requests(), servers(DYADIC))
def test_nothing_is_lost(asked: Any, on: Server) -> None:
    arrivals, prompts, outputs = asked
    trace = run(*asked, on)
    assert trace.prefilled == sum(prompts)
    assert trace.decoded == sum(outputs) - len(outputs), "the first token of each comes with its prefill"
    assert trace.peak_cache <= on.cache_tokens
    assert trace.decoded <= trace.steps * on.max_batch
    assert 0 < trace.busy <= trace.end - arrivals[0] + 1e-9
    for came, first, finish, output in zip(arrivals, trace.first, trace.finish, outputs, strict=True):
        assert came < first <= finish
        assert (first == finish) == (output == 1)


@settings(deadline=None, max_examples=50)
@given(requests(), servers(DYADIC))
def test_prompts_are_computed_in_order_of_arrival(asked: Any, on: Server) -> None:
    trace = run(*asked, on)
    assert list(trace.first) == sorted(trace.first)


def test_one_request_by_hand() -> None:
    prefill = TimeGrid([1, 2], [1, 2], [[1.0, 2.0], [3.0, 4.0]])  # P(T, a) = 2 T + a − 2
    decode = TimeGrid([1, 2], [1, 2], [[1.0, 1.5], [2.0, 2.5]])  # D(B, c) = B + (c − 1) / 2
    alone = server(prefill=prefill, decode=decode, max_batch=2, chunk=4)
    # 10 tokens in pieces of 4, 4, 2, which look at 2.5, 6.5 and 9.5 on average
    first = (8 + 2.5 - 2) + (8 + 6.5 - 2) + (4 + 9.5 - 2)
    trace = run([5.0], [10], [3], alone)
    assert trace.first == [5 + first]
    assert trace.finish == [5 + first + (1 + 10 / 2) + (1 + 11 / 2)]
    # decoding beside a prompt: the weights are read once, the cache in addition
    trace = run([0.0, 0.0], [2, 3], [3, 1], alone)
    assert trace.first[0] == 8 + (3 + 3) / 4 - 2, "both prompts fill the step: 3 pairs each, 4 tokens"
    assert trace.first[1] - trace.first[0] == (2 * 2 + 3 - 2) + (3 - 1) / 2


def test_running_sequences_stand_still_while_a_prompt_is_prefilled_first() -> None:
    asked = ([0.0, 0.3], [4, 4], [40, 1])
    together = run(*asked, server(chunk=64, policy="chunked"))
    apart = run(*asked, server(chunk=64, policy="prefill-first"))
    assert apart.finish[0] - together.finish[0] == 0.25
    assert apart.first[1] == together.first[1] == 0.75


def test_a_long_prompt_is_whole_where_nothing_is_chunked() -> None:
    assert run([0.0], [1000], [1], server(policy="prefill-first")).busy == 0.25
    assert run([0.0], [1000], [1], server(policy="chunked")).busy == 0.25 * math.ceil(1000 / 64)


def test_admission_waits_for_the_cache_and_for_a_place() -> None:
    asked = ([0.0, 0.0, 0.0], [10, 10, 1], [10, 10, 1])
    roomy = run(*asked, server())
    assert roomy.first == [0.25, 0.25, 0.25]
    tight = run(*asked, server(cache_tokens=25))
    assert tight.first[1] == roomy.finish[0] + 0.25
    assert tight.first[2] == tight.first[1], "nobody overtakes"
    assert run(*asked, server(max_batch=1)).first == [0.25, 2.75, 5.25]


def test_what_never_fits_is_said() -> None:
    with pytest.raises(InputError, match=r"request-too-long.*a request of 30 tokens; the cache holds 29 tokens"):
        run([0.0], [20], [10], server(cache_tokens=29))
    assert run([0.0], [20], [10], server(cache_tokens=30)).peak_cache == 30


def test_a_server_that_cannot_be() -> None:
    for changed in ({"max_batch": 0}, {"cache_tokens": 0}, {"chunk": 7}, {"chunk": 0, "policy": "prefill-first"}):
        with pytest.raises(InputError, match="server-invalid"):
            server(**changed)


def test_a_full_server_gives_a_batch_of_tokens_each_step() -> None:
    """40 batches of 8, each for 20 steps of a quarter of a second, the first of which is its prefill."""
    trace = run([0.0] * 320, [1] * 320, [20] * 320, server())
    assert trace.end == 40 * 20 * 0.25
    assert sum(trace.output) / trace.end == 8 / 0.25
    assert trace.decoded / trace.steps == 8


def test_tables_are_linear_between_their_points_and_beyond() -> None:
    table = TimeGrid.of(lambda row, context: 2 * row + 3 * context, [1, 4, 8], [2, 5, 11])
    for row in (1, 2, 4.5, 8, 20):
        for context in (1, 2, 4, 5, 9, 11, 30):
            assert table.at(row, context) == pytest.approx(2 * row + 3 * context)
    assert table.line(4, 3) == (pytest.approx(17), 3, 5)
    assert table.line(4, 5) == (pytest.approx(23), 3, math.inf)
    assert CONSTANT.line(7, 99) == (0.25, 0.0, math.inf)
    for rows, seconds in (([2, 1], [[1.0], [1.0]]), ([1], [[0.0]]), ([1], [[math.nan]]), ([1], [[1.0, 2.0]]), ([], [])):
        with pytest.raises(ValueError):
            TimeGrid(rows, [1], seconds)


def test_one_function_of_a_step_is_tabulated_for_both_kinds() -> None:
    calls = []

    def seconds(batch: int, tokens: int, past: int) -> float:
        calls.append((batch, tokens, past))
        rows, pairs = batch * tokens, batch * (tokens * past + tokens * (tokens + 1) / 2)
        return 1e-3 + 1e-5 * rows + 1e-7 * pairs

    on = Server.of(seconds, longest=4096, cache_tokens=10**6, max_batch=64, chunk=2048)
    assert len(calls) < 120
    assert all(type(each) is int and each >= 0 for call in calls for each in call)
    # one token of context more at the low end, where a step with none would be a prefill
    assert on.decode.at(17, 1000) == pytest.approx(seconds(17, 1, 999), rel=1e-4)
    for batch, tokens, past in ((1, 2048, 0), (1, 1024, 1024), (2, 512, 0), (3, 100, 0)):
        context = past + (tokens + 1) / 2
        assert on.prefill.at(batch * tokens, context) == pytest.approx(seconds(batch, tokens, past), rel=0.03)
