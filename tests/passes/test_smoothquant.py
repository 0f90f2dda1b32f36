"""SmoothQuant in a block: exact before rounding, better after it where activations are rounded too."""

from typing import Any

import pytest
import torch
import zoo
from planted_pass import run
from torch import Tensor, nn
from zoo import outputs

from quantkit.passes import load_pass

SMOOTH, RTN = (load_pass(name) for name in ("smoothquant", "rtn"))
EIGHT = {"format": "int8", "granularity": "channel", "scale": "float32"}
TOKENS = {"format": "int8", "granularity": "token"}


def spiky(name: str) -> nn.Module:
    return zoo.spiky(name, 40, 10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bert"])
@pytest.mark.parametrize("settings", [{}, {"alpha": "search", "grid": 3}])
def test_scales_change_no_output_before_rounding(name: str, settings: dict[str, Any]) -> None:
    model, ids = spiky(name), zoo.ids(4, 16)
    before = outputs(model, ids)
    weights = {key: value.clone() for key, value in model.named_parameters()}
    blocks, outcomes = run(model, ids, SMOOTH, settings=settings, weights=EIGHT)
    assert any(outcome.changed for outcome in outcomes)
    assert any(not torch.equal(value, weights[key]) for key, value in model.named_parameters())
    assert float((outputs(model, ids) - before).abs().max()) <= 3e-5 * float(before.abs().max())
    assert not blocks[0].tensors, "codes are assigned by the pass that follows"


def test_an_input_is_evened_out_and_its_weights_are_widened() -> None:
    model, ids = spiky("llama"), zoo.ids(4, 16)
    reach: dict[str, list[Tensor]] = {"before": [], "after": []}
    place: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    for when in ("before", "after"):
        if when == "after":
            run(model, ids, SMOOTH, weights=EIGHT)
        hook = place.register_forward_pre_hook(
            lambda _, args, kept=reach[when]: kept.append(args[0].abs().amax(dim=(0, 1)))
        )
        outputs(model, ids)
        hook.remove()
    spread = {when: float(found[0].max() / found[0].median()) for when, found in reach.items()}
    assert spread["after"] < spread["before"] / 2


def test_eight_bits_lose_less_with_it() -> None:
    ids = zoo.ids(8, 32)
    expected = outputs(spiky("llama"), ids)
    error = {}
    for name, passes, settings in (
        ("plain", (RTN,), {"range": "minmax"}),
        ("half", (SMOOTH, RTN), {"range": "minmax"}),
    ):
        model = spiky("llama")
        run(model, ids, *passes, settings=settings, weights=EIGHT, activations=TOKENS)
        error[name] = float((outputs(model, ids) - expected).square().mean())
    assert error["half"] < 0.7 * error["plain"]


def test_where_it_does_nothing_it_says_why() -> None:
    _, outcomes = run(zoo.tiny("llama"), zoo.ids(2, 12), SMOOTH, settings={"through": "norms"}, weights=EIGHT)
    for index, outcome in enumerate(outcomes):
        reasons = {each.where.removeprefix(f"model.layers.{index}."): each.reason for each in outcome.decisions}
        assert reasons == dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "a linear produces it")
        assert {each.code for each in outcome.decisions} == {"not-smoothed"}
        assert outcome.changed
    _, outcomes = run(zoo.tiny("bert"), zoo.ids(2, 12), SMOOTH, weights=EIGHT)
    assert "own input" in outcomes[0].decisions[0].reason
