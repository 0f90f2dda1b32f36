"""The judge finds what is planted, and tiny models show every part of themselves."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from quantkit.errors import InputError
from quantkit.model.streaming.stream import StreamedModel
from zoo import judge, shrink
from zoo.exceptions import LEFT_OUT

LLAMA = shrink.Architecture("AutoModelForCausalLM", "llama", "LlamaForCausalLM")


def test_every_class_of_the_auto_tables_is_there() -> None:
    """By name; to list the architectures imports every class of transformers, which the campaign does and no test."""
    names = {name for _, _, name in shrink.entries()}
    assert names >= {name for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    assert names >= set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    assert {"MPNetModel", "ModernBertModel", "T5EncoderModel"} <= names
    assert set(LEFT_OUT) <= names
    variant = shrink.named("LlamaForCausalLM (tied)")
    assert (variant.table, variant.cls, variant.variant) == ("AutoModelForCausalLM", "LlamaForCausalLM", "tied")
    with pytest.raises(StopIteration):
        shrink.named("Mamba2Model")  # what is below a decoder's head is no case of its own


def test_a_weight_that_is_one_per_cent_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StreamedModel.load

    def loads(self: StreamedModel, index: int) -> nn.Module:
        block = load(self, index)
        if index == 1:
            block.get_parameter("mlp.up_proj.weight").mul_(1.01)
        return block

    monkeypatch.setattr(StreamedModel, "load", loads)
    found = judge.float_stream(LLAMA)
    assert (found.verdict, found.code) == ("WRONG", "stream")


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [(InputError("no-such", value="a reason"), "refused", "no-such"), (KeyError("x"), "CRASH", "KeyError")],
)
def test_an_error_of_the_user_is_a_refusal_and_any_other_is_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str, code: str
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(StreamedModel, "answers", raises)
    found = judge.float_stream(LLAMA)
    assert (found.verdict, found.code) == (verdict, code)


def test_a_figure_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = judge.figures
    monkeypatch.setattr(judge, "figures", lambda rows: {**figures(rows), "kl": 1.01 * figures(rows)["kl"]})
    found = judge.whole_compile(LLAMA)
    assert (found.verdict, found.code) == ("WRONG", "kl")


@pytest.mark.parametrize(
    "name", ["Cohere2ForCausalLM", "FalconH1ForCausalLM", "Gemma3ForCausalLM", "JetMoeForCausalLM", "Mamba2ForCausalLM"]
)
def test_every_weight_of_a_tiny_model_is_seen(name: str) -> None:
    """The answer changes visibly with each: by the gradient of a random mixture of its logits."""
    model = shrink.tiny(name)
    answer = model(input_ids=shrink.ids(2), use_cache=False).logits
    (answer * torch.randn(answer.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    spread = float(answer.detach().std()) * answer.numel() ** 0.5
    for path, value in model.named_parameters():
        assert value.grad is not None, path
        assert float(value.grad.norm() * value.detach().std()) > 1e-3 * spread, path


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Gemma3ForCausalLM", {"sliding_attention", "full_attention"}),
        ("Qwen3NextForCausalLM", {"linear_attention", "full_attention"}),
        ("JambaForCausalLM", {"mamba", "attention"}),
    ],
)
def test_every_kind_of_layer_is_there(name: str, kinds: set[str]) -> None:
    config = shrink.config_of(shrink.named(name))
    assert set(getattr(config, "layers_block_type", None) or config.layer_types) == kinds
    assert 3 <= config.num_hidden_layers <= 8


def test_a_tiny_model_is_the_same_each_time_and_loads_as_it_was(tmp_path: Path) -> None:
    made = [shrink.tiny("Qwen2MoeForCausalLM", tmp_path) for _ in range(2)]
    answers = [shrink.answer(model, shrink.ids()) for model in [*made, shrink.loaded(tmp_path)]]
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    assert isinstance(made[0], transformers.Qwen2MoeForCausalLM)
