"""Channels centered and evened out: nothing changes before rounding, one fixed scale loses less after it."""

from typing import Any

import pytest
import torch
import zoo
from planted_pass import run
from torch import nn
from zoo import outputs

from quantkit.passes import load_pass
from quantkit.passes.center import moves

CENTER, RTN, GPTQ = (load_pass(name) for name in ("center", "rtn", "gptq"))
EIGHT = {"format": "int8", "granularity": "channel", "scale": "float32"}
FIXED = {"format": "int8", "granularity": "tensor", "dynamic": False}


def spiky(name: str = "bert") -> nn.Module:
    return zoo.spiky(name, 40, 10)


def test_shifts_are_middles_and_scales_roots_of_widths() -> None:
    low, high = torch.tensor([-1.0, 8.0, -2.0, 3.0]), torch.tensor([1.0, 16.0, -1.0, 3.0])
    shift, scale = moves(low, high, 0.5)
    assert shift.tolist() == [0, 12, -1.5, 3]
    assert float(scale[1] / scale[0]) == pytest.approx(2.0)
    assert float(scale.log().mean()) == pytest.approx(0.0, abs=1e-6)
    assert 0 < float(scale[3]) < float(scale[2])  # a constant channel has a scale too
    assert moves(low, high, 0.0)[1].tolist() == [1, 1, 1, 1]
    assert moves(torch.zeros(2), torch.zeros(2), 1.0)[1].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_nothing_changes_before_rounding(name: str) -> None:
    model, ids = spiky(name), zoo.ids(4, 16)
    before = outputs(model, ids)
    blocks, outcomes = run(model, ids, CENTER, weights=EIGHT, activations=FIXED)
    assert all(outcome.changed for outcome in outcomes)
    hooks = [hook for block in blocks for hook in block.inputs.values()]
    assert all(hook.moved is not None for hook in hooks)
    assert any(bool(hook.moved.shift.any()) for hook in hooks if hook.moved) == (name != "llama")  # no biases there
    # work() leaves no hook on: what is not assigned is only moved
    assert float((outputs(model, ids) - before).abs().max()) <= 3e-5 * float(before.abs().max())


def test_one_fixed_scale_loses_less_with_it() -> None:
    ids = zoo.ids(8, 32)
    expected = outputs(spiky(), ids)

    def error(*passes: Any) -> float:
        model = spiky()
        run(model, ids, *passes, weights=EIGHT, activations=FIXED)
        return float((outputs(model, ids) - expected).norm() / expected.norm())

    plain, centered = error(RTN), error(CENTER, RTN)
    assert centered < 0.65 * plain
    assert error(CENTER, GPTQ) < 0.5 * plain


def test_the_drift_of_inputs_is_corrected_where_they_were_moved() -> None:
    ids, made = zoo.ids(8, 32), {}
    expected = outputs(spiky(), ids)
    for correction in (0.0, 1.0):
        model = spiky()
        settings = {"correction": correction, "ridge": 2.0}
        run(model, ids, CENTER, GPTQ, settings=settings, weights=EIGHT, activations=FIXED)
        made[correction] = float((outputs(model, ids) - expected).norm() / expected.norm())
    assert made[1.0] < 1.2 * made[0.0]  # of a stream in other units it would be many times as large


def test_scales_that_come_from_the_values_need_none_of_it() -> None:
    tokens = {"format": "int8", "granularity": "token"}
    _, outcomes = run(spiky(), zoo.ids(4, 16), CENTER, weights=EIGHT, activations=tokens)
    assert [each.code for outcome in outcomes for each in outcome.decisions] == ["nothing-to-do"] * len(outcomes)
