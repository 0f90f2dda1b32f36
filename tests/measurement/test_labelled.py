import itertools

import numpy as np
import pytest
from reference import plain_labelled as plain
from scipy import stats

from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy import labelled
from quantkit.measurement.accuracy.labelled import (
    About,
    Drawn,
    classification,
    difference_interval,
    retrieval,
    share_interval,
    share_row,
)
from quantkit.measurement.accuracy.outputs import outputs
from quantkit.measurement.rows import Data, Device
from quantkit.report.bundle import figures
from quantkit.stats.shares import wilson


def sides(both: int, only_before: int, only_right: int, neither: int):
    right = np.repeat([True, False, True, False], [both, only_before, only_right, neither])
    before = np.repeat([True, True, False, False], [both, only_before, only_right, neither])
    return right, before


def test_a_row_of_a_share_holds_its_data_and_interval():
    right, before = sides(420, 12, 8, 40)
    row = share_row(
        "accuracy.top1", right, before, Drawn(right.size, "image"), about=about(480), shape={"classes": 10}, seed=1
    )
    assert (row.value, row.n, row.runtime, row.settings, row.shape) == (
        428 / 480,
        480,
        "onnxruntime",
        {"threads": 2},
        {"classes": 10},
    )
    oracle = stats.binomtest(428, 480).proportion_ci(method="wilson")
    assert row.ci95 == pytest.approx((oracle.low, oracle.high))
    base = row.baseline
    assert (base.subject, base.value, base.ratio) == ("bb", 432 / 480, pytest.approx(428 / 432))
    assert base.difference == pytest.approx(-4 / 480)
    assert (base.p_value, row.flags) == (pytest.approx(stats.binomtest(8, 20).pvalue), ["ci95-by-image"])


def test_the_difference_is_paired():
    right, before = sides(420, 12, 8, 40)
    moved = right.astype(float) - before
    oracle = stats.bootstrap((moved,), np.mean, n_resamples=9999, method="BCa", rng=np.random.default_rng(5))
    low, high = difference_interval(right, before, seed=1)
    width = high - low
    # two draws of resamples differ by a few per cent of the width
    assert (low, high) == pytest.approx(tuple(oracle.confidence_interval), abs=0.06 * width)
    # unpaired, the spread of the two shares alone would be 0.077
    assert width < 0.045


def test_no_difference_is_not_proved_by_a_sample():
    right, before = sides(470, 0, 0, 10)
    assert difference_interval(right, before) == pytest.approx((-0.0079, 0.0079), abs=1e-4)
    # of 48 groups as much as 48 items would say
    assert difference_interval(right, before, np.arange(480) // 10)[1] == pytest.approx(0.0741, abs=1e-3)


def test_tiny_samples_have_finite_intervals_or_none():
    for n in range(2, 6):
        for moved in itertools.combinations_with_replacement((-1, 0, 1), n):
            d = np.array(moved)
            low, high = difference_interval(d > 0, d < 0)
            assert -1 <= low <= d.mean() <= high <= 1, moved
    assert difference_interval(np.array([True]), np.array([False])) is None
    row = share_row("accuracy.top1", np.array([True]), np.array([False]), Drawn(1, "image"), about=about())
    assert row.baseline.ratio is None
    assert row.baseline.difference == 1.0
    assert row.ci95 == (pytest.approx(0.2065, abs=1e-4), 1.0)


def test_what_was_drawn_together_counts_as_one():
    generator = np.random.default_rng(0)
    right = np.repeat(generator.random(40) < 0.8, 12)
    clusters = np.repeat(np.arange(40), 12)
    alone, together = share_interval(right), share_interval(right, clusters)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])
    row = share_row("accuracy.top1", right, None, Drawn(480, "image", clusters), about=about())
    assert (row.flags, row.shape) == (["ci95-by-cluster"], {"clusters": 40})
    # all right: as much as 40 draws say
    assert share_interval(np.ones(480, bool), clusters)[0] == pytest.approx(0.9124, abs=1e-3)
    assert share_interval(np.zeros(480, bool), clusters)[1] == pytest.approx(0.0876, abs=1e-3)
    assert share_interval(np.ones(4, bool), np.zeros(4)) == (0.0, 1.0)


def test_crops_of_five_photographs_are_five_draws():
    """96 crops each of five photographs: intervals are those of five numbers, whatever the number of crops."""
    generator = np.random.default_rng(4)
    shares = np.array([0.99, 0.97, 0.95, 0.93, 0.88])
    clusters = np.repeat(np.arange(5), 96)
    right = (generator.random((5, 96)) < shares[:, None]).ravel()
    before = np.ones(480, bool)
    row = share_row("accuracy.top1", right, before, Drawn(480, "image", clusters), about=about(480))
    each = right.reshape(5, 96).mean(axis=1)
    reach = stats.t.ppf(0.975, 4) * stats.sem(each)
    assert np.ptp(row.ci95) == pytest.approx(2 * reach, rel=0.15)
    assert np.ptp(row.ci95) > 2 * np.ptp(share_interval(right))
    moved = each - 1
    oracle = stats.t.interval(0.95, 4, loc=moved.mean(), scale=stats.sem(moved))
    assert row.baseline.difference_ci95 == pytest.approx(oracle)
    assert row.baseline.p_value == pytest.approx(stats.ttest_1samp(moved, 0).pvalue)
    assert row.shape == {"clusters": 5}
    # ten times as many crops of the same five say no more of the next photograph
    more = share_interval(np.repeat(right, 10), np.repeat(clusters, 10))
    assert more == pytest.approx(row.ci95)


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


def test_equal_classifiers_agree_with_an_interval():
    original, _, labels = logits()
    rows = named(classification(original, original.copy(), labels, about=about()))
    assert (rows["top1_agreement"].value, rows["kl"].value) == (1.0, 0.0)
    assert (rows["top1"].baseline.difference, rows["top1"].baseline.p_value) == (0.0, 1.0)
    assert rows["top1"].baseline.difference_ci95[0] < 0


def test_agreement_needs_no_labels():
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
    assert (rows["top1"].value, rows["top5"].value) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_a_graph_that_ends_in_a_softmax_is_read_as_chances():
    original, candidate, labels = logits()
    chances = [np.array([plain.softmax(row) for row in side]) for side in (original, candidate)]
    before = named(classification(original, candidate, labels, about=about()))
    after = named(classification(*chances, labels, about=about()))
    for name, row in before.items():
        assert (after[name].value, after[name].n) == (pytest.approx(row.value, rel=1e-6), row.n)
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


def embeddings(n: int = 40, width: int = 12, noise: float = 0.3, seed: int = 0):
    generator = np.random.default_rng(seed)
    left = generator.normal(size=(n, width)).astype(np.float32)
    right = (left + 0.9 * generator.normal(size=(n, width))).astype(np.float32)
    moved = [(side + noise * generator.normal(size=(n, width))).astype(np.float32) for side in (left, right)]
    return left, right, *moved


def by_name(rows):
    return {row.name.removeprefix("accuracy."): row for row in rows}


@pytest.mark.parametrize("n", [2, 3, 11, 40])
def test_retrieval_is_that_of_the_plain_formulas(n, monkeypatch):
    monkeypatch.setattr(labelled, "_ROWS", 7)
    sides = embeddings(n)
    rows = by_name(retrieval(*sides, about=about(n)))
    assert [name for name in rows if name.startswith("recall")] == [f"recall_at_{k}" for k in (1, 5, 10) if k < n]
    for k in (1, 5, 10):
        if k < n:
            before, after = plain.found(*sides[:2], k), plain.found(*sides[2:], k)
            row = rows[f"recall_at_{k}"]
            assert (row.value, row.baseline.value) == (pytest.approx(np.mean(after)), pytest.approx(np.mean(before)))
            assert row.baseline.difference == pytest.approx(np.mean(after) - np.mean(before))
            assert row.flags == ["ci95-by-pair"]
    for found, value in (
        ([plain.found(*sides[2:], k) for k in range(11)], rows["ndcg_at_10"].value),
        ([plain.found(*sides[:2], k) for k in range(11)], rows["ndcg_at_10"].baseline.value),
    ):
        gains = [(np.mean(found[k]) - np.mean(found[k - 1])) / np.log2(1 + k) for k in range(1, 11)]
        assert value == pytest.approx(sum(gains))
    row = rows["ndcg_at_10"]
    assert row.ci95[0] <= row.value <= row.ci95[1]
    low, high = row.baseline.difference_ci95
    assert low <= row.value - row.baseline.value <= high
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
    rows = by_name(retrieval(left, right, 3 * left, 0.1 * right, about=about()))
    assert (rows["recall_at_1"].baseline.difference, rows["recall_at_1"].baseline.p_value) == (0.0, 1.0)
    assert rows["cosine"].value == pytest.approx(1.0, abs=1e-7)
    assert rows["cosine"].quantiles["p0"] <= 1.0


def test_ties_count_as_misses():
    """A model that has collapsed finds nothing; nor do two texts that are alike."""
    left, right, *_ = embeddings()
    one = np.ones_like(left)
    rows = by_name(retrieval(left, right, one, one, about=about()))
    assert rows["recall_at_10"].value == 0.0
    assert "ties-are-misses" in rows["recall_at_1"].flags
    sure = np.eye(12, dtype=np.float32)
    twice = np.vstack([sure, sure[:1]])
    rows = by_name(retrieval(twice, twice, twice, twice, about=about()))
    assert (rows["recall_at_1"].value, rows["recall_at_5"].value) == (pytest.approx(11 / 13), 1.0)


def test_an_embedding_of_no_length_finds_nothing_and_is_flagged():
    left, right, *_ = embeddings()
    broken = left.copy()
    broken[7] = 0
    rows = by_name(retrieval(left, right, broken, right, about=about()))
    lost = np.array(plain.found(left, right, 5))
    lost[7] = False
    assert (rows["recall_at_5"].value, rows["cosine"].quantiles["p0"]) == (pytest.approx(lost.mean()), 0.0)
    assert all("zero-embeddings" in row.flags for row in rows.values())
    # one that nothing can be found by, either
    rows = by_name(retrieval(left, right, left, np.where(np.arange(40)[:, None] == 7, 0, right), about=about()))
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
def test_embeddings_that_cannot_be_scored_are_one_line(change, kind, code):
    with pytest.raises(kind) as caught:
        retrieval(*change(*embeddings()), about=about())
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_embeddings_of_other_shapes_are_the_callers_mistake():
    left, right, *moved = embeddings()
    with pytest.raises(ValueError, match="got"):
        retrieval(left, right[:5], *moved, about=about())


def outs(n: int = 30, noise: float = 0.02):
    generator = np.random.default_rng(0)
    before = {"boxes": generator.normal(size=(n, 3, 4)), "score": 5 + generator.normal(size=(n,)), "kept": np.arange(n)}
    moved = {k: v if v.dtype.kind == "i" else v + noise * generator.normal(size=v.shape) for k, v in before.items()}
    return before, moved


def test_each_output_of_floats_has_its_rows():
    before, moved = outs()
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
def test_outputs_that_cannot_be_scored_are_one_line(before, after, kind, code):
    with pytest.raises(kind) as caught:
        outputs({"y": before}, {"y": after}, about=about())
    assert caught.value.code == code


def test_sides_that_do_not_fit_are_the_callers_mistake():
    before, moved = outs()
    with pytest.raises(ValueError, match="same outputs"):
        outputs(before, {"boxes": moved["boxes"]}, about=about())


def test_outputs_drawn_together_count_as_one():
    before, moved = ({k: np.repeat(v, 12, axis=0) for k, v in side.items()} for side in outs(10))
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


def about(items: int = 1) -> About:
    return About(
        subject="aa",
        baseline="bb",
        runtime="onnxruntime",
        data=Data(set="made-up", split="eval", sha256="cc", items=items),
        device=Device(id="x", kind="cpu", name="a processor"),
        versions={"onnxruntime": "1"},
        settings={"threads": 2},
    )
