from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items, against, flipped
from quantkit.stats.deciding.decision import decide

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
