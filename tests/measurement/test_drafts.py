"""Acceptance of drafted tokens, and the expected gain, against their definitions."""

import numpy as np
import pytest
import torch

from quantkit.measurement.accuracy.drafts import (
    Acceptance,
    DraftTimes,
    acceptance,
    accepted,
    expected_tokens,
    gains,
)


def test_the_chance_of_acceptance_is_that_of_the_algorithm() -> None:
    """A token drawn from q is kept with min(1, p / q): counted over all tokens, and in a long simulation."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(5, 40, generator=generator), torch.randn(5, 40, generator=generator)
    greedy, sampling = accepted(target, draft)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    assert np.allclose(sampling, (q * torch.clamp(p / q, max=1)).sum(-1), atol=1e-6)
    assert np.allclose(sampling, 1 - (p - q).abs().sum(-1) / 2, atol=1e-6)
    assert greedy.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    drawn = torch.multinomial(q[0], 200_000, replacement=True, generator=generator)
    kept = torch.rand(200_000, generator=generator) < (p[0] / q[0])[drawn]
    assert float(kept.double().mean()) == pytest.approx(sampling[0], abs=5e-3)


def test_a_token_that_one_side_lacks_is_never_accepted() -> None:
    target, draft = torch.zeros(1, 4), torch.zeros(1, 6)
    draft[0, 5] = 20.0
    greedy, sampling = accepted(target, draft)
    assert not greedy[0] and sampling[0] < 1e-6
    assert accepted(target, target)[1][0] == pytest.approx(1.0)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_the_expected_tokens_are_those_of_many_passes(a: float, k: int) -> None:
    generator = np.random.default_rng(0)
    runs = np.cumprod(generator.random((200_000, k)) < a, axis=1).sum(axis=1) + 1
    assert expected_tokens(a, k) == pytest.approx(runs.mean(), rel=0.01)


def test_positions_are_read_in_parts_and_averaged_by_prompt() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    target, draft = (torch.randn(2, 6, 9, generator=generator) for _ in range(2))
    seen = acceptance(lambda i, part: target[i, part], lambda i, part: draft[i, part], ids, 2)
    assert seen.sequence.tolist() == [0] * 5 + [1] * 5
    whole = [accepted(target[i, :5], draft[i, :5])[1] for i in range(2)]
    assert np.allclose(seen.sampling, np.concatenate(whole))
    assert seen.by_prompt("sampling") == pytest.approx([float(part.mean()) for part in whole])
    assert seen.mean("greedy").value == pytest.approx(seen.greedy.mean())


def test_the_gain_is_the_paper_s_where_a_pass_takes_as_long_as_a_step() -> None:
    many = np.repeat(np.arange(16), 100)
    right = np.random.default_rng(0).random(1600) < 0.7
    seen = Acceptance(many, right, right.astype(float))
    cost = 0.1
    times = DraftTimes(cost, 1.0, dict.fromkeys(range(1, 10), 1.0), "measured", "")
    listed = gains(seen, times, 8)
    a = float(right.mean())
    for gain in listed:
        assert gain.gain == pytest.approx((1 - a ** (gain.k + 1)) / ((1 - a) * (gain.k * cost + 1)))
        assert gain.ci95 is not None and gain.ci95[0] < gain.gain < gain.ci95[1]
    slow = gains(seen, DraftTimes(1.0, 1.0, times.passes, "measured", ""), 8)
    assert all(gain.gain < 1 for gain in slow)
