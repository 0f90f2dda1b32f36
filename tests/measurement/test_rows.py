import json

import pytest
from pydantic import ValidationError

from quantkit.bundle import FileEntry, LayerEntry
from quantkit.errors import InputError
from quantkit.measurement.rows import NAMES, Row, read_rows, write_rows
from quantkit.measurement.size import size_rows

# the design's own example
FULL = {
    "schema": 1,
    "name": "latency.decode_step",
    "value": 0.0113,
    "unit": "s",
    "stat": "median",
    "better": "lower",
    "quantiles": {"p50": 0.0113, "p90": 0.0120, "p99": 0.0141},
    "ci95": [0.0112, 0.0115],
    "n": 60,
    "aa_spread": 0.013,
    "subject": "aa",
    "baseline": {"subject": "bb", "value": 0.0301, "ratio": 2.66, "ratio_ci95": [2.6, 2.7]},
    "batch": 1,
    "shape": {"new_tokens": 1, "context": 256},
    "op": None,
    "runtime": "onnxruntime",
    "settings": {"accuracy_level": 4, "threads": 2, "compute_type": "int8"},
    "resident_bytes": 171000000,
    "device": {"id": "x", "kind": "cpu", "name": "a processor"},
    "versions": {},
    "data": {"set": "prose-en", "split": "eval", "sha256": "cc", "items": 6132},
    "flags": [],
}
TAX = {"layer": None, "K": 4096, "N": 14336, "M": 8, "format": "int4", "bound_s": 1e-3, "hp_bound_s": 4e-3}


def test_the_contract_comes_back_as_it_was():
    row = Row.model_validate(FULL)
    assert (row.as_dict(), list(json.loads(row.line()))) == (FULL, list(FULL))
    assert "\n" not in row.line()


def test_a_paired_difference_stands_with_the_baseline_of_shares_alone():
    assert list(Row.model_validate(FULL).as_dict()["baseline"]) == ["subject", "value", "ratio", "ratio_ci95"]
    paired = {"difference": -0.002, "difference_ci95": [-0.005, 0.001], "p_value": 0.3}
    full = FULL | {"name": "accuracy.top1", "baseline": FULL["baseline"] | paired}
    assert Row.model_validate(full).as_dict() == full
    # one item has no interval
    alone = full | {"baseline": full["baseline"] | {"difference_ci95": None}}
    assert Row.model_validate(alone).as_dict() == alone


def test_file_round_trip(tmp_path):
    rows = [
        Row.model_validate(FULL),
        Row.model_validate(FULL | {"name": "tax.total", "op": TAX}),
        Row(name="tax.break_even", value=None, unit="1", subject="aa", flags=["none"]),
    ]
    path = tmp_path / "measurements.jsonl"
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert json.loads(path.read_text().splitlines()[2])["value"] is None
    write_rows(path, rows[:1])
    assert (read_rows(path), [entry.name for entry in tmp_path.iterdir()]) == (rows[:1], ["measurements.jsonl"])


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_name_is_accepted(name):
    assert Row(name=name, value=1.0, unit="1", subject="aa").name == name


def test_the_names_are_the_designs():
    # 29, four that labelled accuracy needs besides (recall_at_5, recall_at_10, relative_error, same), size.bytes_read,
    # four of one runtime against another, ten of a server under load, word error rate, nDCG
    assert len(NAMES) == len(set(NAMES)) == 52


@pytest.mark.parametrize(
    "change",
    [
        {"name": "latency.decode"},
        {"value": float("nan")},
        {"value": float("inf")},
        {"ci95": [1.0, float("nan")]},
        {"ci95": [2.0, 1.0]},
        {"ci95": [1.0]},
        {"quantiles": {"median": 1.0}},
        {"quantiles": {"p50": float("inf")}},
        {"settings": {"scale": float("nan")}},
        {"baseline": {"subject": "b", "value": float("nan")}},
        {"baseline": {"subject": "b", "value": 1.0, "ratio_ci95": [3.0, 2.0]}},
        {"baseline": {"value": 1.0}},
        {"baseline": {"subject": "b", "value": 1.0, "difference": 0.1, "difference_ci95": [0.2, 0.1]}},
        {"baseline": {"subject": "b", "value": 1.0, "difference": 0.1, "p_value": 1.1}},
        {"op": {"k": 3}},
        {"device": {"id": "x", "kind": "toaster", "name": "y"}},
        {"data": {"set": "x", "split": "train", "sha256": "y", "items": 3}},
        {"better": "bigger"},
        {"n": 0},
        {"unit": ""},
        {"speed": 3},
        {"schema": 2},
    ],
)
def test_what_breaks_the_contract_is_refused(change):
    with pytest.raises(ValidationError):
        Row.model_validate(FULL | change)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"schema": 1', "Expecting"),
        (json.dumps(FULL).replace("0.0113,", "NaN,", 1), "NaN"),
        (json.dumps(FULL | {"ratio": 1}), "unknown key"),
        (json.dumps(FULL | {"name": "accuracy.kll"}), "did you mean 'accuracy.kl'"),
        ("[]", "dictionary"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(FULL) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message) as caught:
        read_rows(path)
    assert caught.value.code == "measurements-invalid"
    assert "m.jsonl:2" in caught.value.where


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError) as caught:
        write_rows(tmp_path / "no/m.jsonl", [])
    assert caught.value.code == "file-unwritable"
    with pytest.raises(InputError) as caught:
        read_rows(tmp_path / "no/m.jsonl")
    assert caught.value.code == "file-missing"


LAYERS = [
    LayerEntry(name="a", shape=[100, 64], scheme={"format": "int4"}, bits_per_weight=4.25),
    LayerEntry(name="b", shape=[300, 64], scheme={"format": "int8"}, bits_per_weight=8.25),
]


def file(path: str, size: int, role: str) -> FileEntry:
    return FileEntry(path=path, bytes=size, sha256="0" * 64, role=role, deterministic=True)


FILES = [
    file("model/model-00001-of-00002.safetensors", 1000, "weights"),
    file("model/model-00002-of-00002.safetensors", 500, "weights"),
    file("model/config.json", 70, "config"),
    file("onnx/model.onnx.data", 900, "onnx"),
]


def test_bytes_and_bits():
    size, bits = size_rows(LAYERS, FILES, subject="aa", baseline="bb", baseline_bytes=6000)
    assert (size.name, size.value, size.unit) == ("size.bytes", 1500, "B")
    assert (size.baseline.subject, size.baseline.value, size.baseline.ratio) == ("bb", 6000, 4.0)
    # weighted by weights, not by layers
    assert bits.value == pytest.approx((4.25 + 3 * 8.25) / 4)
    assert (bits.unit, bits.flags) == ("bit", [])


def test_each_export_by_itself():
    size, _ = size_rows(LAYERS, FILES, subject="aa", folder="onnx")
    assert size.value == 900
    assert size.baseline is None


def test_nothing_quantized():
    _, bits = size_rows([], FILES, subject="aa")
    assert bits.value is None
    assert bits.flags == ["no-quantized-layer"]
