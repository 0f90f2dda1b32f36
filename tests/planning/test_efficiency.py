"""What measurements teach of products and of whole steps, how far to trust it, and where they say nothing."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.planning import efficiency
from quantkit.planning.efficiency import Learned, Sample, Shares, learn, look_up, samples

HERE = {"id": "cpu-1", "kind": "cpu", "name": "this one"}


def row(batch: int = 4, *, subject: str = "a", **more: Any) -> dict[str, Any]:
    """A decode step whose bound is 10 ms and that takes 25; float32 took 40 for 30."""
    return (
        {"schema": 1, "name": "tax.total", "value": 0.015, "unit": "s", "subject": subject}
        | {"baseline": {"subject": "float", "value": 0.01}, "batch": batch}
        | {"shape": {"new_tokens": 1, "context": 128}}
        | {"op": {"M": 1, "format": "int4", "bound_s": 0.01, "hp_bound_s": 0.03, "hp_s": 0.04, "K": None, "N": None}}
        | {"runtime": "onnxruntime", "settings": {"threads": 2, "compute_type": "int8"}, "device": HERE}
        | more
    )


def near(measured: list[dict[str, Any]], **more: Any) -> efficiency.Efficiency | None:
    """Of a product like that of `row`."""
    asked: dict[str, Any] = {"runtime": "onnxruntime", "form": "int4", "compute": "int8", "phase": "decode"}
    asked |= {"rows": 4, "bound": 0.01, "kind": "cpu", "device": "cpu-1"} | more
    return look_up(list(samples(measured)), **asked)


def test_a_row_says_two_efficiencies_with_the_shares_of_each_side() -> None:
    op = row()["op"] | {"shares": {"int4 in int8": [0.01, 0.0]}, "hp_shares": {"float32": [0.03, 0.0]}}
    ours, theirs = samples([row(op=op)])
    assert (ours.format, ours.phase, ours.rows, ours.efficiency) == ("int4", "decode", 4, pytest.approx(0.4))
    assert (theirs.format, theirs.compute, theirs.efficiency) == ("float32", "", pytest.approx(0.75))
    assert (ours.model, theirs.model, ours.seconds) == ("float", "float", pytest.approx(0.025))
    assert (ours.shares, theirs.shares) == ({"int4 in int8": [0.01, 0.0]}, {"float32": [0.03, 0.0]})


def test_a_baseline_counts_once_for_a_shape() -> None:
    found = list(samples([row(), row(subject="b"), row(8)]))
    assert [each.rows for each in found if each.format == "float32"] == [4, 8]
    assert len([each for each in found if each.format == "int4"]) == 3


def test_products_and_prefills_are_phases_of_their_own() -> None:
    op = {"K": 64, "N": 32, "M": 16, "format": "nf4", "bound_s": 1.0}
    found = list(samples([row(op=op), row(2, shape={"new_tokens": 128, "context": 0})]))
    assert [(each.phase, each.rows, each.subject) for each in found][:2] == [("op", 16, "64x32"), ("prefill", 256, "a")]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "latency.decode_step"},
        {"value": None},
        {"device": None},
        {"runtime": None},
        {"op": {"format": "int4", "bound_s": None}},
        {"value": -0.01},
    ],
)
def test_rows_that_say_none_are_passed_over(change: dict[str, Any]) -> None:
    assert "int4" not in [each.format for each in samples([row(**change)])]


def test_the_interval_is_what_was_seen_near() -> None:
    found = near([row(4, value=0.01), row(8, value=0.03, subject="b"), row(64, value=10.0)])
    assert found is not None
    assert (found.low, found.high, found.n, found.subjects) == (pytest.approx(0.25), pytest.approx(0.5), 2, 2)
    assert found.here


OTHERS = [{"rows": 32}, {"bound": 0.1}, {"bound": 0.001}, {"runtime": "torch"}, {"form": "nf4"}]
OTHERS += [{"phase": "prefill"}, {"kind": "gpu"}, {"compute": "fp32"}]


@pytest.mark.parametrize("other", OTHERS)
def test_where_nothing_is_near_there_is_none(other: dict[str, Any]) -> None:
    assert near([row()]) is not None
    assert near([row()], **other) is None


def test_this_device_goes_before_others_and_two_others_do_not_mix() -> None:
    away, far = {**HERE, "id": "cpu-2", "name": "away"}, {**HERE, "id": "cpu-3", "name": "far"}
    rows = [row(value=0.01), row(value=0.09, device=away), row(value=0.09, device=away, subject="b"), row(device=far)]
    own, other = near(rows), near(rows, device="cpu-9")
    assert own is not None and other is not None
    assert (own.here, own.n, own.value) == (True, 1, pytest.approx(0.5))
    assert (other.here, other.device, other.n, other.high) == (False, "away", 2, pytest.approx(0.1))


def test_a_device_that_claims_to_be_this_machine_is_not() -> None:
    there = row(device={**HERE, "on": "pi5"}, **{"value": 9.0})
    assert {each.device for each in samples([there])} == {"pi5: cpu-1"}
    assert near([row(), there]) == near([row()]) is not None


def test_a_datasheet_that_promises_more_than_the_run_measured_lowers_the_share() -> None:
    ceiling = {"name": "ceiling.read", "value": 8e9, "device": HERE, "settings": {"threads": 2}}
    same, promised, modest = (near([row(), ceiling], read=read) for read in (8e9, 10e9, 6e9))
    assert same is not None and promised is not None and modest is not None
    assert promised.value == pytest.approx(0.8 * same.value)
    assert modest.value == same.value


def test_what_is_kept_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    assert efficiency.own() == []
    efficiency.keep([row()])
    efficiency.keep([row(value=0.0)])
    efficiency.keep([{"name": "size.bytes"}])
    assert [each.efficiency for each in efficiency.own() if each.format == "int4"] == [pytest.approx(1.0)]
    assert len(list((tmp_path / "measured").iterdir())) == 1
    (tmp_path / "measured" / "torn.jsonl").write_text('{"device": "cpu')
    assert len(efficiency.own()) == 2


def test_files_that_a_user_names(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    file.write_text(json.dumps(row()) + "\n\n")
    assert efficiency.measured([tmp_path]) == efficiency.measured([file]) == list(samples([row()]))
    file.write_text("{\n")
    with pytest.raises(InputError, match="measurements-invalid"):
        efficiency.measured([file])
    with pytest.raises(InputError, match="file-missing"):
        efficiency.measured([tmp_path / "none"])


def test_shipped_samples_can_be_read() -> None:
    assert all(isinstance(each, Sample) and 0 < each.efficiency < 5 for each in efficiency.shipped())


# --- whole steps -----------------------------------------------------------------------------------------------------

# seconds are those at the ceilings, times these
TRUE = {("int4 in int8", "read"): 1.6, ("int4 in int8", "compute"): 3.5} | {
    ("float32", "read"): 1.2,
    ("float32", "compute"): 1.0,
    ("attention", "read"): 2.0,
}
FIXED = 4e-4
QUESTION: dict[str, Any] = {
    "runtime": "onnxruntime",
    "kind": "cpu",
    "what": "int4 in int8",
    "device": "here",
    "read": None,
}
Step = tuple[str, str, int, float, Shares]


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
    blocks, last = (form, smaller * size, 0.02 * size * rows), ("float32", head, 0.05 * head * rows)
    return efficiency.together([blocks, last, ("attention", 0.05 * size * rows, 0.0)])


def model(name: str, size: float, head: float, *, slower: float = 1.0, **more: Any) -> Iterator[Sample]:
    known = {"device": "here", "name": "a machine", "kind": "cpu", "runtime": "onnxruntime", "read": None} | more
    for rows in (1, 4, 16, 256):
        for form, compute in (("int4", "int8"), ("float32", "")):
            parts = shares(size, head, rows, efficiency.named(form, compute))
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
    found = learn([each for several in models for each in several], **(QUESTION | more))
    assert found is not None
    return found


def step(rows: int = 4, *, size: float = 0.012, head: float = 0.003, phase: str = "decode") -> Step:
    parts = shares(size, head, rows)
    return "int4 in int8", phase, rows, sum(sum(both) for both in parts.values()), parts


def expect(found: Learned, asked: Step) -> tuple[float, float, float]:
    expected = found.expect(*asked)
    assert expected is not None
    return expected


def test_each_share_has_its_own_numbers() -> None:
    """None of the models has a head; that of the step in question is read as fast as floats are."""
    found = learned(model("a", 0.005, 0.0), model("b", 0.014, 0.0), model("c", 0.03, 0.0))
    for term, value in TRUE.items():
        assert found.terms[term] == pytest.approx(value, rel=0.05), term
    for rows in (1, 4, 16):
        asked = step(rows, head=0.02)
        assert expect(found, asked)[0] == pytest.approx(seconds(asked[-1]), rel=0.02)


def test_no_runtime_beats_the_ceilings_and_nothing_takes_less_than_no_time() -> None:
    found = learned(model("a", 0.005, 0.002, slower=0.3), model("b", 0.014, 0.0, slower=0.3))
    assert min(value for (what, _), value in found.terms.items() if what != "step") == 1.0
    assert found.terms["step", "fixed"] >= 0.0


def test_the_interval_is_as_wide_as_models_differ_and_few_make_it_wider() -> None:
    def half(*slower: float) -> float:
        found = learned(*(model(str(i), 0.006 * (i + 1), 0.0, slower=each) for i, each in enumerate(slower)))
        middle, low, high = expect(found, step())
        assert middle / low == pytest.approx(high / middle)
        return math.log(high / middle)

    assert half(1.0, 1.0, 1.0) < 0.02
    assert half(1.0, 1.1, 1.0, 1.1, 1.0) < half(1.0, 1.3, 1.0, 1.3, 1.0) < half(1.0, 1.3)


def test_one_model_alone_is_taken_for_a_factor_of_two() -> None:
    found = learned(model("a", 0.01, 0.002))
    middle, _, high = expect(found, step())
    assert (found.models, high) == (1, pytest.approx(2 * middle))


def test_beyond_what_was_measured_the_interval_grows_until_there_is_none() -> None:
    found = learned(model("a", 0.01, 0.002), model("b", 0.02, 0.002, slower=1.2), model("c", 0.04, 0.002))
    inside, beyond = (high / middle for middle, _, high in (expect(found, step(rows)) for rows in (16, 32)))
    assert beyond > inside**1.5
    for far in (step(512), step(4, size=20.0), step(1, phase="prefill")):
        assert found.expect(*far) is None


def test_what_was_never_measured_has_no_forecast() -> None:
    found = learned(model("a", 0.01, 0.002), model("b", 0.02, 0.002))
    what, *more, parts = step()
    assert found.expect("nf4", *more, parts) is None
    assert found.expect(what, *more, {**parts, "nf4 in fp32": (1e-3, 0.0)}) is None


def test_of_steps_too_this_device_goes_before_others_and_two_do_not_mix() -> None:
    away = [*model("b", 0.01, 0.0, slower=3.0, device="away"), *model("c", 0.01, 0.0, device="away")]
    known = [*model("a", 0.01, 0.0), *away]
    here, other = learned(iter(known)), learned(iter(known), device="elsewhere")
    assert {each.model for each in here.samples} == {"a"}
    assert {each.model for each in other.samples} == {"b", "c"}
    for change in ({"runtime": "torch"}, {"kind": "gpu"}, {"what": "nf4"}):
        assert learn(known, **(QUESTION | change)) is None


def test_a_datasheet_that_promises_more_than_the_runs_read_makes_reading_slower() -> None:
    models = [("a", 0.01), ("b", 0.02)]
    same, promised = (
        learned(*(model(name, size, 0.002, read=8e9) for name, size in models), read=read) for read in (8e9, 16e9)
    )
    term = ("float32", "read")
    assert promised.terms[term] == pytest.approx(2 * same.terms[term], rel=0.05)


def test_floats_go_by_their_format_and_codes_by_what_they_are_multiplied_in() -> None:
    pairs = [("float32", "fp32"), ("int4", "int8"), ("int4", "")]
    assert [efficiency.named(*pair) for pair in pairs] == ["float32", "int4 in int8", "int4"]
    assert efficiency.together([("a", 1.0, 0.0), ("a", 1.0, 2.0), ("b", 0.0, 0.0)]) == {"a": (2.0, 2.0)}


def test_the_host_s_calls_are_learned_where_samples_state_them() -> None:
    def calling(name: str, size: float, calls: int) -> Iterator[Sample]:
        for one in model(name, size, 2e-3):
            parts = {**one.shares, **efficiency.called(calls)}
            yield replace(one, shares=parts, efficiency=one.bound / (one.seconds + 30e-6 * calls))

    taught = [calling(name, size, calls) for name, size, calls in (("a", 4e-3, 97), ("b", 8e-3, 257), ("c", 1e-2, 161))]
    known = learned(*taught)
    assert known.terms["calls", "compute"] == pytest.approx(30, rel=1e-3)
    # those of other runtimes do not state any
    parts = shares(5e-3, 2e-3, 4)
    without, asked = learned(model("a", 4e-3, 2e-3), model("b", 8e-3, 1e-3)), ("int4 in int8", "decode", 4, 2e-3)
    assert without.expect(*asked, parts | efficiency.called(100)) == without.expect(*asked, parts)
