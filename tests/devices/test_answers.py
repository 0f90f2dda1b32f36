"""What a device answers is data: what cannot be is refused, in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quantkit.devices.answers import DeviceFacts
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import ShapeCell, parse
from quantkit.devices.measure import _outputs, _timing
from quantkit.devices.there.models import positions
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Accuracy

SHAPE = ShapeCell(kind="decode", batch=1, size=16)
SIDE = [[[0.1], [0.2]], [[0.1], [0.2]]]
TIMES: dict[str, Any] = {"seconds": {"subject": SIDE, "baseline": SIDE}, "rounds": [1, 1], "skipped": ""}
ABOUT = DeviceFacts(id="x", name="y", machine="aarch64", isa="neon", cores=4, memory=1 << 30, versions={})


def answered(cell: str, *rows: Any) -> CollectedCells:
    found = CollectedCells("pi5")
    found.cells[cell] = rows
    return found


def test_times_are_taken_as_they_are() -> None:
    assert np.array_equal(
        _timing(answered("decode-1-16", TIMES), SHAPE, ABOUT).parts[0].seconds["subject"], np.array(SIDE)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": [1]},
        {"seconds": {"subject": SIDE}},
        {"seconds": {"subject": SIDE, "baseline": [[[0.1], [0.2, 0.3]], [[0.1], [0.2]]]}},
        {"seconds": {"subject": SIDE, "baseline": [[[-1.0], [0.2]]] * 2}},
        {"seconds": {"subject": SIDE, "baseline": [[["0x1"], [0.2]]] * 2}},
        {"path": "../../etc/passwd"},
        {"skipped": "$(reboot)"},
        {"before": {"clock_hz": "fast"}},
    ],
    ids=["rounds", "a side", "ragged", "negative", "no number", "more", "no flag", "no clock"],
)
def test_times_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="answer-invalid") as refused:
        _timing(answered("decode-1-16", {**TIMES, **change}), SHAPE, ABOUT)
    assert "\n" not in refused.value.line()


@pytest.mark.parametrize(
    "row",
    [
        {"first": 0, "shapes": {"y": [2, 3]}, "numbers": {"y": [0.0] * 5}},
        {"first": 1, "shapes": {"y": [2, 3]}, "numbers": {"y": [0.0] * 6}},
        {"first": 0, "shapes": {"y": [9, 3]}, "numbers": {"y": [0.0] * 27}},
        {"first": 0, "shapes": {"y": [1 << 40, 1 << 40]}, "numbers": {"y": []}},
        {"first": 0, "shapes": {}, "numbers": {}},
    ],
    ids=["too few numbers", "other samples", "too many", "enormous", "none"],
)
def test_outputs_that_cannot_be_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="answer-invalid"):
        _outputs(answered("outputs-0", row), 2)


@pytest.mark.parametrize(
    "line",
    [b"", b"[" * 50_000, b"\xff\xfe", b'{"n":0,"kind":"row","cell":"x","rows":[],"to":"/etc"}',
     b'{"n":-1,"kind":"done"}', b'{"n":0,"kind":"progress","share":NaN}', b" " * (1 << 20) + b'{"n":0,"kind":"done"}'],
    ids=["nothing", "deep", "no text", "more", "before the first", "no number", "too long"],
)  # fmt: skip
def test_a_line_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(InputError, match="answer-invalid") as refused:
        parse(line, where="pi5")
    assert len(refused.value.line()) < 500


def test_positions_are_scored_as_torch_scores_them() -> None:
    generator = np.random.default_rng(0)
    original = generator.normal(0, 4, (37, 101)).astype(np.float32)
    candidate = original + generator.normal(0, 0.3, original.shape).astype(np.float32)
    original[3, 7] = -np.inf  # a token that the original rules out
    following = generator.integers(8, 101, 37)
    expected = Accuracy()
    expected.add_positions(0, *map(torch.from_numpy, (following, original, candidate)))
    items = expected.items()
    for name, values in positions(following, original.copy(), candidate).items():
        np.testing.assert_allclose(values, getattr(items, name), rtol=2e-6, atol=1e-7, err_msg=name)
