"""Learned rounding through the pipeline: blocks put out less wrong, held-out sequences decide, gptq may come before."""

from typing import Any

import pytest
import torch
import zoo

from quantkit import Pipeline
from quantkit.errors import InputError
from quantkit.model.streaming.stream import LoadedModel

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
# enough steps and text for a tiny model to learn something
LEARN = {"round": {"iterations": 12, "batch": 2, "rate": 0.05}}


def apply(name: str, passes: list[Any], samples: int = 8, **options: Any) -> tuple[Pipeline, torch.nn.Module]:
    pipeline = Pipeline(passes, weights=options.pop("weights", GROUPED), **options)
    return pipeline, pipeline.apply(zoo.tiny(name, num_hidden_layers=1, n_layer=1), zoo.ids(samples, 24))


def left_wrong(name: str, model: torch.nn.Module, rows: slice, samples: int = 8) -> float:
    """The loss of the first block against the original one, on some of the calibration sequences."""
    original = LoadedModel(zoo.tiny(name, num_hidden_layers=1, n_layer=1))
    calls = original.begin(zoo.ids(samples, 24), samples)
    hidden = calls.hidden
    target = calls.run(original.load(0), 0, hidden)[rows]
    output = calls.run(LoadedModel(model).load(0), 0, hidden)[rows]
    return float(((output - target).square().sum(dim=2) / target.square().sum(dim=2)).mean())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_alone_it_beats_rounding_to_nearest_where_it_looked_and_where_it_did_not(name: str) -> None:
    _, nearest = apply(name, ["rtn"])
    pipeline, learned = apply(name, [LEARN])
    assert len(pipeline.tensors) == (4 if name == "gpt2" else 7)
    for rows in (slice(0, 6), slice(6, 8)):
        assert left_wrong(name, learned, rows) < 0.95 * left_wrong(name, nearest, rows)


def test_after_gptq_held_out_sequences_never_do_worse() -> None:
    held = slice(6, 8)
    _, before = apply("llama", ["gptq"])
    _, model = apply("llama", ["gptq", {"round": {**LEARN["round"], "rate": 0.01}}])
    assert left_wrong("llama", model, held) <= left_wrong("llama", before, held) * (1 + 1e-5)
    # steps this wild can only do harm: gptq's own codes are kept, and it is said
    plain, _ = apply("llama", ["gptq"])
    wild, _ = apply("llama", ["gptq", {"round": {"iterations": 2, "rate": 0.5, "scale_rate": 0.2}}])
    assert [each.code for each in wild.decisions] == ["no-better"]
    for name, tensor in plain.tensors.items():
        assert torch.equal(wild.tensors[name].codes, tensor.codes)
        assert torch.equal(wild.tensors[name].scale, tensor.scale)


def test_the_same_seed_learns_the_same_and_another_does_not() -> None:
    first, again, other = (apply("llama", [LEARN], seed=seed)[0].tensors for seed in (0, 0, 1))
    assert all(torch.equal(first[name].codes, again[name].codes) for name in first)
    assert any(not torch.equal(first[name].codes, other[name].codes) for name in first)


def test_one_sequence_leaves_none_to_hold_out() -> None:
    nearest, _ = apply("llama", ["rtn"], samples=1)
    pipeline, _ = apply("llama", [LEARN], samples=1)
    assert [each.reason for each in pipeline.decisions] == ["with one sequence, none can be held out"]
    for name, tensor in nearest.tensors.items():
        assert torch.equal(pipeline.tensors[name].codes, tensor.codes)


def test_folds_and_padding_go_together_with_it() -> None:
    weights = {**GROUPED, "group": 40}
    for passes in (["fold_norms", LEARN], ["fold_norms", "gptq", LEARN]):
        pipeline, model = apply("llama", passes, weights=weights, on_indivisible="pad")
        assert pipeline.tensors["model.layers.0.self_attn.q_proj"].codes.shape == (64, 80)
        assert left_wrong("llama", model, slice(0, 8)) < 0.05


def test_orders_that_make_sense_and_those_that_do_not() -> None:
    for passes in (["round"], ["rtn", "round"], ["gptq", "round"], ["hqq", "round"], ["awq", "gptq", "round"]):
        Pipeline(passes, weights=GROUPED)
    with pytest.raises(InputError, match="exactly one of"):
        Pipeline(["rtn", "gptq", "round"], weights=GROUPED)
    with pytest.raises(InputError, match=r"pass-order|exactly one of"):
        apply("llama", ["round", "gptq"])
