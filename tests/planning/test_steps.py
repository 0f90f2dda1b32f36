"""Whole steps teach a few numbers, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from quantkit.planning.bound import steps
from quantkit.planning.bound.efficiency import Sample
from quantkit.planning.bound.steps import Learned, Shares, StepQuery, learn

# seconds are those at the ceilings, times these
TRUE = {
    ("int4 in int8", "read"): 1.6,
    ("int4 in int8", "compute"): 3.5,
    ("float32", "read"): 1.2,
    ("float32", "compute"): 1.0,
    ("attention", "read"): 2.0,
}
FIXED = 4e-4


def seconds(shares: Shares, slower: float = 1.0) -> float:
    taken = sum(
        TRUE.get((what, roof), 1.0) * value
        for what, both in shares.items()
        for roof, value in zip(("read", "compute"), both, strict=True)
    )
    return slower * (FIXED + taken)


def shares(size: float, head: float, rows: int, form: str = "int4 in int8") -> dict[str, tuple[float, float]]:
    """Of a model with so many seconds of reading in float32, and a float head of so many."""
    smaller = 0.14 if form != "float32" else 1.0
    return steps.together(
        [
            (form, smaller * size, 0.02 * size * rows),
            ("float32", head, 0.05 * head * rows),
            ("attention", 0.05 * size * rows, 0.0),
        ]
    )


def model(name: str, size: float, head: float, *, slower: float = 1.0, **more: Any) -> Iterator[Sample]:
    known = {"device": "here", "name": "a machine", "kind": "cpu", "runtime": "onnxruntime", "read": None} | more
    for rows in (1, 4, 16, 256):
        for form, compute in (("int4", "int8"), ("float32", "")):
            parts = shares(size, head, rows, steps.named(form, compute))
            bound = sum(sum(both) for both in parts.values())
            yield Sample(
                **known,
                format=form,
                compute=compute,
                phase="prefill" if rows == 256 else "decode",
                rows=rows,
                bound=bound,
                efficiency=bound / seconds(parts, slower),
                subject=f"{name} {form}",
                model=name,
                shares=parts,
            )


def learned(*models: Iterator[Sample], **more: Any) -> Learned:
    given = {"runtime": "onnxruntime", "kind": "cpu", "what": "int4 in int8", "device": "here", "read": None} | more
    found = learn([each for samples in models for each in samples], **given)
    assert found is not None
    return found


def asked(rows: int = 4, *, size: float = 0.012, head: float = 0.003, phase: str = "decode") -> StepQuery:
    parts = shares(size, head, rows)
    return StepQuery("int4 in int8", phase, rows, sum(sum(both) for both in parts.values()), parts)


def test_each_share_has_its_own_numbers() -> None:
    """None of the models has a head; that of the step in question is read as fast as floats are."""
    found = learned(model("a", 0.005, 0.0), model("b", 0.014, 0.0), model("c", 0.03, 0.0))
    for term, value in TRUE.items():
        assert found.terms[term] == pytest.approx(value, rel=0.05), term
    for rows in (1, 4, 16):
        step = asked(rows, head=0.02)
        expected = found.expect(step)
        assert expected is not None
        assert expected.seconds == pytest.approx(seconds(step.shares), rel=0.02)


def test_no_runtime_beats_the_ceilings_and_nothing_takes_less_than_no_time() -> None:
    found = learned(model("a", 0.005, 0.002, slower=0.3), model("b", 0.014, 0.0, slower=0.3))
    assert min(value for (what, _), value in found.terms.items() if what != "step") == 1.0
    assert found.terms["step", "fixed"] >= 0.0


def test_the_interval_is_as_wide_as_models_differ_and_few_make_it_wider() -> None:
    def half(*slower: float) -> float:
        found = learned(*(model(str(i), 0.006 * (i + 1), 0.0, slower=each) for i, each in enumerate(slower)))
        expected = found.expect(asked())
        assert expected is not None
        assert expected.seconds / expected.low == pytest.approx(expected.high / expected.seconds)
        return math.log(expected.high / expected.seconds)

    assert half(1.0, 1.0, 1.0) < 0.02
    assert half(1.0, 1.1, 1.0, 1.1, 1.0) < half(1.0, 1.3, 1.0, 1.3, 1.0) < half(1.0, 1.3)


def test_one_model_alone_is_taken_for_a_factor_of_two() -> None:
    found = learned(model("a", 0.01, 0.002))
    expected = found.expect(asked())
    assert expected is not None and found.models == 1
    assert expected.high == pytest.approx(2 * expected.seconds)


def test_beyond_what_was_measured_the_interval_grows_until_there_is_none() -> None:
    found = learned(model("a", 0.01, 0.002), model("b", 0.02, 0.002, slower=1.2), model("c", 0.04, 0.002))
    inside, beyond = found.expect(asked(16)), found.expect(asked(32))
    assert inside is not None and beyond is not None
    assert beyond.high / beyond.seconds > (inside.high / inside.seconds) ** 1.5
    assert found.expect(asked(512)) is None
    assert found.expect(asked(4, size=20.0)) is None
    assert found.expect(asked(1, phase="prefill")) is None


def test_what_was_never_measured_has_no_forecast() -> None:
    found = learned(model("a", 0.01, 0.002), model("b", 0.02, 0.002))
    step = asked()
    assert found.expect(StepQuery("nf4", step.phase, step.rows, step.bound, step.shares)) is None
    strange = {**step.shares, "nf4 in fp32": (1e-3, 0.0)}
    assert found.expect(StepQuery(step.what, step.phase, step.rows, step.bound, strange)) is None


def test_this_device_goes_before_others_and_two_do_not_mix() -> None:
    own, away = (
        model("a", 0.01, 0.0),
        [*model("b", 0.01, 0.0, slower=3.0, device="away"), *model("c", 0.01, 0.0, device="away")],
    )
    samples = [*own, *away]
    given: dict[str, Any] = {"runtime": "onnxruntime", "kind": "cpu", "what": "int4 in int8", "read": None}
    here, other = learn(samples, device="here", **given), learn(samples, device="elsewhere", **given)
    assert here is not None and other is not None
    assert {each.model for each in here.samples} == {"a"}
    assert {each.model for each in other.samples} == {"b", "c"}
    for change in ({"runtime": "torch"}, {"kind": "gpu"}, {"what": "nf4"}):
        assert learn(samples, device="here", **(given | change)) is None


def test_a_datasheet_that_promises_more_than_the_runs_read_makes_reading_slower() -> None:
    models = [("a", 0.01), ("b", 0.02)]
    same, promised = (
        learned(*(model(name, size, 0.002, read=8e9) for name, size in models), read=read) for read in (8e9, 16e9)
    )
    term = ("float32", "read")
    assert promised.terms[term] == pytest.approx(2 * same.terms[term], rel=0.05)


def test_floats_go_by_their_format_and_codes_by_what_they_are_multiplied_in() -> None:
    assert [steps.named("float32", "fp32"), steps.named("int4", "int8"), steps.named("int4", "")] == [
        "float32",
        "int4 in int8",
        "int4",
    ]
    assert steps.together([("a", 1.0, 0.0), ("a", 1.0, 2.0), ("b", 0.0, 0.0)]) == {"a": (2.0, 2.0)}
