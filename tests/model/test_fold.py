"""Folds: found as every architecture has them, exact when applied, and rejected when they are wrong."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional
from zoo import shrink

from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import Call, Given, primary
from quantkit.model.streaming.stream import LoadedModel, StreamedModel
from quantkit.model.structure import fold
from quantkit.model.structure.fold import TOLERANCE, Fold
from quantkit.model.structure.traced import Computed, SharedInput, Structure, trace

_IDENTITY = list(range(64))
# two heads of queries share one head of keys and values: [4, 16] inputs come from [2, 16] channels
_GROUPED = [*range(16), *range(16), *range(16, 32), *range(16, 32)]
_LLAMA = {
    "self_attn.q_proj": ("input_layernorm", "weight", _IDENTITY, 64),
    "self_attn.o_proj": ("self_attn.v_proj", "linear", _GROUPED, 32),
    "mlp.gate_proj": ("post_attention_layernorm", "weight", _IDENTITY, 64),
    "mlp.down_proj": ("mlp.up_proj", "linear", list(range(96)), 96),
}
_GEMMA = {
    **_LLAMA,
    "self_attn.q_proj": ("input_layernorm", "one_plus_weight", _IDENTITY, 64),
    "mlp.gate_proj": ("pre_feedforward_layernorm", "one_plus_weight", _IDENTITY, 64),
}
# group -> producer, form, index, channels
EXPECTED = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {
        "self_attn.qkv_proj": ("input_layernorm", "weight", _IDENTITY, 64),
        "self_attn.o_proj": ("self_attn.qkv_proj", "linear", [96 + channel for channel in _GROUPED], 128),
        "mlp.gate_up_proj": ("post_attention_layernorm", "weight", _IDENTITY, 64),
        "mlp.down_proj": ("mlp.gate_up_proj", "linear", list(range(96, 192)), 192),
    },
    "gpt2": {
        "attn.c_attn": ("ln_1", "weight", _IDENTITY, 64),
        "attn.c_proj": ("attn.c_attn", "linear", list(range(128, 192)), 192),
        "mlp.c_fc": ("ln_2", "weight", _IDENTITY, 64),
    },
    "opt": {
        "self_attn.q_proj": ("self_attn_layer_norm", "weight", _IDENTITY, 64),
        "self_attn.out_proj": ("self_attn.v_proj", "linear", _IDENTITY, 64),
        "fc1": ("final_layer_norm", "weight", _IDENTITY, 64),
        "fc2": ("fc1", "linear", list(range(96)), 96),
    },
    "bert": {"attention.output.dense": ("attention.self.value", "linear", _IDENTITY, 64)},
}
DECLINED = {
    "gpt2": {"mlp.c_proj": "no producer's channels reach it unmixed"},  # GELU
    "bert": {
        "attention.self.query": "its input is the block's own input",
        "intermediate.dense": "after folding into attention.output.LayerNorm",  # the residual reads it as well
        "output.dense": "no producer's channels reach it unmixed",  # GELU
    },
}


def traced(block: nn.Module, call: Call) -> Structure:
    return trace(block, lambda: call(block))


def block_of(name: str, index: int = 1) -> tuple[nn.Module, Structure, Call]:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(2, 12), 2)
    block = loaded.load(index)
    call = calls.call(index)
    return block, traced(block, call), call


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, Structure, Call, dict[str, Fold]]:
    block, structure, call = block_of("llama")
    return block, structure, call, fold.find(block, structure, call)[0]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_folds_of_every_architecture(name: str) -> None:
    block, structure, call = block_of(name)
    before = copy.deepcopy(block.state_dict())
    folds, declined = fold.find(block, structure, call)
    found = {group: (each.producer, each.form, each.index.tolist(), each.channels) for group, each in folds.items()}
    assert found == EXPECTED.get(name, _LLAMA)
    reasons = DECLINED.get(name, {})
    assert declined.keys() == reasons.keys()
    for group, reason in reasons.items():
        assert reason in declined[group]
    for group, each in folds.items():
        assert each.group == group
        assert fold.prove(block, structure, each, call) <= TOLERANCE
    assert fold.prove_all(block, structure, folds, call, seed=3) <= TOLERANCE
    assert fold.prove_all(block, structure, folds, call, whatever_weights=True) <= TOLERANCE
    # finding and proving work on copies
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_applied_with_random_scales_a_model_stays_what_it_was(name: str) -> None:
    model = zoo.tiny(name)
    ids = zoo.ids(3, 16, seed=4)
    with torch.no_grad():
        before = model(input_ids=ids)[0]
    loaded = LoadedModel(model)
    calls = loaded.begin(zoo.ids(2, 12), 2)
    block, call = loaded.load(1), calls.call(1)
    structure = traced(block, call)
    folds, _ = fold.find(block, structure, call)
    generator = torch.Generator().manual_seed(0)
    for group in structure.groups:
        if group.name not in folds:
            continue
        each = folds[group.name]
        scales = torch.exp2(torch.rand(each.channels, generator=generator) * 4 - 2)
        weight = block.get_submodule(each.producer).weight.clone()
        applied = fold.apply(block, each, group, scales[each.index])
        assert not torch.equal(block.get_submodule(each.producer).weight, weight)
        assert torch.equal(applied, scales[each.index])
    with torch.no_grad():
        after = model(input_ids=ids)[0]
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max())


@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("gemma3", 1.0), ("opt", 0.0)])
def test_a_norm_folded_into_bfloat16_is_exact_as_stored(name: str, offset: float) -> None:
    """Scales are adapted to what the norm's rounded weight can absorb, so that nothing is lost when it is stored."""
    block, structure, call = block_of(name)
    folds, _ = fold.find(block, structure, call)
    before = copy.deepcopy(block).double()
    for group in structure.groups:
        each = folds[group.name]
        if each.form == "linear":
            continue
        wanted = torch.exp2(torch.rand(each.channels, generator=torch.Generator().manual_seed(1)) * 4 - 2)
        old = block.get_submodule(each.producer).weight.double()
        applied = fold.apply(block, each, group, wanted, torch.bfloat16)
        new = block.get_submodule(each.producer).weight
        assert torch.equal(new, new.to(torch.bfloat16).float())
        assert torch.allclose(applied.double(), (old + offset) / (new.double() + offset), rtol=1e-6)
        # close to what was asked for: a bfloat16 holds 8 bits
        assert float((applied / wanted - 1).abs().max()) < 0.05
    with fold.InDouble():  # type: ignore[no-untyped-call]
        exact, found = call.double()(before), call.double()(copy.deepcopy(block).double())
    # what is left is float32's rounding of the consumers' weights
    assert fold.disagreement(exact, found) < 1e-6


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("self_attn.o_proj", {"index": torch.tensor(_GROUPED).roll(1)}),
        ("self_attn.o_proj", {"index": torch.arange(64) % 32}),  # heads repeated in the other order
        ("self_attn.o_proj", {"producer": "self_attn.k_proj"}),
        ("mlp.down_proj", {"index": torch.arange(96).flip(0)}),
        ("mlp.down_proj", {"producer": "mlp.gate_proj"}),  # the wrong side of SiLU
        ("mlp.gate_proj", {"producer": "input_layernorm"}),
        ("mlp.gate_proj", {"form": "one_plus_weight"}),
        ("self_attn.q_proj", {"form": "one_plus_weight"}),
        ("self_attn.q_proj", {"index": torch.arange(64).roll(1)}),
        ("self_attn.q_proj", {"index": torch.arange(32), "channels": 64}),  # another width
        ("self_attn.q_proj", {"group": "self_attn.x_proj"}),  # no such shared input
    ],
)
def test_a_planted_wrong_fold_is_rejected(
    llama: tuple[nn.Module, Structure, Call, dict[str, Fold]], group: str, changes: dict[str, object]
) -> None:
    block, structure, call, folds = llama
    planted = replace(folds[group], **changes)  # type: ignore[arg-type]
    assert fold.prove(block, structure, planted, call) > 1e-3
    # among right ones as well
    assert fold.prove_all(block, structure, {**folds, planted.group: planted}, call) > 1e-3
    assert fold.prove_all(block, structure, folds, call) <= TOLERANCE


def test_folds_beside_experts_that_run_together_are_proved_in_double() -> None:
    """torch's product of groups has no float64: GPT-OSS, whose experts are not taken apart."""
    model = shrink.tiny("GptOssForCausalLM")
    assert model.config._experts_implementation == "grouped_mm"  # type: ignore[union-attr]
    loaded = LoadedModel(model)
    calls = loaded.begin(shrink.ids(2, 12), 2)
    block, call = loaded.load(0), calls.call(0)
    structure = traced(block, call)
    folds, _ = fold.find(block, structure, call)
    assert "self_attn.q_proj" in folds
    assert fold.prove_all(block, structure, folds, call) <= TOLERANCE
    exact = call.double()
    with fold.InDouble():  # type: ignore[no-untyped-call]
        together = exact(copy.deepcopy(block).double())
        model.set_experts_implementation("eager")  # type: ignore[operator]
        alone = exact(copy.deepcopy(block).double())
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_a_fold_that_holds_for_these_weights_alone_is_told_apart() -> None:
    """A linear without weights may be given any channels; with others it may not."""
    block, structure, call = block_of("llama", 0)
    folds, _ = fold.find(block, structure, call)
    with torch.no_grad():
        block.mlp.down_proj.weight.zero_()  # type: ignore[operator, union-attr]
    wrong = {"mlp.down_proj": replace(folds["mlp.down_proj"], producer="mlp.gate_proj")}
    assert fold.prove_all(block, structure, wrong, call) <= TOLERANCE
    assert fold.prove_all(block, structure, wrong, call, whatever_weights=True) > 1e-3


def test_blocks_compute_the_same_only_if_every_operator_and_number_is_the_same() -> None:
    def computed(change: Callable[[nn.Module], object], index: int = 1) -> list[object]:
        block, _, call = block_of("llama", index)
        change(block)
        seen = Computed(dict(block.named_parameters()), (call.hidden, *call.rest.leaves()))
        with torch.no_grad(), seen:
            seen.gives(call(block))
        return seen.steps

    def swapped(block: nn.Module) -> None:
        mlp = block.mlp
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj  # type: ignore[union-attr]
        mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))  # type: ignore[union-attr, operator]

    def scaled(block: nn.Module) -> None:
        block.mlp.act_fn = Scaled()  # type: ignore[union-attr]

    same = computed(lambda block: None)
    assert same == computed(lambda block: None, 2)
    assert same != computed(lambda block: setattr(block.input_layernorm, "variance_epsilon", 2e-6))
    assert same != computed(lambda block: setattr(block.mlp, "act_fn", nn.GELU()))
    assert same != computed(swapped)

    class Scaled(nn.Module):
        scale = torch.ones(())  # a tensor that nobody has named

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert computed(scaled) != computed(scaled)


def test_the_weaker_form_of_a_gemma_norm_is_rejected() -> None:
    block, structure, call = block_of("gemma3")
    folds, _ = fold.find(block, structure, call)
    planted = replace(folds["self_attn.q_proj"], form="weight")
    assert fold.prove(block, structure, planted, call) > 1e-3


def test_a_fold_that_forgets_one_member_is_rejected(llama: tuple[nn.Module, Structure, Call, dict[str, Fold]]) -> None:
    block, structure, call, folds = llama
    fewer = tuple(SharedInput(group.members[:-1] or group.members, group.features) for group in structure.groups)
    assert fold.prove(block, replace(structure, groups=fewer), folds["self_attn.q_proj"], call) > 1e-3


SHUFFLED = [3, 1, 0, 2, 4, 5, 6, 7, 11, 10, 9, 8]


class Planted(nn.Module):
    """A norm and two linears, wired in ways that allow a fold or only seem to."""

    def __init__(self, wiring: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wiring = wiring
        self.norm = nn.LayerNorm(8)
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.other = nn.Linear(12, 8)
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(8) * 0.3)
            self.norm.bias.add_(torch.randn(8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        up, gate = self.up(normed), self.gate(normed)
        if self.wiring == "gated":
            return x + self.down(functional.silu(gate) * up)
        if self.wiring == "relu":
            return x + self.down(functional.relu(up)) + gate[..., :8]
        if self.wiring == "leaky":
            return x + self.down(functional.leaky_relu(up)) + gate[..., :8]
        if self.wiring == "second consumer":
            return x + self.down(up) + self.other(up * 1.0) + gate[..., :8]
        if self.wiring == "norm read twice":
            return normed + self.down(functional.silu(gate) * up)
        if self.wiring == "added":
            return x + self.down(gate + up)
        if self.wiring == "softmaxed":
            return x + self.down(torch.softmax(up, -1)) + gate[..., :8]
        if self.wiring == "shuffled":
            return x + self.down(up[..., SHUFFLED]) + gate[..., :8]
        assert self.wiring == "repeated"
        return x + self.down(up[..., 8:].repeat(1, 1, 3)) + gate[..., :8]


@pytest.mark.parametrize(
    ("wiring", "found"),
    [
        ("gated", {"up": "norm", "down": "up"}),
        ("relu", {"up": "norm", "down": "up"}),
        ("leaky", {"up": "norm", "down": "up"}),
        ("second consumer", {"up": "norm"}),
        ("norm read twice", {"down": "up"}),
        ("added", {"up": "norm"}),
        ("softmaxed", {"up": "norm"}),
        ("shuffled", {"up": "norm", "down": "up"}),
        ("repeated", {"up": "norm", "down": "up"}),
    ],
)
def test_only_what_holds_is_found(wiring: str, found: dict[str, str]) -> None:
    block = Planted(wiring)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    call = Call(x)
    structure = traced(block, call)
    folds, declined = fold.find(block, structure, call)
    assert {group: each.producer for group, each in folds.items()} == found
    index = {"shuffled": SHUFFLED, "repeated": [8, 9, 10, 11] * 3}.get(wiring, list(range(12)))
    if "down" in folds:
        assert folds["down"].index.tolist() == index
    if wiring == "second consumer":
        assert declined["down"].startswith("the outputs would differ by")
        assert declined["down"].endswith("after folding into up")
    if wiring == "norm read twice":
        assert declined["up"].endswith("after folding into norm")
    assert {*folds, *declined} == {group.name for group in structure.groups}
    assert fold.prove_all(block, structure, folds, call) <= TOLERANCE


def test_dead_channels_may_only_be_the_identity() -> None:
    """A ReLU that never fires on the probe says nothing of where its channel comes from."""
    block = Planted("relu")
    with torch.no_grad():
        block.up.bias[3] = -1e3
    call = Call(torch.randn(2, 5, 8))
    structure = traced(block, call)
    folds, _ = fold.find(block, structure, call)
    assert folds["down"].index.tolist() == list(range(12))


def test_a_linear_that_runs_twice_is_no_place_to_fold_into() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.a(x * 2)

    block = Twice()
    call = Call(torch.randn(2, 3, 6))
    folds, declined = fold.find(block, traced(block, call), call)
    assert not folds
    assert declined["b"].endswith("after folding into a")


def test_the_call_in_double_keeps_what_is_not_a_float() -> None:
    call = Call(
        torch.ones(1), Given((torch.ones(2, dtype=torch.long), [torch.ones(1)]), {"a": (None, torch.ones(1)), "b": 3})
    )
    twice = call.double()
    assert twice.hidden.dtype == torch.float64
    assert twice.rest.args[0].dtype == torch.long
    assert twice.rest.args[1][0].dtype == torch.float64
    assert twice.rest.kwargs["a"][0] is None
    assert twice.rest.kwargs["a"][1].dtype == torch.float64
    assert twice.rest.kwargs["b"] == 3


def test_norms_that_compute_in_float32_are_run_in_float64() -> None:
    x = torch.randn(4, dtype=torch.float64)
    assert x.float().dtype == torch.float32
    with fold.InDouble():  # type: ignore[no-untyped-call]
        assert x.to(torch.float32).dtype == torch.float64
        assert torch.equal(x.float().double(), x)
        assert torch.softmax(x, -1, dtype=torch.float32).dtype in (torch.float32, torch.float64)


def test_folds_hold_on_a_streamed_block_too(tmp_path: Path) -> None:
    zoo.tiny("qwen3").save_pretrained(tmp_path / "m")  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path / "m")))
    calls = stream.begin(zoo.ids(2, 12), 2)
    block = stream.load(2)
    call = calls.call(2)
    folds, declined = fold.find(block, traced(block, call), call)
    assert len(folds) == 4
    assert not declined
    assert torch.equal(call(block), primary(block(call.hidden, *call.rest.args, **call.rest.kwargs)))
