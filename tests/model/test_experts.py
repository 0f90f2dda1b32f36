"""Experts as linears: equal to transformers' merged ones, found by structure, with the names that the files have."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import nn
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure import experts, fold
from quantkit.model.structure import traced as structure

NAMES = {
    "mixtral": ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
    "qwen3": ("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
    "qwen2": ("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
    "deepseek": ("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
}


def stream(name: str, folder: Path, **changes: object) -> tuple[nn.Module, StreamedModel]:
    model = zoo.mixture(name, **changes)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model, StreamedModel(open_model(str(folder)))


@pytest.mark.parametrize("name", zoo.MIXTURES)
def test_the_model_computes_what_it_did(name: str, tmp_path: Path) -> None:
    model, streamed = stream(name, tmp_path)
    ids = zoo.ids(2, 20)
    found = streamed.answers(ids).all()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    owner, leaves = NAMES[name]
    for number in range(4):
        files = [streamed.files[f"model.layers.1.mlp.experts.{number}.{leaf}.weight"] for leaf in leaves]
        assert files == [f"model.layers.1.{owner}.{number}.{leaf}.weight" for leaf in leaves]
    block = streamed.load(1)
    (layer,) = experts.found_in(block).values()
    assert experts.prove(layer) < 1e-13


class Twice(nn.Linear):
    """A linear with another result than its weight's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_proof_fails_where_the_linears_are_not_what_was_merged(tmp_path: Path) -> None:
    _, streamed = stream("mixtral", tmp_path)
    block = streamed.load(0)
    experts.demand_equal(block, "model.layers.0")
    (layer,) = experts.found_in(block).values()
    layer.get_submodule("1.w1").__class__ = Twice
    with pytest.raises(InputError, match=r"architecture-unsupported.*differ by"):
        experts.demand_equal(block, "model.layers.0")


class Odd(nn.Module):
    """Experts whose matrices are added up before the product: no linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.zeros(2, 4, 4)) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden_states @ (self.up + self.down)[0]


def test_a_forward_that_is_not_understood_is_left_as_it_is() -> None:
    model = nn.Module()
    model.experts = Odd()
    model.config = SimpleNamespace(num_experts=2)  # type: ignore[assignment]
    experts.split(model, [])
    assert type(model.experts) is Odd
    assert experts.is_merged(model.experts)
    assert not experts.is_merged(nn.Conv1d(2, 2, 3))


def test_a_gate_that_is_a_linear_beside_experts_is_a_router(tmp_path: Path) -> None:
    _, streamed = stream("qwen2", tmp_path)
    assert experts.routers(streamed.skeleton) == {f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)}


def test_a_linear_beside_experts_that_chooses_none_is_no_router(tmp_path: Path) -> None:
    """Projections into and out of a latent space are large, and as good to quantize as any linear."""
    shrink.tiny("NemotronHForCausalLM", tmp_path, moe_latent_size=32)
    skeleton = open_model(str(tmp_path)).skeleton()
    beside = {name for name, _ in skeleton.named_modules() if name.endswith("_latent_proj")}
    assert beside
    assert all(isinstance(skeleton.get_submodule(name), nn.Linear) for name in beside)
    assert not beside & experts.routers(skeleton)


def test_a_linear_with_a_value_for_each_expert_beside_them_is_a_router_whatever_its_name(tmp_path: Path) -> None:
    _, streamed = stream("mixtral", tmp_path)
    mlp = streamed.skeleton.get_submodule("model.layers.0.mlp")
    mlp.chooses, mlp.mixes, mlp.expert_router = nn.Linear(64, 4), nn.Linear(64, 64), nn.Linear(64, 2)
    names = {name.rpartition(".")[2] for name in experts.routers(streamed.skeleton) if ".0.mlp." in name}
    assert {"chooses", "expert_router"} <= names
    assert "mixes" not in names


def test_every_expert_is_traced_with_an_input_of_its_own_and_folds_stay_inside_it(tmp_path: Path) -> None:
    _, streamed = stream("deepseek", tmp_path, n_routed_experts=3, n_group=1)
    ids = zoo.ids(1, 3)  # too few tokens to reach all
    calls = streamed.begin(ids, 1)
    block = streamed.load(1)
    call = calls.call(1)
    with experts.all_running(block):
        traced = structure.trace(block, lambda: call(block))
        folds, declined = fold.find(block, traced, call)
    assert traced.idle == ()
    inside = [group for group in traced.groups if ".experts." in group.name]
    assert [len(group.members) for group in inside] == [2, 1] * 3
    for number in range(3):
        up, down = f"mlp.experts.{number}.up_proj", f"mlp.experts.{number}.down_proj"
        assert folds[down].producer == up
        # the norm before them feeds the router and the other experts too
        assert f"mlp.experts.{number}.gate_proj" in declined
    assert experts.are_apart("mlp.experts.0.up_proj", "mlp.experts.1.down_proj", block)
    assert experts.are_apart("input_layernorm", "mlp.experts.1.down_proj", block)
    assert not experts.are_apart("mlp.experts.1.up_proj", "mlp.experts.1.down_proj", block)
    assert not experts.are_apart("input_layernorm", "mlp.shared_experts.up_proj", block)


def test_a_forced_expert_sees_every_token_and_changes_nothing(tmp_path: Path) -> None:
    _, streamed = stream("mixtral", tmp_path)
    block = streamed.load(0)
    (layer,) = experts.found_in(block).values()
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[0, 1]] * 6), torch.full((6, 2), 0.5)
    seen: list[int] = []
    for number in (0, 3):
        layer.get_submodule(f"{number}.w1").register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    before = layer(x, index, weights)
    assert seen == [6]
    layer.forced = frozenset([3])
    assert torch.equal(layer(x, index, weights), before)
    assert seen == [6, 6, 6]
