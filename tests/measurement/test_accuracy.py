"""Positions of a text under two models, and two candidates of one original against each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from reference.plain_accuracy import score

from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy import positions as module
from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.accuracy.positions import (
    Accuracy,
    Items,
    against,
    common,
    flipped,
    load_items,
)
from quantkit.measurement.rows import Data, Device
from quantkit.stats.decision import decide

DATA = Data(set="made-up", split="eval", sha256="cc", items=1)
DEVICE = Device(id="x", kind="cpu", name="a processor")


def logits(sequence: int, tokens: int, vocabulary: int, noise: float = 0.5, size: float = 4.0):
    generator = torch.Generator().manual_seed(sequence)
    original = size * torch.randn(tokens, vocabulary, generator=generator)
    candidate = original + noise * torch.randn(tokens, vocabulary, generator=generator)
    return torch.randint(vocabulary, (tokens,), generator=generator), original, candidate


def scored(sequences: int = 10, tokens: int = 17, vocabulary: int = 101, noise: float = 0.5) -> Items:
    accuracy = Accuracy()
    for sequence in range(sequences):
        accuracy.add(*logits(sequence, tokens, vocabulary, noise))
    return accuracy.items()


def rows_of(items: Items) -> dict:
    about = About(subject="aa", baseline="bb", runtime="torch", data=DATA, device=DEVICE, versions={"torch": "2"})
    rows = items.rows(about)
    return {row.name.removeprefix("accuracy."): row for row in rows}


@pytest.mark.parametrize("tokens, vocabulary", [(2, 1), (2, 2), (3, 17), (17, 4095), (3, 300_000)])
@pytest.mark.parametrize("size", [0.1, 4.0, 40.0])
def test_equals_the_plain_formulas(tokens, vocabulary, size):
    ids, original, candidate = logits(1, tokens, vocabulary, size=size)
    accuracy = Accuracy()
    accuracy.add(ids, original, candidate)
    found = accuracy.items()
    oracle = score(ids, original, candidate)
    for name, values in oracle.items():
        # float32 holds a logit of 200 to 8e-6, and a sum over V of positive terms to a few of its last bits
        np.testing.assert_allclose(getattr(found, name), values, atol=1e-6 * max(1, size), rtol=1e-6, err_msg=name)
    assert found.sequence.tolist() == [0] * (tokens - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_widened_before_any_arithmetic(dtype):
    ids, original, candidate = logits(1, 9, 50)
    original, candidate = original.to(dtype), candidate.to(dtype)
    accuracy = Accuracy()
    accuracy.add(ids, original, candidate)
    oracle = score(ids, original.double(), candidate.double())
    for name, values in oracle.items():
        np.testing.assert_allclose(getattr(accuracy.items(), name), values, atol=5e-6, err_msg=name)


def test_equal_logits_have_no_divergence():
    accuracy = Accuracy()
    ids, original, _ = logits(3, 20, 5000)
    accuracy.add(ids, original, original.clone())
    accuracy.add(ids, original, original + 3.0)
    items = accuracy.items()
    assert (items.kl[:19] == 0.0).all()
    assert (items.kl >= 0.0).all()
    assert items.kl.max() < 1e-6
    assert (items.nll_original[:19] == items.nll_candidate[:19]).all()
    assert items.agree.all()
    assert rows_of(items)["top1_agreement"].value == 1.0


def test_small_divergence_is_not_lost_in_rounding():
    # what 8 bits leave, about 1e-5 nats
    ids, original, candidate = logits(1, 60, 20_000, noise=0.005)
    accuracy = Accuracy()
    accuracy.add(ids, original, candidate)
    oracle = score(ids, original, candidate)["kl"]
    assert 1e-6 < oracle.mean() < 1e-4
    assert accuracy.items().kl.mean() == pytest.approx(oracle.mean(), rel=0.01)


def test_inputs_stay_as_they_were():
    given = logits(1, 9, 50)
    before = [tensor.clone() for tensor in given]
    Accuracy().add(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("elements", [1, 7, 50, 51, 149, 1 << 30])
def test_portions_do_not_matter(monkeypatch, elements):
    whole = scored(2, 9, 50)
    monkeypatch.setattr(module, "_ELEMENTS", elements)
    parts = scored(2, 9, 50)
    np.testing.assert_array_equal(parts.kl, whole.kl)
    np.testing.assert_array_equal(parts.nll_candidate, whole.nll_candidate)
    accuracy = Accuracy()
    for sequence in range(2):
        ids, original, candidate = logits(sequence, 9, 50)
        accuracy.add_positions(sequence, ids[1:4], original[:3], candidate[:3])
        accuracy.add_positions(sequence, ids[4:], original[3:-1], candidate[3:-1])
    np.testing.assert_array_equal(accuracy.items().kl, whole.kl)
    np.testing.assert_array_equal(accuracy.items().sequence, whole.sequence)


def test_a_token_that_the_original_rules_out_adds_nothing():
    ids, original, candidate = logits(1, 9, 50)
    ids[:] = 3
    original[:, 7], candidate[:, 7], candidate[2, 7] = -math.inf, -math.inf, 1.0
    accuracy = Accuracy()
    accuracy.add(ids, original, candidate)
    np.testing.assert_allclose(accuracy.items().kl, score(ids, original, candidate)["kl"], atol=5e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_error(value):
    ids, original, candidate = logits(1, 9, 50)
    ids[5] = 7
    candidate[4, 7] = value
    accuracy = Accuracy()
    accuracy.add(*logits(0, 9, 50))
    with pytest.raises(GateError, match=r"sequence 1, position 4.*candidate") as caught:
        accuracy.add(ids, original, candidate)
    assert (caught.value.code, accuracy.items().n) == ("logits-not-finite", 8)
    with pytest.raises(InputError, match="original"):
        accuracy.add(ids, candidate, original)


def test_shapes_that_do_not_fit():
    ids, original, candidate = logits(1, 9, 50)
    for wrong in ((ids[1:], original, candidate), (ids, original[:, 1:], candidate), (ids, original[0], candidate[0])):
        with pytest.raises(ValueError, match="two logits"):
            Accuracy().add(*wrong)


def test_rows_say_what_was_found():
    items = scored()
    rows = rows_of(items)
    assert list(rows) == ["perplexity", "kl", "top1_agreement", "next_word"]
    perplexity = rows["perplexity"]
    assert perplexity.value == pytest.approx(np.exp(items.nll_candidate.mean()), rel=1e-12)
    assert perplexity.baseline.value == pytest.approx(np.exp(items.nll_original.mean()), rel=1e-12)
    assert perplexity.baseline.ratio == pytest.approx(perplexity.baseline.value / perplexity.value, rel=1e-12)
    assert perplexity.baseline.ratio_ci95[0] < perplexity.baseline.ratio < perplexity.baseline.ratio_ci95[1]
    assert rows["kl"].value == pytest.approx(items.kl.mean(), rel=1e-12)
    assert rows["kl"].quantiles["p50"] == np.median(items.kl)
    assert rows["next_word"].value == items.right_candidate.mean()
    assert rows["next_word"].baseline.value == items.right_original.mean()
    for row in rows.values():
        assert row.n == 160
        assert row.ci95[0] <= row.value <= row.ci95[1]
        assert row.flags == ["ci95-by-sequence"]
        assert (row.subject, row.runtime, row.device, row.data) == ("aa", "torch", DEVICE, DATA)


@pytest.mark.parametrize("sequences, clusters, flag", [(10, 10, "sequence"), (8, 8, "sequence"), (3, 9, "block")])
def test_the_interval_of_the_divergence_is_student_s(sequences, clusters, flag):
    items = scored(sequences)
    row = rows_of(items)["kl"]
    labels, unit = items.clusters()
    assert (np.unique(labels).size, unit) == (clusters, flag)
    assert row.flags == [f"ci95-by-{flag}"]
    means = [items.kl[labels == label].mean() for label in np.unique(labels)]
    error = (row.ci95[1] - row.ci95[0]) / 2 / scipy.stats.t.ppf(0.975, clusters - 1)
    assert error == pytest.approx(items.mean(items.kl).standard_error, rel=1e-9)
    if flag == "sequence":
        assert error == pytest.approx(np.std(means, ddof=1) / np.sqrt(clusters), rel=1e-9)


def test_blocks_are_contiguous_and_inside_one_sequence():
    labels, _ = scored(1, 17).clusters()
    assert (labels.tolist(), np.bincount(labels).tolist()) == (sorted(labels), [2] * 8)


def test_a_ruined_model_still_has_a_row():
    accuracy = Accuracy()
    for sequence in range(8):
        ids, original, _ = logits(sequence, 9, 50)
        candidate = torch.zeros_like(original).index_fill_(1, torch.tensor([0]), 5000.0)
        accuracy.add(ids.clamp(min=1), original, candidate)
    row = rows_of(accuracy.items())["perplexity"]
    assert math.isfinite(row.value)
    assert row.value > 1e300


def test_nothing_scored():
    accuracy = Accuracy()
    accuracy.add(*logits(0, 1, 50))
    assert accuracy.items().n == 0
    with pytest.raises(InputError, match="nothing-scored"):
        rows_of(accuracy.items())


def test_items_are_kept(tmp_path):
    items = scored()
    items.save(tmp_path / "items.safetensors")
    again = load_items(tmp_path / "items.safetensors")
    for name in vars(items):
        np.testing.assert_array_equal(getattr(again, name), getattr(items, name))
        assert getattr(again, name).dtype == getattr(items, name).dtype
    (tmp_path / "items.safetensors").write_bytes(b"not that")
    for path in ("items.safetensors", "nowhere.safetensors"):
        with pytest.raises(InputError) as caught:
            load_items(tmp_path / path)
        assert caught.value.code == "items-invalid"


MARGINS = {"accuracy.next_word": 0.01, "accuracy.kl": 0.01, "accuracy.perplexity": 0.01}


def items(seed: int, *, sequences: int = 20, each: int = 250, noise: float = 0.02, worse: float = 0.0) -> Items:
    """As a candidate of one original would have them; `worse` nats are lost at each position, and as many answers."""
    text, own = np.random.default_rng(0), np.random.default_rng([1, seed])
    n = sequences * each
    nll = text.gamma(2.0, 1.7, n)
    right = text.random(n) < 0.45
    flips, lost = own.random(n) < noise / 2, own.random(n) < worse
    found = {
        "sequence": np.repeat(np.arange(sequences, dtype=np.int32), each),
        "nll_original": nll,
        "nll_candidate": nll + worse + own.normal(0, 0.05, n),
        "kl": worse + own.gamma(1.0, 0.02, n),
        "right_original": right,
        "right_candidate": (right ^ flips) & ~lost,
    }
    rest = {name: np.zeros(n) for name in Items.__dataclass_fields__ if name not in found}
    return Items(**found, **rest)


def test_what_is_worse_is_found_in_all_three():
    found = against(items(1), items(2, worse=0.04), MARGINS)
    decided = dict(zip(found, decide(list(found.values())), strict=True))
    assert [each.answer for each in decided.values()] == ["worse"] * 3
    assert decided["accuracy.kl"].effect == pytest.approx(0.04, abs=0.005)
    assert decided["accuracy.perplexity"].effect == pytest.approx(0.04, abs=0.005)
    assert decided["accuracy.next_word"].effect == pytest.approx(0.45 * 0.04, abs=0.008)


def test_another_candidate_as_good_is_the_same():
    found = against(items(1), items(2), MARGINS)
    assert [each.answer for each in decide(list(found.values()))] == ["same"] * 3
    assert list(against(items(1), items(1), {"accuracy.kl": 0.01})) == ["accuracy.kl"]


def test_the_answers_that_flipped():
    before, after = items(1), items(2)
    positions = flipped(before, after)
    assert positions.size == np.sum(before.right_candidate != after.right_candidate) > 0
    assert flipped(before, before).size == 0


def test_other_text_is_refused():
    one = items(1)
    with pytest.raises(InputError, match="items-differ"):
        against(one, items(2, sequences=19), MARGINS)
    with pytest.raises(InputError, match="nats apart"):
        against(one, replace(items(2), nll_original=one.nll_original[::-1]), MARGINS, where="smollm2-135m, int4")
    with pytest.raises(InputError, match="items-differ"):
        against(one, replace(items(2), sequence=one.sequence + 1), MARGINS)
    with pytest.raises(InputError, match="nothing-scored"):
        against(items(1, sequences=0), items(2, sequences=0), MARGINS)


def test_two_that_were_scored_on_more_and_on_less_of_one_text_have_its_beginning_in_common() -> None:
    whole, first = scored(), scored(sequences=4)
    one, other = common(whole, first)
    assert other is first and one.n == first.n
    np.testing.assert_array_equal(one.kl, first.kl)
    assert common(first, whole)[0] is first
    assert against(one, other, {"accuracy.kl": 0.01})["accuracy.kl"].effect == 0
    moved = replace(first, nll_original=first.nll_original + 0.1)
    assert common(whole, moved) == (whole, moved), "another text"
    half = Items(**{name: getattr(whole, name)[:20] for name in module.DTYPES})
    assert common(whole, half) == (whole, half), "no whole sequences"
