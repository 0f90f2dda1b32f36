from __future__ import annotations

import numpy as np
import pytest

from measurement.labelled.made_up import about
from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy.outputs import outputs
from quantkit.stats.shares import wilson


def sides(n: int = 30, noise: float = 0.02):
    generator = np.random.default_rng(0)
    before = {"boxes": generator.normal(size=(n, 3, 4)), "score": 5 + generator.normal(size=(n,)), "kept": np.arange(n)}
    moved = {k: v if v.dtype.kind == "i" else v + noise * generator.normal(size=v.shape) for k, v in before.items()}
    return before, moved


def test_each_output_of_floats_has_its_rows():
    before, moved = sides()
    rows = {(row.name, row.settings["output"]): row for row in outputs(before, moved, about=about(30))}
    # of a single number a cosine is a sign; whole numbers are the same or not
    assert list(rows) == [
        ("accuracy.cosine", "boxes"),
        ("accuracy.relative_error", "boxes"),
        ("accuracy.relative_error", "score"),
        ("accuracy.same", "kept"),
    ]
    same = rows.pop(("accuracy.same", "kept"))
    assert (same.value, same.ci95) == (1.0, wilson(30, 30))
    flat, other = before["boxes"].reshape(30, -1), moved["boxes"].reshape(30, -1)
    error = rows["accuracy.relative_error", "boxes"]
    assert error.value == pytest.approx(np.linalg.norm(other - flat) / np.linalg.norm(flat))
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(flat, other, strict=True)]
    cosine = rows["accuracy.cosine", "boxes"]
    assert (cosine.value, cosine.quantiles["p0"]) == (pytest.approx(np.mean(cosines)), pytest.approx(min(cosines)))
    for row in rows.values():
        assert row.ci95[0] < row.value < row.ci95[1]
        assert row.settings["threads"] == 2


def test_what_has_no_size_has_no_relative_error():
    zero = np.zeros((5, 3), np.float32)
    cosine, error = outputs({"y": zero}, {"y": zero + 1}, about=about())
    assert (error.value, error.flags) == (None, ["original-is-zero"])
    assert (cosine.value, cosine.flags) == (0.0, ["ci95-by-item", "zero-outputs"])
    ((first, *_),) = [outputs({"y": zero[:1] + 1}, {"y": zero[:1] + 2}, about=about())]
    assert first.ci95 is None


@pytest.mark.parametrize(
    "before, after, kind, code",
    [
        (np.zeros((0, 3)), np.zeros((0, 3)), InputError, "nothing-scored"),
        (np.full((4, 3), np.nan), np.zeros((4, 3)), InputError, "outputs-not-finite"),
        (np.zeros((4, 3)), np.full((4, 3), np.nan), GateError, "outputs-not-finite"),
    ],
)
def test_bad_input_is_one_line(before, after, kind, code):
    with pytest.raises(kind) as caught:
        outputs({"y": before}, {"y": after}, about=about())
    assert caught.value.code == code


def test_sides_that_do_not_fit_are_the_callers_mistake():
    before, moved = sides()
    with pytest.raises(ValueError, match="same outputs"):
        outputs(before, {"boxes": moved["boxes"]}, about=about())


def test_what_was_drawn_together_counts_as_one():
    before, moved = ({k: np.repeat(v, 12, axis=0) for k, v in side.items()} for side in sides(10))
    clusters = np.repeat(np.arange(10), 12)
    alone, together = (
        {(row.name, row.settings["output"]): row for row in outputs(before, moved, about=about(120), clusters=each)}
        for each in (None, clusters)
    )
    assert together.pop(("accuracy.same", "kept")).ci95 == wilson(10, 10), "ten draws, not 120"
    for key, row in together.items():
        assert row.value == alone[key].value
        assert np.ptp(row.ci95) > 2.5 * np.ptp(alone[key].ci95), key
        assert row.ci95[0] < row.value < row.ci95[1]
        assert (row.flags, row.shape) == (["ci95-by-cluster"], {"clusters": 10})


@pytest.mark.parametrize("form", ["corners", "centres", "numbered"])
def test_sets_are_paired_by_their_boxes(form: str):
    """However boxes are written, whatever their order; a label beside one that has changed is no longer the same."""
    generator = np.random.default_rng(1)
    near = generator.uniform(0, 100, size=(6, 2))
    boxes = np.concatenate([near, near + generator.uniform(5, 10, size=(6, 2))], axis=1)
    if form == "centres":
        boxes = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
    if form == "numbered":
        boxes = np.concatenate([np.zeros((6, 1)), boxes, generator.random((6, 2))], axis=1)
    order = [4, 2, 0, 1]
    before, after = np.empty(2, object), np.empty(2, object)
    before[:], after[:] = [boxes, boxes[:0]], [boxes[order], boxes[:0]]
    labels, others = np.empty(2, object), np.empty(2, object)
    labels[:], others[:] = [np.arange(6), np.arange(0)], [np.array([4, 2, 9, 1]), np.arange(0)]
    rows = outputs({"b": before, "l": labels}, {"b": after, "l": others}, about=about(2))
    found = {(row.name, row.settings["output"]): row for row in rows}
    assert found["accuracy.same", "b"].value == pytest.approx(2 * 4 / 10)
    assert found["accuracy.same", "b"].shape == {"original": 6, "candidate": 4}
    assert found["accuracy.same", "l"].value == pytest.approx(2 * 3 / 10)
    assert found["accuracy.relative_error", "b"].value == 0
