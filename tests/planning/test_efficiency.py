"""What measurements teach, and where they say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.planning.bound import efficiency
from quantkit.planning.bound.efficiency import ProductQuery, Sample, look_up, samples

HERE = {"id": "cpu-1", "kind": "cpu", "name": "this one"}


def row(batch: int = 4, *, subject: str = "a", **more: Any) -> dict[str, Any]:
    """A decode step whose bound is 10 ms and that takes 25; float32 took 40 for 30."""
    return {
        "schema": 1,
        "name": "tax.total",
        "value": 0.015,
        "unit": "s",
        "subject": subject,
        "baseline": {"subject": "float", "value": 0.01},
        "batch": batch,
        "shape": {"new_tokens": 1, "context": 128},
        "op": {"M": 1, "format": "int4", "bound_s": 0.01, "hp_bound_s": 0.03, "hp_s": 0.04, "K": None, "N": None},
        "runtime": "onnxruntime",
        "settings": {"threads": 2, "compute_type": "int8"},
        "device": HERE,
    } | more


def asked(rows: int = 4, **more: Any) -> ProductQuery:
    known: dict[str, Any] = {"runtime": "onnxruntime", "format": "int4", "compute": "int8", "phase": "decode"}
    return ProductQuery(**(known | {"rows": rows, "bound": 0.01, "kind": "cpu", "device": "cpu-1"} | more))


def test_a_row_says_two_efficiencies() -> None:
    ours, theirs = samples([row()])
    assert (ours.format, ours.phase, ours.rows, ours.efficiency) == ("int4", "decode", 4, pytest.approx(0.4))
    assert (theirs.format, theirs.compute, theirs.efficiency) == ("float32", "", pytest.approx(0.75))
    assert (ours.model, theirs.model, ours.seconds) == ("float", "float", pytest.approx(0.025))


def test_the_shares_of_a_step_go_with_its_side() -> None:
    op = row()["op"] | {"shares": {"int4 in int8": [0.01, 0.0]}, "hp_shares": {"float32": [0.03, 0.0]}}
    ours, theirs = samples([row(op=op)])
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
    seen = [row(4, value=0.01), row(8, value=0.03, subject="b"), row(64, value=10.0)]
    found = look_up(list(samples(seen)), asked(4))
    assert found is not None
    assert (found.low, found.high, found.n, found.subjects) == (pytest.approx(0.25), pytest.approx(0.5), 2, 2)
    assert found.here


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 32},
        {"bound": 0.1},
        {"bound": 0.001},
        {"runtime": "torch"},
        {"format": "nf4"},
        {"phase": "prefill"},
        {"kind": "gpu"},
        {"compute": "fp32"},
    ],
)
def test_where_nothing_is_near_there_is_none(other: dict[str, Any]) -> None:
    assert look_up(list(samples([row()])), asked()) is not None
    assert look_up(list(samples([row()])), asked(**other)) is None


def test_this_device_goes_before_others_and_two_others_do_not_mix() -> None:
    away, far = {**HERE, "id": "cpu-2", "name": "away"}, {**HERE, "id": "cpu-3", "name": "far"}
    rows = [row(value=0.01), row(value=0.09, device=away), row(value=0.09, device=away, subject="b"), row(device=far)]
    found = list(samples(rows))
    own, other = look_up(found, asked()), look_up(found, asked(device="cpu-9"))
    assert own is not None and other is not None
    assert (own.here, own.n, own.value) == (True, 1, pytest.approx(0.5))
    assert (other.here, other.device, other.n, other.high) == (False, "away", 2, pytest.approx(0.1))


def test_a_datasheet_that_promises_more_than_the_run_measured_lowers_the_share() -> None:
    ceiling = {"name": "ceiling.read", "value": 8e9, "device": HERE, "settings": {"threads": 2}}
    found = list(samples([row(), ceiling]))
    same, promised, modest = (look_up(found, asked(read=read)) for read in (8e9, 10e9, 6e9))
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
    with pytest.raises(InputError, match="file-unreadable"):
        efficiency.measured([tmp_path / "none"])


def test_shipped_samples_can_be_read() -> None:
    assert all(isinstance(each, Sample) and 0 < each.efficiency < 5 for each in efficiency.shipped())


def test_a_device_that_claims_to_be_this_machine_is_not() -> None:
    there = row(device={**HERE, "on": "pi5"}, **{"value": 9.0})
    assert {each.device for each in samples([there])} == {"pi5: cpu-1"}
    found = look_up(list(samples([row(), there])), asked())
    assert found is not None
    assert found == look_up(list(samples([row()])), asked())
