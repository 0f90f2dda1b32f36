"""Rotation of whole models: no output changes before rounding, and where that cannot be had it says why."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quantkit import Pipeline
from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import LoadedModel, StreamedModel
from quantkit.model.structure.traced import InDouble
from quantkit.model.structure.turn import ModelPart, Residual, prove
from quantkit.passes import ModelOutcome, load_pass
from quantkit.passes.solvers import rotate as solver

ROTATE = load_pass("rotate")
EIGHT = {"format": "int8", "granularity": "channel", "scale": "float32"}


def planned(model: nn.Module, seed: int = 0, **settings: Any) -> ModelOutcome:
    found: ModelOutcome = ROTATE.transform(LoadedModel(model), ROTATE.Settings(**settings), seed)
    return found


@torch.no_grad()
def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids)[0].double().log_softmax(-1)
    return found


def divergence(one: Tensor, other: Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma", "phi3", "gpt2"])
def test_a_rotated_model_computes_the_same(name: str) -> None:
    model, ids = zoo.tiny(name), zoo.ids(2, 16)
    outcome = planned(model)
    assert outcome.decisions == []
    assert outcome.transform is not None
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        plain, turned = copy.deepcopy(model).to(dtype), copy.deepcopy(model).to(dtype)
        LoadedModel(turned).apply(outcome.transform)
        if dtype == torch.float64:
            with InDouble():  # type: ignore[no-untyped-call]
                before, after = log_probabilities(plain, ids), log_probabilities(turned, ids)
        else:
            before, after = log_probabilities(plain, ids), log_probabilities(turned, ids)
        assert float((after - before).abs().max()) <= limit * 100
        assert abs(divergence(before, after)) <= limit
        embedding = next(key for key, value in plain.named_parameters() if value.shape[0] == zoo.VOCABULARY)
        assert not torch.allclose(plain.get_parameter(embedding), turned.get_parameter(embedding), atol=0.1)
    assert not any(value.data_ptr() in {x.data_ptr() for x in model.parameters()} for value in turned.parameters())


@pytest.mark.parametrize("settings", [{"matrix": "random"}, {"values": False}])
def test_every_setting_leaves_the_outputs_equal(settings: dict[str, Any]) -> None:
    model, ids = zoo.tiny("llama"), zoo.ids(2, 16)
    outcome = planned(model, **settings)
    turned = copy.deepcopy(model)
    assert outcome.transform is not None
    LoadedModel(turned).apply(outcome.transform)
    assert abs(divergence(log_probabilities(model, ids), log_probabilities(turned, ids))) <= 1e-6
    rows = [each.get_parameter("model.layers.0.self_attn.v_proj.weight").norm(dim=0) for each in (model, turned)]
    heads = turned.get_parameter("model.layers.0.self_attn.o_proj.weight").reshape(64, 4, 16).norm(dim=(0, 1))
    before = model.get_parameter("model.layers.0.self_attn.o_proj.weight").reshape(64, 4, 16).norm(dim=(0, 1))
    assert not torch.allclose(rows[0], rows[1])
    # o's columns are as they were unless the values are turned; its rows are turned either way
    assert torch.allclose(heads, before, rtol=1e-4) is (not settings.get("values", True))


def test_the_seed_decides_the_rotation() -> None:
    weights = []
    for seed in (0, 0, 1):
        model = zoo.tiny("llama")
        outcome = planned(model, seed)
        assert outcome.transform is not None
        LoadedModel(model).apply(outcome.transform)
        weights.append(model.get_parameter("model.layers.1.mlp.up_proj.weight"))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_outliers_are_spread() -> None:
    """A few channels of the stream are much larger than the others, as in real models."""
    model = zoo.tiny("llama")
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[:, 5] = 60.0
    outcome = planned(model)
    assert outcome.transform is not None

    def largest(which: nn.Module) -> float:
        loaded = LoadedModel(which)
        hidden = loaded.begin(zoo.ids(2, 16), 2).hidden
        return float((hidden.abs().amax(-1) / hidden.square().mean(-1).sqrt()).mean())

    before = largest(model)
    LoadedModel(model).apply(outcome.transform)
    assert before > 7
    assert largest(model) < 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "through post_attention_layernorm"),
        ("gemma3", "through post_attention_layernorm"),
        ("bert", "the residual stream itself passes through"),
        ("bloom", "the first block's inputs differ"),  # a norm behind the embedding
    ],
)
def test_what_cannot_be_turned_stays_as_it_is_with_a_reason(name: str, reason: str) -> None:
    outcome = planned(zoo.tiny(name))
    assert (outcome.transform, outcome.unties) == (None, False)
    assert [each.code for each in outcome.decisions] == ["not-rotated"]
    assert reason in outcome.decisions[0].reason


def test_a_model_of_one_block_is_declined() -> None:
    outcome = planned(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert outcome.transform is None
    assert "one block" in outcome.decisions[0].reason


def test_a_model_without_a_head_is_declined() -> None:
    outcome = planned(zoo.tiny("llama").model)  # type: ignore[arg-type]
    assert outcome.transform is None
    assert "no linear reads the last norm" in outcome.decisions[0].reason


def test_a_planted_wrong_rotation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = solver.hadamard_rotation

    def slightly_off(size: int, seed: int) -> solver.Rotation:
        found = right(size, seed)
        factor = found.factors[0].clone()
        factor[0] *= 1 + 1e-7
        return solver.Rotation(found.signs, (factor, *found.factors[1:]))

    monkeypatch.setattr(solver, "hadamard_rotation", slightly_off)
    outcome = planned(zoo.tiny("llama"), values=False)
    assert outcome.transform is None
    assert outcome.decisions[0].reason.startswith("outputs of model.layers.0 differ by")


class OddBlock(nn.Module):
    """Adds what is no turn of the stream, after its block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        found: Tensor = self.block(hidden, **options)
        return found + 0.1 * hidden.abs()


def test_one_block_that_does_not_turn_is_enough() -> None:
    model = zoo.tiny("llama")
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for index in range(3):
        layers[index] = OddBlock(layers[index])
    layers[0].forward = layers[1].forward = None
    for index in range(2):
        layers[index].forward = layers[index].block.forward
    outcome = planned(model)
    assert outcome.transform is None
    assert outcome.decisions[0].reason.startswith("outputs of model.layers.2 differ")


def test_what_was_found_of_another_kind_of_block_holds_for_none_of_these() -> None:
    """Of a dense block there is a `gate_proj` that one with experts lacks."""
    block, rotation = nn.Sequential(nn.Linear(8, 8)).double(), solver.random_rotation(8, 0)
    part = ModelPart(block, block, torch.ones(1, 2, 8, dtype=torch.float64))
    assert prove(part, Residual(writers=("gate_proj",)), rotation) == float("inf")


def test_a_width_without_a_hadamard_matrix_takes_a_product() -> None:
    shape = {"hidden_size": 52, "num_attention_heads": 2, "num_key_value_heads": 1}
    model, ids = zoo.tiny("llama", **shape), zoo.ids(2, 16)
    outcome = planned(model)
    assert [(each.code, each.to) for each in outcome.decisions] == [("not-hadamard", "random")]
    assert "order 52" in outcome.decisions[0].reason
    turned = copy.deepcopy(model)
    assert outcome.transform is not None
    LoadedModel(turned).apply(outcome.transform)
    assert abs(divergence(log_probabilities(model, ids), log_probabilities(turned, ids))) <= 1e-6


def test_in_a_pipeline_it_comes_first_and_unties() -> None:
    model, ids = zoo.tiny("llama-tied"), zoo.ids(4, 16)
    before = log_probabilities(model, ids)
    found = Pipeline(["rotate", "awq", "rtn"], weights=EIGHT).apply(model, ids)
    assert divergence(before, log_probabilities(found, ids)) < 0.01
    head, embedding = found.lm_head.weight, found.model.embed_tokens.weight  # type: ignore[union-attr]
    assert not torch.equal(head, embedding)  # type: ignore[arg-type]
    assert found.config.tie_word_embeddings is False  # type: ignore[union-attr]
    pipeline = Pipeline(["rotate", "rtn"], weights=EIGHT)
    pipeline.apply(zoo.tiny("bert"), ids)
    assert [each.code for each in pipeline.decisions] == ["not-rotated"]
    with pytest.raises(InputError, match="pass-order") as caught:
        Pipeline(["fold_norms", "rotate", "rtn"], weights=EIGHT).apply(zoo.tiny("llama"), ids)
    assert "move rotate to the beginning" in caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "shape", "turns"),
    [
        ("mtp.eh_proj.weight", (64, 128), False),
        ("model.layers.3.eh_proj.weight", (64, 128), False),
        ("model.layers.3.embed_tokens.weight", (zoo.VOCABULARY, 64), False),
        ("score.weight", (2, 64), False),
        ("tower.proj.weight", (48, 32), True),
        ("mtp.hnorm.weight", (64,), True),
    ],
)
def test_a_stream_that_something_beside_the_model_reads_is_left_alone(
    tmp_path: Path, name: str, shape: tuple[int, ...], turns: bool, dtype: torch.dtype
) -> None:
    """A draft head reads the hidden states and embeddings of the model that it lies beside."""
    model = zoo.tiny("llama", num_nextn_predict_layers=1).to(dtype)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape, dtype=dtype)}, file, {"format": "pt"})
    outcome = ROTATE.transform(StreamedModel(open_model(str(tmp_path))), ROTATE.Settings(), 0)
    assert (outcome.transform is not None) is turns
    assert [taken.code for taken in outcome.decisions] == ([] if turns else ["not-rotated"])
    assert turns or name in outcome.decisions[0].reason
