from __future__ import annotations

import numpy as np
import pytest

from quantkit.stats.noise import Noise


def test_steps_have_the_spread_the_spikes_and_the_correlation_that_are_asked_for():
    a, b = Noise(cv=0.02, spikes=0.03, size=5.0, lag=0.5).night(np.random.default_rng(0), 5000, burst=1)
    assert a.shape == b.shape == (5000, 2, 1)
    times = np.concatenate([a.ravel(), b.ravel()])
    spikes = times > 2
    assert spikes.mean() == pytest.approx(0.03, abs=0.004)
    assert np.std(times[~spikes]) / np.mean(times[~spikes]) == pytest.approx(0.02, rel=0.03)
    # of a block A B B A or B A A B the inner two stand side by side, the outer two three steps apart
    calm = np.log(Noise(spikes=0.0).night(np.random.default_rng(1), 20000)[0][..., 0])
    assert np.corrcoef(calm.T)[0, 1] == pytest.approx((0.5 + 0.5**3) / 2, abs=0.02)


def test_steps_that_settle_are_not_among_them():
    a, _ = Noise().night(np.random.default_rng(0), 6, burst=2, settle=1)
    assert a.shape == (6, 2, 2)
