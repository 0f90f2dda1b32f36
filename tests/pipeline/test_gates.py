"""Gates: each held against its own measurement, in its own direction.

A check that failed ends the work.
"""

from typing import Any

import pytest

from quantkit.bundle import Check
from quantkit.errors import GateError
from quantkit.measurement.rows import Baseline, Row
from quantkit.pipeline.gates import NEAR, demand, judge, near, refuse, still_unjudged, warnings
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


def share(name: str, value: float, before: float, runtime: str = "onnxruntime", **settings: float) -> Row:
    base = Baseline(subject="b", value=before, difference=value - before, difference_ci95=(-1, 1), p_value=0.5)
    shape = {"classes": 10} if "top1" in name else None
    return row(name, value).model_copy(
        update={"baseline": base, "runtime": runtime, "shape": shape, "settings": settings}
    )


LABELLED = [
    share("accuracy.top1", 0.912, 0.914),
    share("accuracy.recall_at_1", 0.61, 0.615),
    share("accuracy.recall_at_5", 0.3, 0.9),
    share("accuracy.top1_agreement", 0.95, 1.0),
    share("accuracy.top1_agreement", 0.5, 1.0, surer_than=0.3),
]


@pytest.mark.parametrize(
    ("gate", "value", "passes", "fails"),
    [
        ("kl_max", 0.2, 0.21, 0.19),
        ("top1_agreement_min", 0.8, 0.79, 0.81),
        ("perplexity_ratio_max", 1.1, 1.11, 1.09),  # candidate over original
        ("cosine_min", 0.99, 0.98, 0.995),
        ("bits_per_weight_max", 4.3, 4.31, 4.25),
        # in points of percent; the agreement of a classifier is not that of next words, nor that of what it is sure of
        ("top1_drop_max", 0.2, 0.2, 0.19),
        ("recall_drop_max", 0.5, 0.5, 0.45),
        ("agreement_min", 0.95, 0.95, 0.96),
    ],
)
def test_each_gate_in_its_direction(gate: str, value: float, passes: float, fails: float) -> None:
    for limit, ok in ((passes, True), (fails, False)):
        ((check,), unjudged) = judge(Gates(**{gate: limit}), [*ROWS, *LABELLED])
        assert not unjudged
        assert (check.name, check.limit, check.ok) == (f"gate.{gate}", limit, ok)
        assert check.value == pytest.approx(value)


def test_a_limit_that_is_just_met_holds() -> None:
    assert all(check.ok for check in judge(Gates(kl_max=0.2, top1_agreement_min=0.8), ROWS)[0])


def test_every_gate_of_the_schema_is_about_something() -> None:
    # a task's is tested with tasks
    every: dict[str, Any] = dict.fromkeys(Gates.model_fields.keys() - {"recovery_min"}, 1.0)
    checks = judge(Gates(**every), [*ROWS, *LABELLED])[0]
    plain = {check.name for check in checks}
    assert plain == {f"gate.{name}" for name in every}
    assert judge(Gates(), ROWS) == ([], [])


@pytest.mark.parametrize("rows", [[], [row("accuracy.perplexity", None, 30.0)], [row("accuracy.perplexity", 33.0)]])
def test_what_was_not_measured_is_not_judged_and_that_is_recorded(rows: list[Row]) -> None:
    """Least of all a perplexity without its original's, against the limit of a ratio."""
    checks, decisions = judge(Gates(perplexity_ratio_max=1.1), rows)
    assert checks == []
    assert [(each.code, each.where) for each in decisions] == [("gate-not-judged", "gates.perplexity_ratio_max")]


def test_what_somebody_asked_for_is_said_and_the_rest_is_a_note() -> None:
    _, decisions = judge(Gates(kl_max=0.1, agreement_min=0.9, cosine_min=0.9), ROWS[3:], {"kl_max"})
    assert [(each.where, each.code) for each in decisions] == [
        ("gates.kl_max", "gate-not-judged"),
        ("gates.agreement_min", "note"),
    ]
    (said,) = warnings(decisions)
    assert said.startswith("gates.kl_max 0.1 is not judged") and "next words or classes" in said
    checks, _ = judge(Gates(kl_max=0.3), ROWS)
    assert [each.where for each in still_unjudged(decisions, checks)] == ["gates.agreement_min"]


def test_labels_that_are_not_there_leave_their_gates_unjudged() -> None:
    agreement = [row for row in LABELLED if row.name == "accuracy.top1_agreement"]
    gates = Gates(top1_drop_max=0.3, agreement_min=0.9, recall_drop_max=0.5, top1_agreement_min=0.9)
    checks, decisions = judge(gates, agreement)
    assert [check.name for check in checks] == ["gate.agreement_min"]
    assert [each.where for each in decisions] == [
        *("gates.top1_agreement_min", "gates.top1_drop_max", "gates.recall_drop_max")
    ]


def test_a_gain_passes_a_limit_on_losses() -> None:
    (check,), _ = judge(Gates(top1_drop_max=0.0), [share("accuracy.top1", 0.92, 0.91)])
    assert check.ok
    assert check.value == pytest.approx(-1.0)


def test_of_several_outputs_the_worst_is_judged_and_each_runtime_by_itself() -> None:
    rows = [
        row("accuracy.cosine", value).model_copy(update={"runtime": runtime, "settings": {"output": name}})
        for runtime, name, value in (
            ("onnxruntime", "a", 0.99),
            ("onnxruntime", "b", 0.9),
            ("onnxruntime", "c", 0.999),
            ("torch", "a", 0.995),
        )
    ]
    checks, _ = judge(Gates(cosine_min=0.95), rows)
    assert [(check.name, check.value, check.ok) for check in checks] == [
        ("gate.cosine_min", 0.9, False),
        ("gate.torch.cosine_min", 0.995, True),
    ]


def check(name: str, value: float | None, *, ok: bool, where: str = "") -> Check:
    return Check(name=name, value=value, limit=0.5, ok=ok, where=where)


def test_the_first_that_failed_is_named() -> None:
    good = check("a", 0.1, ok=True)
    demand([good], "report it")
    with pytest.raises(GateError, match="check-failed") as caught:
        demand([good, check("b", 0.75, ok=False), check("c", None, ok=False)], "report it")
    assert (caught.value.where, caught.value.value, caught.value.rule) == ("b", "b is 0.75", "at most 0.5")
    with pytest.raises(GateError) as caught:
        demand([check("c", None, ok=False, where="layer")], "report it", of="float baseline")
    assert (caught.value.where, caught.value.value) == ("float baseline: layer", "c is not known")


def test_a_limit_inside_the_interval_is_said_and_no_error_under_strict() -> None:
    kl = row("accuracy.kl", 0.2).model_copy(update={"ci95": (0.15, 0.25), "n": 2044, "runtime": "torch"})
    ratio = Baseline(subject="b", value=30.0, ratio=1 / 1.1, ratio_ci95=(1 / 1.2, 1 / 1.0))
    perplexity = row("accuracy.perplexity", 33.0).model_copy(update={"baseline": ratio, "n": 2044})
    taken = near(Gates(kl_max=0.21, perplexity_ratio_max=1.15), [kl, perplexity])
    assert [(each.code, each.where) for each in taken] == [
        (NEAR, "gates.kl_max"),
        (NEAR, "gates.perplexity_ratio_max"),
    ]
    said = "gates.kl_max 0.21: the mean over 2,044 items decides; its 95 % interval in torch, 0.150 to 0.250, includes"
    assert warnings(taken)[0].startswith(said)
    refuse(taken)
    assert still_unjudged(taken, judge(Gates(kl_max=0.21), [kl])[0]) == taken[1:]
    lost = share("accuracy.top1", 0.912, 0.914).model_copy(update={"n": 500})
    assert near(Gates(top1_drop_max=0.5), [lost])
    assert not near(Gates(kl_max=0.3), [kl]) and not near(Gates(kl_max=0.1), [kl])
