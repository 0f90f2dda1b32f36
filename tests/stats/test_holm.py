from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_decisions as plain

from quantkit.stats.deciding.decision import holm


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


def test_no_test_is_none():
    assert holm([]).size == 0
