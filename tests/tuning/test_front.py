"""Points, budgets and what cannot be reached, on tables made by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.measurement.rows import Operation, Row
from quantkit.scheme import WeightScheme
from quantkit.tuning import front
from quantkit.tuning.candidates import Candidate
from quantkit.tuning.front import Budget, Tables, Unit, choose, least, total
from quantkit.tuning.front import unit_seconds as seconds

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
    assert (bits, harms) == (sorted(bits), sorted(harms, reverse=True))
    assert (bits[0], bits[-1]) == (3.25, 8.25)
    for point in points:
        assert front.best(tables, Budget(bits=point.bits)).predicted == pytest.approx(point.predicted, rel=1e-3)


def test_a_unit_without_a_candidate_never_gets_it() -> None:
    tables = made()
    tables.harm[3, 0] = tables.bits[3, 0] = np.nan
    assert tables.uniform("int3") is None
    assert all(point.choice[3] != 0 for point in front.sweep(tables))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["bits=4.25"], {"bits": 4.25}),
        (["bytes=100MB"], {"bytes": 1e8}),
        (["bytes=1.5e9"], {"bytes": 1.5e9}),
        (["kl=0.05,latency=12ms"], {"kl": 0.05, "latency": 0.012}),
        (["bits=4.25", "latency=0.5 s"], {"bits": 4.25, "latency": 0.5}),
    ],
)
def test_budgets_are_read_with_their_units(texts: list[str], expected: dict[str, float]) -> None:
    found = Budget.parse(texts).as_dict()
    assert found.keys() == expected.keys()
    assert all(found[kind] == pytest.approx(value) for kind, value in expected.items())


@pytest.mark.parametrize(
    "text", ["", "4.25", "bit=4", "bits=", "bits=x", "bits=0", "bits=-1", "bits=4MB", "kl=1.2.3", "bits=4,bits=5"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError) as problem:
        Budget.parse([text])
    assert problem.value.code == "budget-invalid"
    assert "bits=4.25" in problem.value.remedy


def tried(goal: np.ndarray, limits: list[tuple[np.ndarray, float]]) -> float | None:
    """The least goal of all assignments that keep to the limits."""
    best = None
    for choice in itertools.product(range(goal.shape[1]), repeat=goal.shape[0]):
        picked = np.array(choice)
        if np.isnan(goal[np.arange(len(picked)), picked]).any():
            continue
        if all(total(table, picked) <= most + 1e-9 for table, most in limits):
            value = total(goal, picked)
            best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    goal, first, second = (random.random((6, 3)) for _ in range(3))
    if seed % 3 == 0:
        goal[2, 1] = first[2, 1] = second[2, 1] = np.nan
    limits = [(first, float(random.uniform(1.2, 4.0))), (second, float(random.uniform(1.2, 4.0)))][: 1 + seed % 2]
    best, found = tried(goal, limits), choose(goal, limits)
    assert (best is None) == (found is None)
    if found is not None and best is not None:
        assert total(goal, found) == pytest.approx(best, rel=1e-4)
        assert all(total(table, found) <= most * (1 + 1e-6) for table, most in limits)


def test_harms_of_very_different_size_are_told_apart() -> None:
    harm = np.array([[1e-2, 1e-6], [1e-3, 1e-7], [1e-4, 1e-9]])
    bits = np.array([[4e6, 8e6]] * 3)
    found = choose(harm, [(bits, 16e6)])
    assert found is not None
    assert found.tolist() == [1, 0, 0]


def test_a_limit_that_is_met_exactly_is_met() -> None:
    bits = np.array([[4.25e6, 8.25e6]] * 40)
    assert choose(np.array([[1.0, 0.0]] * 40), [(bits, 40 * 4.25e6)]) is not None


def test_nothing_keeps_to_a_limit_below_the_least() -> None:
    table = np.array([[2.0, 3.0], [2.0, 5.0]])
    assert least(table).tolist() == [0, 0]
    assert choose(table, [(table, 3.9)]) is None


CANDIDATES = [
    Candidate("int4 g32", WeightScheme(format="int4", granularity="group", group=32)),
    Candidate("float", None),
]


def row(name: str, columns: int, rows: int, batch: int, value: float | None) -> Row:
    op = Operation(K=columns, N=rows, M=batch, format=name)
    return Row(name="latency.op", value=value, unit="s", stat="median", better="lower", subject="x", op=op)


def test_fused_products_count_before_single_ones() -> None:
    rows = [row("int4", 64, 64, 1, 2.0), row("int4", 64, 32, 1, 1.0), row("int4", 64, 128, 1, 2.5)]
    rows += [row("float32", 64, 64, 1, 5.0), row("float32", 64, 32, 1, 3.0)]
    found, missing = seconds(rows, [[(64, 64), (32, 64), (32, 64)], [(64, 64)]], CANDIDATES)
    assert (missing, found[1].tolist()) == ([], [[2.5, 11.0], [2.0, 5.0]])


def test_a_batch_with_a_gap_is_left_out_and_named() -> None:
    rows = [row(name, 64, 64, batch, 1.0) for name in ("int4", "bfloat16") for batch in (1, 8)]
    rows += [row("int4", 64, 64, 32, 1.0), row("float32", 64, 64, 32, None)]
    found, missing = seconds(rows, [[(64, 64)]], CANDIDATES)
    assert sorted(found) == [1, 8, 32][:2]
    assert missing == ["batch 32: float, K 64, N 64 was not timed"] or len(missing) == 0
    wanted, missing = seconds(rows, [[(64, 64)]], CANDIDATES, batches=[8, 2])
    assert sorted(wanted) == [8]
    assert "batch 2" in missing[0]


@pytest.mark.parametrize("rows", [[], [row("int4", 64, 64, 1, None)]])
def test_no_timings_are_no_tables(rows: list[Row]) -> None:
    assert seconds(rows, [[(64, 64)]], CANDIDATES) == ({}, [])
