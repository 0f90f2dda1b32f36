"""Streamed harms against a whole model in which one unit was replaced by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.formats import load_format
from quantkit.measurement.accuracy.positions import Accuracy
from quantkit.pipeline import Prepared
from quantkit.tuning import harm
from quantkit.tuning.candidates import Choices, choices
from quantkit.tuning.harm import HarmSubject, UnitHarm, kl

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
PROBE = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(4))


def subject(given: Prepared, found: Choices, **changes: Any) -> HarmSubject:
    return replace(
        HarmSubject(
            stream=given.stream,
            steps=given.steps,
            candidates={each.name: each.layers for each in found.candidates if each.scheme is not None},
            calibration=given.calibration.ids if given.calibration else None,
            ids=IDS,
            probe_ids=PROBE,
            widest=96,
            dtype=torch.float32,
        ),
        **changes,
    )


def measured(asked: HarmSubject, start: int = 0) -> list[UnitHarm]:
    return [each for wave in harm.measure(asked, start) for each in wave]


@torch.no_grad()
def by_hand(folder: str, members: tuple[str, ...], candidate: Any) -> float:
    """KL in nats of the whole model with `members` rounded to nearest, by the code that scores bundles."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = model(IDS).logits
    for name in members:
        linear = model.get_submodule(name)
        scheme = candidate.layers[name]
        form = load_format(scheme.format)
        linear.weight.copy_(form.dequantize(form.quantize(linear.weight, scheme)))
    after = model(IDS).logits
    found = Accuracy()
    for i in range(IDS.shape[0]):
        # every position counts, whether or not a token follows
        found.add_positions(i, IDS[i], before[i], after[i])
    return float(found.items().kl.mean())


def test_a_units_harm_is_what_the_whole_model_says(prepared: Callable[..., Prepared], model: Any) -> None:
    given = prepared(passes=[{"rtn": {"range": "minmax"}}])
    found = choices(given, ["int4", "int8"])
    harms = measured(subject(given, found))
    assert (len(harms), [each.block for each in harms]) == (3 * 4 * 2, sorted(each.block for each in harms))
    assert harms[0].members == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    candidates = {each.name: each for each in found.candidates}
    for each in harms[::5]:
        assert each.kl == pytest.approx(by_hand(str(model), each.members, candidates[each.candidate]), rel=1e-3)
        assert not each.scaled
    assert min(each.kl for each in harms) > 0


def test_waves_and_a_later_start_change_nothing(
    prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prepared(passes=["gptq"])
    asked = subject(given, choices(given, ["int4", "int8"]))
    monkeypatch.setattr(harm, "WAVES", 1)
    whole = list(harm.measure(asked))
    assert len(whole) == 1
    monkeypatch.setattr(harm, "STATES", 1)
    parts = list(harm.measure(asked))
    assert ([len(part) for part in parts], [each for part in parts for each in part]) == ([8, 8, 8], whole[0])
    assert measured(asked, start=1) == whole[0][8:]


def test_progress_rises_to_the_end(prepared: Callable[..., Prepared]) -> None:
    given = prepared()
    seen: list[float] = []
    for _ in harm.measure(subject(given, choices(given, ["int4", "int8"])), tell=seen.append):
        pass
    assert (seen, seen[-1]) == (sorted(seen), pytest.approx(1.0))


def test_other_candidates_follow_from_the_anchor_by_their_error(prepared: Callable[..., Prepared]) -> None:
    given = prepared()
    asked = subject(given, choices(given, ["int4", "int8"]))
    exact = {(each.members, each.candidate): each for each in measured(asked)}
    anchored = {(x.members, x.candidate): x for x in measured(replace(asked, anchor="int4 g32"))}
    for (members, name), each in anchored.items():
        assert each.error == pytest.approx(exact[members, name].error, rel=1e-6)
        assert each.scaled == (name == "int8 g32")
        if each.scaled:
            anchor = anchored[members, "int4 g32"]
            assert each.kl == pytest.approx(anchor.kl * each.error / anchor.error)
            # and that is near what measuring it gives
            assert each.kl == pytest.approx(exact[members, name].kl, rel=0.7)
        else:
            assert each.kl == pytest.approx(exact[members, name].kl, rel=1e-6)


def test_a_lossless_anchor_says_nothing_about_the_others(prepared: Callable[..., Prepared]) -> None:
    given = prepared()
    asked = subject(given, choices(given, ["int4", "int8"]), anchor="int8 g32")
    harm_of = measured(asked)
    assert all(each.scaled == (each.candidate == "int4 g32") for each in harm_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harm, "_FAINT", 0.5)  # int8's error is far less than that of int4
        assert not any(each.scaled for each in measured(asked))


def test_folds_before_the_codes_change_no_harm_by_themselves(prepared: Callable[..., Prepared]) -> None:
    folded, plain = prepared(passes=["fold_norms", "rtn"]), prepared(passes=["rtn"])
    first = measured(subject(folded, choices(folded, ["int8", "float"])))
    second = measured(subject(plain, choices(plain, ["int8", "float"])))
    # half a fold would change the output by far more than 8 bits do
    assert [each.members for each in first] == [each.members for each in second]
    assert all(one.kl < 10 * other.kl for one, other in zip(first, second, strict=True))


def test_kl_keeps_its_digits_where_it_is_small() -> None:
    generator = torch.Generator().manual_seed(0)
    original = 5 * torch.randn(4, 1000, generator=generator)
    for size in (1e-3, 1e-1, 1.0):
        changed = original + size * torch.randn(4, 1000, generator=generator) + 0.7
        p, q = original.double().log_softmax(-1), changed.double().log_softmax(-1)
        exact = (p.exp() * (p - q)).sum(-1)
        found = kl(original.softmax(-1), original, changed)
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=1e-10)
