"""Bias correction: means of outputs are those before rounding, in running order; what has no bias is left alone."""

from typing import Any

import pytest
import torch
import zoo
from planted_pass import run
from torch import Tensor, nn

from quantkit import Pipeline
from quantkit.errors import InputError
from quantkit.model.structure.traced import weight_of
from quantkit.passes import load_pass
from quantkit.passes.bias_correct import shift

CORRECT, RTN, GPTQ = (load_pass(name) for name in ("bias_correct", "rtn", "gptq"))
FOUR = {"format": "int4", "granularity": "channel", "symmetric": True}
TOKENS = {"format": "int8", "granularity": "token"}


def test_the_shift_is_the_mean_error_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after, x = (torch.randn(*shape, generator=generator) for shape in ((5, 7), (5, 7), (30, 7)))
    lost = torch.stack([before @ row - after @ row for row in x]).mean(0)
    assert torch.allclose(shift(before - after, x.mean(0)), lost, atol=1e-5)


def caught(model: nn.Module, ids: Tensor, names: list[str], what: str) -> dict[str, Tensor]:
    """Inputs or outputs of modules, [tokens, features]."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            found = args[0] if what == "inputs" else output
            kept[name] = found.detach().reshape(-1, found.shape[-1])

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize("name", ["bert", "gpt2", "qwen2"])
@pytest.mark.parametrize("activations", [None, TOKENS])
def test_mean_outputs_are_those_of_the_weights_before_rounding(name: str, activations: dict[str, Any] | None) -> None:
    original, model, ids = zoo.tiny(name), zoo.tiny(name), zoo.ids(6, 20)
    blocks, outcomes = run(model, ids, RTN, CORRECT, weights=FOUR, activations=activations)
    assert all(outcome.changed for outcome in outcomes)
    names = [
        block.full_name(linear)
        for block in blocks
        for linear in block.tensors
        if getattr(block.module.get_submodule(linear), "bias", None) is not None
    ]
    assert len(names) >= 9
    inputs, outputs = caught(model, ids, names, "inputs"), caught(model, ids, names, "outputs")
    for linear in names:
        module = original.get_submodule(linear)
        # what is quantized of the input is not the weight's doing: the hooks of inputs run before ours
        expected = (inputs[linear] @ weight_of(module).T + module.bias).detach().mean(0)  # type: ignore[operator]
        assert torch.allclose(outputs[linear].mean(0), expected, atol=2e-5 * float(expected.abs().max() + 1)), linear
        assert not torch.equal(model.get_submodule(linear).bias, module.bias)  # type: ignore[arg-type]


def test_the_blocks_output_is_the_corrected_one() -> None:
    """In chunks or at once: the next block sees what the corrected block puts out."""
    expected = None
    for chunk in (1 << 30, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.planning.compiling.ACTIVATION_BYTES", chunk)
            model = zoo.tiny("bert")
            run(model, zoo.ids(4, 16), GPTQ, CORRECT, weights=FOUR)
        biases = torch.cat([value.flatten() for key, value in model.named_parameters() if key.endswith("bias")])
        expected = biases if expected is None else expected
        assert torch.allclose(biases, expected, atol=2e-2)


def test_a_model_without_biases_is_left_alone_with_a_reason() -> None:
    pipeline = Pipeline(["rtn", "bias_correct"], weights=FOUR)
    pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 12))
    found = [each for each in pipeline.decisions if each.pass_ == "bias_correct"]
    assert [(each.code, each.where) for each in found] == [
        ("nothing-to-do", f"model.layers.{index}") for index in range(3)
    ]
    assert found[0].reason == "no linear with codes has a bias"
    pipeline = Pipeline(["rtn", "bias_correct"], weights=FOUR)
    pipeline.apply(zoo.tiny("qwen2"), zoo.ids(2, 12))
    reasons = [each.reason for each in pipeline.decisions if each.code == "not-corrected"]
    assert len(reasons) == 3
    assert "self_attn.o_proj" in reasons[0]


def test_it_comes_after_codes() -> None:
    with pytest.raises(InputError, match="pass-order"):
        Pipeline(["bias_correct", "rtn"], weights=FOUR).apply(zoo.tiny("bert"), zoo.ids(2, 12))
