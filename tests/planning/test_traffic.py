"""Traffic: what is said is taken, what is not is assumed and listed, what cannot be is one line."""

import math
from typing import Any

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.planning.traffic import RequestKind, Traffic, kinds_of, of_products, traffic, traffic_of


def test_shares_of_the_batches_add_up_to_one_or_are_refused() -> None:
    assert traffic_of("1:0.7,8:0.2,64:0.1") == {1: 0.7, 8: 0.2, 64: 0.1}
    with pytest.raises(InputError, match=r"add up to 100;.*--traffic 1:0\.7,8:0\.3"):
        traffic_of("1:70,8:30")
    for text in ("1", "1:", "0:1", "1:-1,2:2", "1:0.5,1:0.5", "1:nan", "a:1", "", "1:0", "1:inf", "1:0.5:0.5"):
        with pytest.raises(InputError, match="traffic-invalid"):
            traffic_of(text)


def test_products_of_assumed_requests_are_steps_and_a_prompt_for_every_256_of_them() -> None:
    assert of_products([1, 16, 1024]) == {1: 1.0, 16: 1.0, 1024: 17 / 256}
    # 2,048 rows are no step; the next larger batch stands for a prompt, or several of the largest
    assert of_products([16, 2048]) == {16: 1.0, 2048: 1 / 16}
    assert of_products([64, 256]) == {64: 1.0, 256: 1.0 + 4 * 320 / 256}
    assert of_products([4096]) == {4096: 1.0 + 16.0}


def test_kinds_of_requests() -> None:
    assert kinds_of("2000x300:0.7, 8000X500:0.3") == [RequestKind(2000, 300, 0.7), RequestKind(8000, 500, 0.3)]
    assert kinds_of("10x1:1,20x1:0") == [RequestKind(10, 1)]
    assert sum(kind.share for kind in kinds_of("1x1:0.333,2x2:0.333,3x3:0.333")) == pytest.approx(1)
    with pytest.raises(InputError, match=r"add up to 10;.*--requests 2000x300:0\.7,8000x500:0\.3"):
        kinds_of("2000x300:7,8000x500:3")
    for text in ("", "2000x300", "2000:1", "0x3:1", "3x0:1", "-1x3:1", "2x3x4:1", "2x3:0.5,2x3:0.5", "2x3:nan"):
        with pytest.raises(InputError, match="traffic-invalid"):
            kinds_of(text)


def test_what_is_assumed_is_listed() -> None:
    assert traffic().assumed == ["prompts of 1,024 tokens", "outputs of 256 tokens"]
    assert traffic(prompt=2000).assumed == ["outputs of 256 tokens"]
    said = traffic(prompt=2000, output=300, rate=2.5)
    assert not said.assumed
    assert (said.prompt, said.output, said.rate, said.longest) == (2000, 300, 2.5, 2300)
    assert said.line() == "prompts of 2,000 and outputs of 300 tokens, 2.5 requests/s"
    assert traffic().line().endswith("(assumed: prompts of 1,024 tokens, outputs of 256 tokens)")
    mixed = traffic(mix="1000x100:0.75,5000x300:0.25", variation=1.0)
    assert (mixed.prompt, mixed.output) == (2000, 150)
    assert "25%: prompts of 5,000 and outputs of 300 tokens, lognormal with variation 1" in mixed.line()


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": 0},
        {"output": -1},
        {"rate": 0.0},
        {"rate": math.nan},
        {"rate": math.inf},
        {"variation": -0.1},
        {"variation": math.nan},
        {"variation": 11.0},
        {"mix": "1x1:1", "prompt": 3},
    ],
)
def test_what_cannot_be_is_one_line(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="traffic-invalid") as caught:
        traffic(**asked)
    assert "\n" not in caught.value.line()


def test_lengths_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    prompts, outputs, cut = Traffic([RequestKind(1000, 200, 1.0, 0.8)]).draw(40000, np.random.default_rng(0))
    assert cut == 0
    for drawn, mean in ((prompts, 1000), (outputs, 200)):
        assert drawn.dtype == np.int64
        assert drawn.min() >= 1
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.05)
    assert np.corrcoef(prompts, outputs)[0, 1] == pytest.approx(0, abs=0.02)
    prompts, outputs, _ = Traffic([RequestKind(7, 3, 0.25), RequestKind(9, 5, 0.75)]).draw(
        10000, np.random.default_rng(0)
    )
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(7, 3), (9, 5)}
    assert (prompts == 7).mean() == pytest.approx(0.25, abs=0.02)


def test_what_is_longer_than_the_longest_context_is_cut_and_counted() -> None:
    prompts, outputs, cut = Traffic([RequestKind(90, 30, 0.5), RequestKind(500, 30, 0.5)]).draw(
        100, np.random.default_rng(0), 100
    )
    assert cut == 100
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(90, 10), (99, 1)}


def test_one_in_a_thousand_is_longer_than_the_longest() -> None:
    asked = Traffic([RequestKind(1000, 1, 1.0, 1.0)])
    prompts, outputs, _ = asked.draw(200000, np.random.default_rng(0))
    assert np.mean(prompts + outputs > asked.longest) == pytest.approx(1e-3, rel=0.3)
