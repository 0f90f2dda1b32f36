from __future__ import annotations

import pytest

from quantkit.bundle import FileEntry, LayerEntry
from quantkit.measurement.size import size_rows

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
