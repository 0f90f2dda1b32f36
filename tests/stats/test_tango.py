from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_decisions as plain
from scipy import stats

from quantkit.stats import tango

TABLES = [(7, 3, 100), (3, 7, 100), (1, 0, 30), (5, 0, 50), (120, 80, 5000), (43, 0, 44), (12, 9, 21)]


@pytest.mark.parametrize("table", TABLES)
def test_the_interval_ends_at_the_roots_of_its_polynomial(table):
    assert tango.interval(*table) == pytest.approx(plain.tango_interval(*table), abs=1e-9)


@pytest.mark.parametrize("table", TABLES[:5])
@pytest.mark.parametrize("loss", [-0.2, -0.01, 0.003, 0.1])
def test_the_score_takes_the_likeliest_chances(table, loss):
    assert tango.score(*table, loss) == pytest.approx(plain.tango_score(*table, loss), rel=1e-4)


def test_at_no_loss_it_is_mcnemars_chi_square():
    assert tango.score(30, 12, 500, 0.0) == pytest.approx((30 - 12) / np.sqrt(30 + 12))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 500))
def test_exchanged_sides_have_the_opposite_interval(lost, gained, rest):
    n = lost + gained + rest + 1
    low, high = tango.interval(lost, gained, n)
    assert tango.interval(gained, lost, n) == pytest.approx((-high, -low), abs=1e-12)
    assert low <= (lost - gained) / n + 1e-12
    assert high >= (lost - gained) / n - 1e-12


def test_no_difference_has_a_width():
    low, high = tango.interval(0, 0, 1000)
    assert high == -low == pytest.approx(1.96**2 / (1000 + 1.96**2), rel=1e-3)


def test_it_covers_what_it_says():
    """Exactly, over every table of 40 items, for a loss of 5 points among 15 that flip."""
    chances, true, covered = (0.10, 0.05), 0.05, 0.0
    for lost in range(41):
        for gained in range(41 - lost):
            low, high = tango.interval(lost, gained, 40)
            if low <= true <= high:
                covered += stats.multinomial.pmf([lost, gained, 40 - lost - gained], 40, [*chances, 1 - sum(chances)])
    assert 0.94 < covered < 0.97


@pytest.mark.parametrize("table", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ValueError, match="lost"):
        tango.score(*table, 0.0)
