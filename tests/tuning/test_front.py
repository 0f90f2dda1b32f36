"""Points, budgets and what cannot be reached, on tables made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.tuning import front
from quantkit.tuning.budget import Budget
from quantkit.tuning.front import Tables, Unit

NAMES = ("int3", "int4", "int8", "float")


def made(units: int = 8, seed: int = 0) -> Tables:
    """Units of 1000 weights; harm falls by 4 a bit, from one to the next by chance."""
    random = np.random.default_rng(seed)
    size = random.uniform(0.1, 10.0, (units, 1))
    harm = size * np.array([[4e-3, 1e-3, 4e-6, 0.0]])
    bits = np.tile(np.array([3250.0, 4250.0, 8250.0, 32000.0]), (units, 1))
    each = [Unit(u // 4, (f"layers.{u // 4}.{u % 4}",), 1000) for u in range(units)]
    return Tables(each, NAMES, harm, bits, 0.0, 1000 * units, 5000.0, {})


def test_a_point_is_the_sum_of_its_units() -> None:
    tables = made()
    found = front.point(tables, np.array([0, 1, 2, 3, 1, 1, 1, 1]))
    assert found.bits == pytest.approx((3.25 + 4.25 * 5 + 8.25 + 32) / 8)
    assert found.bytes == pytest.approx((3.25 + 4.25 * 5 + 8.25 + 32) * 1000 / 8 + 5000)
    assert found.predicted == pytest.approx(sum(tables.harm[u, c] for u, c in enumerate(found.choice)))


@pytest.mark.parametrize("kind", ["bits", "bytes"])
def test_a_budget_is_kept_to_and_used(kind: str) -> None:
    tables = made()
    for bits in (3.25, 3.9, 4.25, 4.6, 7.0):
        budget = Budget(bits=bits) if kind == "bits" else Budget(bytes=bits * 1000 + 5000)
        found = front.best(tables, budget)
        assert found.bits <= bits + 1e-6
        # one more unit with the next format would not fit
        assert found.bits > bits - 1.0


def test_the_units_that_suffer_most_get_the_bits() -> None:
    tables = made(16)
    found = front.best(tables, Budget(bits=4.8))
    assert len(set(found.choice.tolist())) > 1
    order = np.argsort(tables.harm[:, 1])
    assert found.choice[order].tolist() == sorted(found.choice.tolist())
    uniform = tables.uniform("int4")
    assert uniform is not None
    assert found.predicted < tables.predicted(uniform)


def test_a_limit_on_kl_takes_the_fewest_bits_and_heeds_the_factor() -> None:
    tables = made()
    once, twice = front.best(tables, Budget(kl=0.02)), front.best(tables, Budget(kl=0.02), factor=2.0)
    assert once.predicted <= 0.02
    assert 2 * twice.predicted <= 0.02
    assert twice.bits > once.bits
    assert front.best(tables, Budget(bits=once.bits - 1e-3)).predicted > 0.02


@pytest.mark.parametrize(
    ("budget", "near"),
    [(Budget(bits=3.0), "bits=3.25"), (Budget(bytes=8000), "bytes=8250"), (Budget(bits=3.0, kl=0.1), "bits=3.25")],
)
def test_what_cannot_be_reached_names_the_nearest(budget: Budget, near: str) -> None:
    with pytest.raises(InputError) as problem:
        front.best(made(), budget)
    assert problem.value.code == "budget-unreachable"
    assert near in problem.value.rule
    # and that can be had
    kind, _, value = near.partition("=")
    front.best(made(), replace(Budget(), **{kind: float(value)}))


def test_without_float_a_kl_can_be_out_of_reach() -> None:
    tables = made()
    tables = replace(tables, names=NAMES[:3], harm=tables.harm[:, :3], bits=tables.bits[:, :3])
    least = float(tables.harm[:, 2].sum())
    with pytest.raises(InputError) as problem:
        front.best(tables, Budget(kl=least / 2))
    near = float(problem.value.rule.rpartition("kl=")[2])
    assert near == pytest.approx(least, rel=1e-3)
    assert front.best(tables, Budget(kl=near)).choice.tolist() == [2] * 8


def test_limits_that_exclude_each_other_say_what_one_takes() -> None:
    with pytest.raises(InputError) as problem:
        front.best(made(), Budget(bits=4.0, kl=1e-3))
    assert "all of them together cannot" in problem.value.rule
    bits = float(problem.value.rule.rpartition("bits=")[2])
    front.best(made(), Budget(bits=bits, kl=1e-3))


def test_latency_needs_timings_and_then_holds() -> None:
    tables = made()
    with pytest.raises(InputError) as problem:
        front.best(tables, Budget(bits=5.0, latency=1.0))
    assert problem.value.code == "timings-missing"
    # where 8 bits are the fastest, a limit on time asks for them
    seconds = np.tile(np.array([3.0, 2.0, 1.0, 4.0]), (8, 1))
    timed = replace(tables, seconds={1: seconds, 8: 2 * seconds})
    found = front.best(timed, Budget(bits=7.0, latency=22.0))
    assert 2 * sum(seconds[0, c] for c in found.choice) <= 22.0
    assert found.as_dict(timed)["seconds"].keys() == {"1", "8"}
    with pytest.raises(InputError) as problem:
        front.best(timed, Budget(latency=10.0))
    assert "latency=16" in problem.value.rule


def test_the_front_falls_and_ends_at_the_largest_quantized_candidate() -> None:
    tables = made()
    points = front.sweep(tables)
    bits, harms = [point.bits for point in points], [point.predicted for point in points]
    assert bits == sorted(bits)
    assert harms == sorted(harms, reverse=True)
    assert (bits[0], bits[-1]) == (3.25, 8.25)
    for point in points:
        assert front.best(tables, Budget(bits=point.bits)).predicted == pytest.approx(point.predicted, rel=1e-3)


def test_a_unit_without_a_candidate_never_gets_it() -> None:
    tables = made()
    tables.harm[3, 0] = tables.bits[3, 0] = np.nan
    assert tables.uniform("int3") is None
    assert all(point.choice[3] != 0 for point in front.sweep(tables))
