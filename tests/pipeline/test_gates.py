"""Gates: each held against its own measurement, in its own direction."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.measure.rows import Baseline, Row
from quantkit.pipeline.gates import judge
from quantkit.recipe import Gates


def row(name: str, value: float | None, baseline: float | None = None) -> Row:
    against = None if baseline is None else Baseline(subject="b", value=baseline)
    return Row(name=name, value=value, unit="1", subject="s", baseline=against)


ROWS = [
    row("accuracy.kl", 0.2),
    row("accuracy.top1_agreement", 0.8),
    row("accuracy.perplexity", 33.0, 30.0),
    row("accuracy.cosine", 0.99),
    row("size.bits_per_weight", 4.3),
]


@pytest.mark.parametrize(
    ("gate", "value", "passes", "fails"),
    [
        ("kl_max", 0.2, 0.21, 0.19),
        ("top1_agreement_min", 0.8, 0.79, 0.81),
        ("perplexity_ratio_max", 1.1, 1.11, 1.09),  # candidate over original
        ("cosine_min", 0.99, 0.98, 0.995),
        ("bits_per_weight_max", 4.3, 4.31, 4.25),
    ],
)
def test_each_gate_in_its_direction(gate: str, value: float, passes: float, fails: float) -> None:
    for limit, ok in ((passes, True), (fails, False)):
        ((check,), unjudged) = judge(Gates(**{gate: limit}), ROWS)
        assert not unjudged
        assert (check.name, check.limit, check.ok) == (f"gate.{gate}", limit, ok)
        assert check.value == pytest.approx(value)


def test_a_limit_that_is_just_met_holds() -> None:
    assert all(check.ok for check in judge(Gates(kl_max=0.2, top1_agreement_min=0.8), ROWS)[0])


def test_every_gate_of_the_schema_is_about_something() -> None:
    every: dict[str, Any] = dict.fromkeys(Gates.model_fields, 1.0)
    assert {check.name for check in judge(Gates(**every), ROWS)[0]} == {f"gate.{name}" for name in Gates.model_fields}
    assert judge(Gates(), ROWS) == ([], [])


@pytest.mark.parametrize("rows", [[], [row("accuracy.perplexity", None, 30.0)], [row("accuracy.perplexity", 33.0)]])
def test_what_was_not_measured_is_not_judged_and_that_is_recorded(rows: list[Row]) -> None:
    """Least of all a perplexity without its original's, against the limit of a ratio."""
    checks, decisions = judge(Gates(perplexity_ratio_max=1.1), rows)
    assert checks == []
    assert [(each.code, each.where) for each in decisions] == [("gate-not-judged", "gates.perplexity_ratio_max")]
