from __future__ import annotations

import numpy as np
import pytest
from reference import plain_labelled as plain

from measurement.labelled.made_up import about
from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy import labelled as pairs
from quantkit.measurement.accuracy.labelled import retrieval


def embeddings(n: int = 40, width: int = 12, noise: float = 0.3, seed: int = 0):
    generator = np.random.default_rng(seed)
    left = generator.normal(size=(n, width)).astype(np.float32)
    right = (left + 0.9 * generator.normal(size=(n, width))).astype(np.float32)
    moved = [(side + noise * generator.normal(size=(n, width))).astype(np.float32) for side in (left, right)]
    return left, right, *moved


def named(rows):
    return {row.name.removeprefix("accuracy."): row for row in rows}


@pytest.mark.parametrize("n", [2, 3, 11, 40])
def test_equals_the_plain_formulas(n, monkeypatch):
    monkeypatch.setattr(pairs, "_ROWS", 7)
    sides = embeddings(n)
    rows = named(retrieval(*sides, about=about(n)))
    assert [name for name in rows if name.startswith("recall")] == [f"recall_at_{k}" for k in (1, 5, 10) if k < n]
    for k in (1, 5, 10):
        if k < n:
            before, after = plain.found(*sides[:2], k), plain.found(*sides[2:], k)
            row = rows[f"recall_at_{k}"]
            assert (row.value, row.baseline.value) == (pytest.approx(np.mean(after)), pytest.approx(np.mean(before)))
            assert row.baseline.difference == pytest.approx(np.mean(after) - np.mean(before))
            assert row.flags == ["ci95-by-pair"]
    cosines = [
        np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in zip(np.concatenate(sides[:2]), np.concatenate(sides[2:]), strict=True)
    ]
    row = rows["cosine"]
    assert (row.value, row.n) == (pytest.approx(np.mean(cosines), abs=1e-6), 2 * n)
    assert row.quantiles["p0"] == pytest.approx(min(cosines), abs=1e-6)
    assert row.ci95[0] < row.value < row.ci95[1] <= 1


def test_length_does_not_matter_and_nothing_moved():
    left, right, *_ = embeddings()
    rows = named(retrieval(left, right, 3 * left, 0.1 * right, about=about()))
    assert (rows["recall_at_1"].baseline.difference, rows["recall_at_1"].baseline.p_value) == (0.0, 1.0)
    assert rows["cosine"].value == pytest.approx(1.0, abs=1e-7)
    assert rows["cosine"].quantiles["p0"] <= 1.0


def test_ties_count_as_misses():
    """A model that has collapsed finds nothing; nor do two texts that are alike."""
    left, right, *_ = embeddings()
    one = np.ones_like(left)
    rows = named(retrieval(left, right, one, one, about=about()))
    assert rows["recall_at_10"].value == 0.0
    assert "ties-are-misses" in rows["recall_at_1"].flags
    sure = np.eye(12, dtype=np.float32)
    twice = np.vstack([sure, sure[:1]])
    rows = named(retrieval(twice, twice, twice, twice, about=about()))
    assert rows["recall_at_1"].value == pytest.approx(11 / 13)
    assert rows["recall_at_5"].value == 1.0


def test_an_embedding_of_no_length_finds_nothing_and_is_flagged():
    left, right, *_ = embeddings()
    broken = left.copy()
    broken[7] = 0
    rows = named(retrieval(left, right, broken, right, about=about()))
    lost = np.array(plain.found(left, right, 5))
    lost[7] = False
    assert rows["recall_at_5"].value == pytest.approx(lost.mean())
    assert rows["cosine"].quantiles["p0"] == 0.0
    assert all("zero-embeddings" in row.flags for row in rows.values())
    # one that nothing can be found by, either
    rows = named(retrieval(left, right, left, np.where(np.arange(40)[:, None] == 7, 0, right), about=about()))
    assert rows["recall_at_10"].value < 1.0


@pytest.mark.parametrize(
    "change, kind, code",
    [
        (lambda *sides: [side[:0] for side in sides], InputError, "nothing-scored"),
        (lambda *sides: [side[:1] for side in sides], InputError, "one-pair"),
        (lambda a, b, c, d: (a, np.full_like(b, np.nan), c, d), InputError, "outputs-not-finite"),
        (lambda a, b, c, d: (a, b, c, np.full_like(d, np.inf)), GateError, "outputs-not-finite"),
    ],
)
def test_bad_input_is_one_line(change, kind, code):
    with pytest.raises(kind) as caught:
        retrieval(*change(*embeddings()), about=about())
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_are_the_callers_mistake():
    left, right, *moved = embeddings()
    with pytest.raises(ValueError, match="got"):
        retrieval(left, right[:5], *moved, about=about())
