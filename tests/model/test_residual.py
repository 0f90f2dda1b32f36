"""The residual stream: what reads it and writes to it is found, turned exactly, and a wrong turn is seen."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.model.streaming.calls import Call
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure.fold import TOLERANCE
from quantkit.model.structure.residual import Unturnable, find, find_heads, skips
from quantkit.model.structure.traced import InDouble, weight_of
from quantkit.model.structure.turn import Ends, Heads, ModelPart, Residual, prove, turn


class Matrix:
    """A dense matrix in the place of a rotation."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size = matrix.shape[0]

    def apply(self, rows: Tensor, gain: Tensor | None = None) -> Tensor:
        found: Tensor = (rows.double() if gain is None else rows.double() * gain) @ self.matrix
        return found.to(rows.dtype)


def orthogonal(size: int, seed: int = 0, *, keeping_means: bool = False) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    square = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    if keeping_means:
        # turn only what is at right angles to the mean
        basis = torch.linalg.qr(torch.cat([torch.ones(size, 1, dtype=torch.float64), square[:, 1:]], 1))[0]
        inner = torch.eye(size, dtype=torch.float64)
        inner[1:, 1:] = torch.linalg.qr(torch.randn(size - 1, size - 1, generator=generator, dtype=torch.float64))[0]
        square = basis @ inner @ basis.T
    return Matrix(square)


def block_of(name: str, index: int = 0) -> tuple[nn.Module, Call]:
    model = LoadedModel(zoo.tiny(name))
    calls = model.begin(zoo.ids(2, 10), 2)
    return model.load(index), calls.call(index)


WRITERS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
JOINED = {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)}
GPT2 = {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)}


@pytest.mark.parametrize(
    ("name", "norms", "writers", "heads", "form", "centres"),
    [
        ("llama", NORMS, WRITERS, ("self_attn.v_proj", 16), "weight", False),
        ("gemma", NORMS, WRITERS, ("self_attn.v_proj", 16), "one_plus_weight", False),
        ("phi3", JOINED, WRITERS, ("self_attn.qkv_proj", 16), "weight", False),
        ("gpt2", GPT2, ("attn.c_proj", "mlp.c_proj"), ("attn.c_attn", 16), "weight", True),
        ("olmo", NORMS, WRITERS, ("self_attn.v_proj", 16), "none", True),
    ],
)
def test_what_touches_the_stream_is_found_and_turns(
    name: str, norms: dict[str, Any], writers: tuple[str, ...], heads: tuple[str, int], form: str, centres: bool
) -> None:
    block, call = block_of(name)
    before = {key: value.clone() for key, value in block.named_parameters()}
    found = find(ModelPart.of_block(block, call))
    assert {norm.name: norm.readers for norm in found.norms} == norms
    assert {norm.form for norm in found.norms} == {form}
    assert found.centres is centres
    assert found.writers == writers
    paths = find_heads(block, call, found.writers, orthogonal)
    assert [(path.producer, path.size) for path in paths] == [heads], "gate times up is no value path"
    found = replace(found, heads=paths)
    rotation = orthogonal(64, keeping_means=centres)
    assert prove(ModelPart.of_block(block, call), found, rotation, orthogonal) <= TOLERANCE
    if centres:
        assert prove(ModelPart.of_block(block, call), found, orthogonal(64), orthogonal) > 1e-3
    assert all(torch.equal(value, before[key]) for key, value in block.named_parameters()), "a copy was turned"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "self_attn.o_proj reaches the residual stream through post_attention_layernorm"),
        ("gemma3", "self_attn.o_proj reaches the residual stream through post_attention_layernorm"),
        ("bert", "the residual stream itself passes through output.LayerNorm"),
    ],
)
def test_norms_behind_linears_do_not_turn(name: str, reason: str) -> None:
    with pytest.raises(Unturnable, match=reason):
        find(ModelPart.of_block(*block_of(name)))


class Gated(nn.Module):
    """A block with a branch that no token takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.used, self.idle = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.used(self.norm(hidden))
        return out


def test_what_never_ran_is_not_guessed() -> None:
    with pytest.raises(Unturnable, match="no token reached idle"):
        find(ModelPart.of_block(Gated(), Call(torch.randn(2, 3, 8))))


def test_a_bias_behind_a_weight_of_zero_is_not_divided() -> None:
    block = Gated()
    del block.idle
    found = find(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))))
    assert (found.norms[0].readers, found.writers) == (("used",), ("used",))
    assert (
        prove(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))), found, orthogonal(8, keeping_means=True)) < 1e-12
    )
    with torch.no_grad():
        block.norm.weight[2] = 0
    with pytest.raises(Unturnable, match="too close to zero"):
        find(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))))


class Routed(nn.Module):
    """Each expert is given some rows of what the norm returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).reshape(-1, 8)
        return hidden + torch.cat([self.first(rows[::2]), self.second(rows[1::2])]).reshape(hidden.shape)


def test_rows_that_are_handed_on_are_followed() -> None:
    block = Routed()
    with torch.no_grad():
        block.norm.weight[2] = 0  # without a bias, nothing is divided by it
    found = find(ModelPart.of_block(block, Call(torch.randn(2, 4, 8))))
    assert found.norms[0].readers == ("first", "second")


def test_a_turned_block_is_the_plain_product_of_matrices() -> None:
    block, call = block_of("llama")
    found, rotation = find(ModelPart.of_block(block, call)), orthogonal(64)
    plain = {
        name: weight_of(module).double() for name, module in block.named_modules() if isinstance(module, nn.Linear)
    }
    gain = block.get_parameter("input_layernorm.weight").double()
    turn(block, found, rotation)
    for name, expected in (
        ("self_attn.q_proj", plain["self_attn.q_proj"] @ torch.diag(gain) @ rotation.matrix),
        ("self_attn.o_proj", rotation.matrix.T @ plain["self_attn.o_proj"]),
    ):
        assert torch.allclose(weight_of(block.get_submodule(name)).double(), expected, atol=1e-6)
    assert bool((block.get_parameter("input_layernorm.weight") == 1).all())


def test_a_planted_wrong_turn_is_seen() -> None:
    block, call = block_of("qwen2")
    found = find(ModelPart.of_block(block, call))
    found = replace(found, heads=find_heads(block, call, found.writers, orthogonal))
    right = orthogonal(64)

    def error(planted: Residual = found, rotation: Matrix = right, heads=orthogonal) -> float:  # type: ignore[no-untyped-def]
        return prove(ModelPart.of_block(block, call), planted, rotation, heads)

    assert error() <= TOLERANCE
    stretched = right.matrix.clone()
    stretched[:, 3] *= 1 + 1e-6
    assert error(rotation=Matrix(stretched)) > TOLERANCE
    assert error(replace(found, writers=found.writers[:1])) > 1e-3
    first = found.norms[0]
    assert error(replace(found, norms=(replace(first, readers=first.readers[:2]), *found.norms[1:]))) > 1e-3
    assert error(replace(found, norms=(replace(first, form="one_plus_weight"), *found.norms[1:]))) > 1e-3
    gated = Heads("mlp.up_proj", ("mlp.down_proj",), torch.arange(96), 2)  # channels are multiplied by others
    assert error(replace(found, heads=(gated,))) > 1e-3
    assert error(heads=lambda size: Matrix(2 * orthogonal(size).matrix)) > 1e-3


def test_heads_turn_values_and_their_readers_in_place() -> None:
    block, call = block_of("qwen2")
    before = copy.deepcopy(block)
    path = find_heads(block, call, ("self_attn.o_proj",), orthogonal)
    assert [each.consumers for each in path] == [("self_attn.o_proj",)]
    turn(block, Residual(heads=path), orthogonal(64), orthogonal)
    matrix = orthogonal(16).matrix
    for name in ("weight", "bias"):
        old = before.get_parameter(f"self_attn.v_proj.{name}").double().reshape(2, 16, -1)
        new = block.get_parameter(f"self_attn.v_proj.{name}").double().reshape(2, 16, -1)
        assert torch.allclose(new, matrix.T @ old, atol=1e-6)
    old, new = (each.get_parameter("self_attn.o_proj.weight").double().reshape(64, 4, 16) for each in (before, block))
    assert torch.allclose(new, old @ matrix, atol=1e-6)
    assert isinstance(path[0], Heads)


SKIPS = {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"}


def skips_of(name: str, index: int = 1) -> dict[str, str]:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(2, 12), 2)
    return dict(skips(loaded.load(index), lambda block: calls.run(block, index, calls.hidden)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", SKIPS),
        ("qwen3", SKIPS),
        ("phi3", SKIPS),
        ("gpt2", {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"}),
        ("opt", {"self_attn.out_proj": "self_attn_layer_norm", "fc2": "final_layer_norm"}),
        ("bert", {"attention.output.dense": "attention.self.query", "output.dense": "intermediate.dense"}),
        # norms come between the linears and the sums
        ("gemma2", {}),
    ],
)
def test_what_outputs_are_added_to(name: str, expected: dict[str, str]) -> None:
    assert skips_of(name) == expected


class Summed(nn.Module):
    """`x + scale * linear(norm(x))`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.scale * self.linear(self.norm(x))
        return found


@pytest.mark.parametrize(("scale", "expected"), [(1.0, {"linear": "norm"}), (0.9999, {}), (0.0, {})])
def test_a_sum_is_exact_or_none(scale: float, expected: dict[str, str]) -> None:
    block, x = Summed(scale), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert skips(block, lambda module: module(x)) == expected
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in block.modules()), "hooks are gone"


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


def test_experts_cost_by_their_number() -> None:
    class Experts(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.norm, self.linears = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + torch.stack([linear(y * (1 + number)) for number, linear in enumerate(self.linears)]).sum(0)

    counts = []
    for count in (16, 64):
        with Counting() as mode:
            assert skips(Experts(count), lambda module: module(torch.ones(2, 5, 8).cumsum(-1))) == {}
        counts.append(mode.count)
    assert counts[1] < 8 * counts[0], "four times as many; by pairs of pairs 64 times as much"


def test_inputs_that_are_written_to_are_told_apart() -> None:
    class InPlace(Summed):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.norm(x))
            return x.mul_(2.0) + y  # no longer what the norm read

    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert skips(InPlace(1.0), lambda module: module(x.clone())) == {}


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt"])
def test_few_rows_give_the_numbers_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.model.structure.turn.ROWS", 40)
    model = zoo.tiny(name)
    ids = zoo.ids(2, 12) % 40
    found = Ends(LoadedModel(model), ids)
    assert max(value.shape[0] for value in found.model.parameters() if value.dim() == 2) <= 66
    start, given = found.start()
    expected = LoadedModel(model).begin(ids, 2).hidden
    assert start.dtype == torch.float64
    assert torch.allclose(start.float(), expected, atol=1e-5)
    assert all(isinstance(each, torch.Tensor) for each in given)
    with torch.no_grad(), InDouble():  # type: ignore[no-untyped-call]
        whole = model.double()(input_ids=ids, output_hidden_states=True)
        loaded = LoadedModel(model)
        calls = loaded.begin(ids, 2)
        hidden = calls.hidden
        for index in range(len(loaded.block_names)):
            hidden = calls.run(loaded.load(index), index, hidden)
        assert torch.allclose(found.finish(hidden), whole.logits[..., :40], atol=1e-9)
    # the model itself still has all of its rows, and its blocks
    assert model.get_input_embeddings().weight.shape[0] == zoo.VOCABULARY  # type: ignore[operator]


def test_tables_of_the_streams_width_are_named() -> None:
    found = Ends(LoadedModel(zoo.tiny("gpt2")), zoo.ids(2, 12))
    assert found.embeddings(64) == ("transformer.wte", "transformer.wpe")
    assert found.embeddings(32) == ()
