from __future__ import annotations

import numpy as np
import pytest
from reference import plain_labelled as plain

from measurement.labelled.made_up import about
from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy import labelled
from quantkit.measurement.accuracy.labelled import classification
from quantkit.report.bundle import figures


def logits(n: int = 60, width: int = 10, noise: float = 0.6, seed: int = 0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(width, size=n)
    original = generator.normal(size=(n, width)).astype(np.float32)
    original[np.arange(n), labels] += 1.5
    return original, (original + noise * generator.normal(size=(n, width))).astype(np.float32), labels


def named(rows):
    found = {(row.name.removeprefix("accuracy."), "surer_than" in row.settings): row for row in rows}
    assert len(found) == len(rows)
    return {f"{name} sure" if sure else name: row for (name, sure), row in found.items()}


@pytest.mark.parametrize("n, width", [(60, 10), (17, 6), (3, 1000), (40, 2), (5, 5)])
def test_equals_the_plain_formulas(n, width, monkeypatch):
    monkeypatch.setattr(labelled, "_ELEMENTS", 40)  # in several parts
    original, candidate, labels = logits(n, width)
    rows = named(classification(original, candidate, labels, about=about(n)))
    for name, k in (("top1", 1), ("top5", 5)):
        if k >= width:
            assert name not in rows
            continue
        right = [plain.among_first(row, label, k) for row, label in zip(candidate, labels, strict=True)]
        before = [plain.among_first(row, label, k) for row, label in zip(original, labels, strict=True)]
        assert rows[name].value == pytest.approx(np.mean(right))
        assert rows[name].baseline.value == pytest.approx(np.mean(before))
        assert rows[name].baseline.difference == pytest.approx(np.mean(right) - np.mean(before))
    agree = np.array(
        [
            max(range(width), key=lambda c: (a[c], -c)) == max(range(width), key=lambda c: (b[c], -c))
            for a, b in zip(original, candidate, strict=True)
        ]
    )
    assert rows["top1_agreement"].value == pytest.approx(agree.mean())
    sure = np.array([max(plain.softmax(row)) > 0.3 for row in original])
    if sure.any():
        assert rows["top1_agreement sure"].value == pytest.approx(agree[sure].mean())
        assert rows["top1_agreement sure"].n == sure.sum()
        assert rows["top1_agreement sure"].settings["surer_than"] == 0.3
    divergence = [plain.kl(a, b) for a, b in zip(original, candidate, strict=True)]
    assert rows["kl"].value == pytest.approx(np.mean(divergence), rel=1e-9)
    assert rows["kl"].quantiles["p90"] == pytest.approx(np.quantile(divergence, 0.9))


def test_every_row_has_its_interval_and_its_origin():
    for row in classification(*logits(), about=about(60)):
        low, high = row.ci95
        assert low <= row.value <= high
        assert low < high
        assert (row.subject, row.baseline.subject, row.data.items, row.shape) == ("aa", "bb", 60, {"classes": 10})
        assert row.flags == ["ci95-by-image"]
        assert (row.baseline.difference is None) == (row.name not in ("accuracy.top1", "accuracy.top5"))
    vectors = classification(*logits(), about=about(60), unit="sample")
    assert {row.flags[0] for row in vectors} == {"ci95-by-sample"}
    assert figures.scored(vectors).startswith("60 samples of ")


def test_nothing_moved():
    original, _, labels = logits()
    rows = named(classification(original, original.copy(), labels, about=about()))
    assert rows["top1_agreement"].value == 1.0
    assert rows["kl"].value == 0.0
    assert (rows["top1"].baseline.difference, rows["top1"].baseline.p_value) == (0.0, 1.0)
    assert rows["top1"].baseline.difference_ci95[0] < 0


def test_without_labels():
    original, candidate, _ = logits()
    assert list(named(classification(original, candidate, None, about=about()))) == [
        "top1_agreement",
        "top1_agreement sure",
        "kl",
    ]


def test_what_is_rounded_ties_and_the_first_class_is_taken():
    """8-bit logits tie often; a collapsed model must not be right by chance."""
    original = np.eye(8)[[0, 3, 7]]
    rows = named(classification(original, np.zeros((3, 8)), np.array([0, 3, 7]), about=about()))
    assert rows["top1"].value == pytest.approx(1 / 3)
    assert rows["top5"].value == pytest.approx(2 / 3)


def test_a_graph_that_ends_in_a_softmax_is_read_as_chances():
    original, candidate, labels = logits()
    chances = [np.array([plain.softmax(row) for row in side]) for side in (original, candidate)]
    before = named(classification(original, candidate, labels, about=about()))
    after = named(classification(*chances, labels, about=about()))
    for name, row in before.items():
        assert after[name].value == pytest.approx(row.value, rel=1e-6)
        assert after[name].n == row.n
    assert "outputs-are-chances" in after["kl"].flags
    # most of the classes are 0 once rounded to 8 bits
    rounded = np.round(chances[1] * 255) / 255
    assert 0 < named(classification(chances[0], rounded, labels, about=about()))["kl"].value < 1


def test_nobody_is_sure_of_anything():
    original = np.zeros((5, 100))
    row = named(classification(original, original, None, about=about()))["top1_agreement sure"]
    assert row.value is None
    assert row.flags == ["nothing-is-surer"]


def test_labels_of_one_class_are_said_to_be():
    original, candidate, _ = logits()
    rows = named(classification(original, candidate, np.full(60, 4), about=about()))
    assert "labels-of-one-class" in rows["top1"].flags


def test_clusters_widen_every_interval():
    original, candidate, labels = (np.repeat(x, 8, axis=0) for x in logits(30))
    clusters = np.repeat(np.arange(30), 8)
    alone = named(classification(original, candidate, labels, about=about()))
    together = named(classification(original, candidate, labels, about=about(), clusters=clusters))
    for name, row in together.items():
        assert row.value == alone[name].value
        assert np.ptp(row.ci95) > 1.8 * np.ptp(alone[name].ci95), name
        assert "ci95-by-cluster" in row.flags
    assert np.ptp(together["top1"].baseline.difference_ci95) > 1.8 * np.ptp(alone["top1"].baseline.difference_ci95)


@pytest.mark.parametrize(
    "change, kind, code",
    [
        (lambda o, c, y: (o[:0], c[:0], y[:0]), InputError, "nothing-scored"),
        (lambda o, c, y: (o[:, :1], c[:, :1], y * 0), InputError, "one-class"),
        (lambda o, c, y: (o, c, y + 1), InputError, "label-out-of-range"),
        (lambda o, c, y: (o, c, y - 1), InputError, "label-out-of-range"),
        (lambda o, c, y: (np.where(o == o[3, 2], np.nan, o), c, y), InputError, "outputs-not-finite"),
        (lambda o, c, y: (o, np.where(c == c[3, 2], np.inf, c), y), GateError, "outputs-not-finite"),
    ],
)
def test_bad_input_is_one_line(change, kind, code):
    with pytest.raises(kind) as caught:
        classification(*change(*logits()), about=about())
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_are_the_callers_mistake():
    original, candidate, labels = logits()
    for args in (
        (original[:5], candidate, labels),
        (original, candidate, labels[:5]),
        (original[0], candidate[0], None),
        (original, candidate, labels + 0.5),
    ):
        with pytest.raises(ValueError, match="got"):
            classification(*args, about=about())
