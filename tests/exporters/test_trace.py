"""Tracing: what becomes a placeholder, which blocks count as alike, and models that look like others but are not."""

import copy
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from exported import check_as, write_as
from small_onnx import EXPORT, expected, relative
from thorough import beside
from torch import nn

from quantkit.errors import InputError
from quantkit.exporters.trace import CHECKPOINT, repeat, transformer
from quantkit.exporters.trace.rewrite import DOMAIN
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel

pytestmark = pytest.mark.usefixtures("fresh_traces")
LIMIT = 5e-6
LLAMA = {**zoo.ARCHITECTURES["llama"][2], "num_hidden_layers": 2}


def architecture(name: str, **settings: Any) -> nn.Module:
    """A tiny model of transformers that is not in the zoo; weights as there."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    classes = (f"{name}ForCausalLM", f"{name}Model")
    return zoo.filled(getattr(transformers, next(each for each in classes if hasattr(transformers, each))), config)


def exported(folder: Path, model: nn.Module) -> tuple[Any, Any, list[Any]]:
    """The model in ONNX Runtime, the exporter's checks of it, and its decisions."""
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    model.save_pretrained(folder / "m")  # type: ignore[operator]
    source = open_model(str(folder / "m"))
    stream = StreamedModel(source)
    decisions = write_as(EXPORT, folder, source, stream, Finished([], {}), {})
    checks = check_as(EXPORT, folder, source, stream, Finished([], {}), {})
    return OnnxModel(folder / "onnx", threads=1), {check.name: check for check in checks}, decisions


def refused(folder: Path, model: nn.Module) -> InputError:
    with pytest.raises(InputError) as caught:
        exported(folder, model)
    assert not (folder / "onnx").exists()
    assert caught.value.remedy == CHECKPOINT
    return caught.value


# --- norms ------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """x / rms(x) * weight, with something about it changed."""

    def __init__(self, kind: str = "", epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.kind, self.epsilon = kind, epsilon
        if kind == "bias":
            self.bias = nn.Parameter(torch.zeros(8))
        if kind == "child":
            self.inner = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        power = {"sum": x.pow(2).sum(-1, keepdim=True), "abs": x.abs().mean(-1, keepdim=True) ** 2}
        mean = power.get(self.kind, x.pow(2).mean(-1, keepdim=True))
        epsilon = self.epsilon * (4 if self.kind == "other epsilon" else 1)
        weight = {"offset": self.weight + 1, "squared": self.weight**2, "half": self.weight + 0.5}
        x = x - x.mean(-1, keepdim=True) if self.kind == "centred" else x
        return x * torch.rsqrt(mean + epsilon) * weight.get(self.kind, self.weight)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("", (1e-5, 0.0)),
        ("offset", (1e-5, 1.0)),
        *((kind, None) for kind in ("sum", "abs", "other epsilon", "squared", "half", "centred", "bias", "child")),
    ],
)
def test_a_norm_is_known_by_what_it_computes(kind: str, wanted: Any) -> None:
    module = Norm(kind)
    before = module.weight.clone()
    assert transformer.rms_norm(module) == wanted
    assert torch.equal(module.weight, before)


def test_other_modules_are_no_norms() -> None:
    for module in (nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False), nn.Embedding(8, 8)):
        assert transformer.rms_norm(module) is None
    assert transformer.rms_norm(nn.RMSNorm(8, eps=1e-6)) == (1e-6, 0.0)


# --- which blocks are alike -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with an attribute of any kind."""

    def __init__(self, layer_idx: int = 0, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, attributes.pop("width", 4))
        self.layer_idx = layer_idx
        for name, value in attributes.items():
            setattr(self, name, value)


def scaled(factor: float) -> Any:
    return lambda x: x * factor


CONFIG = object()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {}, True),
        ({"layer_idx": 1}, {"layer_idx": 2}, True),
        ({"config": CONFIG}, {"config": CONFIG}, True),
        ({"config": object()}, {"config": object()}, False),
        ({"sliding_window": None}, {"sliding_window": 8}, False),
        ({"scale": 1}, {"scale": 2}, False),
        ({"kinds": ["full", 1]}, {"kinds": ["full", 1]}, True),
        ({"kinds": ["full", 1]}, {"kinds": ["sliding", 1]}, False),
        ({"table": {"a": 1}}, {"table": {"a": 2}}, False),
        ({"width": 4}, {"width": 5}, False),
        ({"act": nn.SiLU()}, {"act": nn.SiLU()}, True),
        ({"act": nn.SiLU()}, {"act": nn.GELU()}, False),
        ({"act": nn.GELU()}, {"act": nn.GELU(approximate="tanh")}, False),
        ({"act": torch.sigmoid}, {"act": torch.sigmoid}, True),
        # two functions of one name, made with different settings
        ({"act": scaled(1.0)}, {"act": scaled(2.0)}, False),
        ({"act": functools.partial(torch.clamp, min=0)}, {"act": functools.partial(torch.clamp, min=0)}, True),
        ({"act": functools.partial(torch.clamp, min=0)}, {"act": functools.partial(torch.clamp, min=1)}, False),
        # a constant that is no parameter and no buffer cannot be given the copy's own value
        ({"factor": torch.tensor(1.0)}, {"factor": torch.tensor(2.0)}, False),
        ({"extra": nn.Identity()}, {}, False),
    ],
)
def test_blocks_are_alike_if_they_compute_the_same(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    first, second = Block(**one), Block(**other)
    assert repeat.alike(first, second) is same
    assert repeat.alike(second, first) is same


def test_a_buffer_s_values_are_a_copy_s_own_but_not_its_shape() -> None:
    blocks = [Block() for _ in range(3)]
    for block, size in zip(blocks, (3, 3, 4), strict=True):
        block.register_buffer("table", torch.randn(size))
    assert repeat.kinds(nn.ModuleList(blocks)) == [0, 0, 2]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", [0, 0, 0]), ("mistral", [0, 0, 0]), ("gemma2", [0, 1, 0]), ("gpt2", [0, 0, 0]), ("bert", [0, 0, 0])],
)
def test_kinds_of_blocks(name: str, kinds: list[int]) -> None:
    model = zoo.tiny(name)
    assert repeat.kinds(model.get_submodule(transformer.find_blocks(model))) == kinds


def test_a_call_is_the_same_only_with_the_same_tensors() -> None:
    one, other = torch.ones(2), torch.ones(2)
    named = {"window": 8, "mask": None}
    call = repeat._Call.of((one,), named)
    assert call.same(repeat._Call.of((one,), dict(named)))
    for args, kwargs in (
        ((other,), named),
        ((one,), {**named, "window": 9}),
        ((one,), {**named, "window": True}),
        ((one,), {"window": 8}),
        ((one, one), named),
    ):
        assert not call.same(repeat._Call.of(args, kwargs))
    # a tensor that is gone is kept by the call, so that no other one can come to lie where it lay
    kept = repeat._Call.of((torch.ones(3),), {})
    assert not any(kept.same(repeat._Call.of((torch.ones(3),), {})) for _ in range(10))


def test_of_blocks_that_are_alike_each_that_is_called_otherwise_is_traced() -> None:
    class Block(nn.Module):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return hidden + mask

    hidden, masks = torch.ones(2), [torch.ones(2), torch.zeros(2)]
    blocks = nn.ModuleList(Block() for _ in range(4))
    assert repeat.share(blocks, [0, 0, 0, 0], set()) == [0]
    blocks[0](hidden, masks[0])
    with pytest.raises(repeat.CalledOtherwise) as caught:
        blocks[1](hidden, masks[1])
    assert caught.value.index == 1
    blocks = nn.ModuleList(Block() for _ in range(4))
    assert repeat.share(blocks, [0, 0, 0, 0], {1}) == [0, 1]
    for index, block in enumerate(blocks):
        block(hidden, masks[index % 2])
    with pytest.raises(repeat.CalledOtherwise):
        blocks[3](hidden, torch.zeros(2))


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(fresh_traces: None) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        import transformers

        skeleton = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    before = copy.deepcopy(dict(vars(skeleton.config)))
    types = [type(module) for module in skeleton.modules()]
    found = transformer.trace(skeleton, "decoder")
    assert [type(module) for module in skeleton.modules()] == types
    assert vars(skeleton.config) == before
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    return skeleton, found


def test_every_linear_norm_and_attention_is_one_placeholder(traced: tuple[nn.Module, Any]) -> None:
    skeleton, found = traced
    nodes = [node for node in found.model.graph if node.domain == DOMAIN]
    assert Counter(node.op_type for node in nodes) == {"Linear": 15, "RMSNorm": 5, "Attention": 2}
    named = [node.attributes["name"].as_string() for node in nodes if "name" in node.attributes]
    modules = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear) or "norm" in name}
    assert set(named) == modules
    assert len(named) == len(modules)
    assert {node.domain for node in found.model.graph} == {"", DOMAIN}
    assert (found.decoder, found.layers) == (True, 2)


def test_no_weight_is_in_the_traced_graph(traced: tuple[nn.Module, Any]) -> None:
    _, found = traced
    assert max(value.const_value.nbytes for value in found.model.graph.initializers.values()) < 1024
    assert set(found.parameters.values()) >= {"model.embed_tokens.weight"}
    assert not [name for name in found.parameters.values() if "proj" in name or "norm" in name]


def test_the_second_block_has_its_own_cache_and_names(traced: tuple[nn.Module, Any]) -> None:
    _, found = traced
    attentions = [node for node in found.model.graph if node.op_type == "Attention"]
    for index, node in enumerate(attentions):
        assert [value.name for value in node.inputs[4:]] == [
            f"past_key_values.{index}.key",
            f"past_key_values.{index}.value",
        ]
        assert [value.name for value in node.outputs[1:]] == [f"present.{index}.key", f"present.{index}.value"]
    assert attentions[0].inputs[3] is attentions[1].inputs[3]


def test_weights_that_a_block_computes_with_before_it_sees_anything(tmp_path: Path) -> None:
    """Nemotron's norms add 1 to their weights: a node that depends on no input, and differs from block to block."""
    model = architecture("Nemotron", **LLAMA)
    loaded, checks, _ = exported(tmp_path, model)
    assert all(check.ok for check in checks.values()), checks
    ids = zoo.ids(2, 12)
    assert relative(loaded.run(loaded.state(2, 12), ids.numpy()), expected(model, ids)) < LIMIT


def test_an_encoder_without_token_types_that_ends_with_a_traced_block(tmp_path: Path) -> None:
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 64}
    model = architecture("DistilBert", vocab_size=zoo.VOCABULARY, **sizes)
    loaded, checks, _ = exported(tmp_path, model)
    assert all(check.ok for check in checks.values()), checks
    assert list(loaded.inputs) == ["input_ids", "attention_mask"]
    assert loaded.outputs == ["last_hidden_state"]
    ids, mask = zoo.ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    found, wanted = loaded.encode(ids.numpy(), mask.numpy()), expected(model, ids, mask)
    assert relative(found[mask.numpy() == 1], wanted[mask.numpy() == 1]) < LIMIT


def test_heads_that_onnxruntime_does_not_rotate_are_rotated_outside_attention(tmp_path: Path) -> None:
    """It takes heads of a multiple of 8 features, and rotates those of a multiple of 16."""
    model = architecture("Llama", **{**LLAMA, "head_dim": 24})
    _, checks, decisions = exported(tmp_path, model)
    assert all(check.ok for check in checks.values()), checks
    assert [decision.code for decision in decisions] == ["rotary-unfused"]


def test_rotary_angles_that_change_with_the_length_stay_outside_attention(tmp_path: Path) -> None:
    """Long RoPE turns by other angles once a text is longer than 16: no one table holds both."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0,
    }
    model = architecture("Phi3", **LLAMA, original_max_position_embeddings=16, rope_parameters=rope)
    loaded, checks, decisions = exported(tmp_path, model)
    assert all(check.ok for check in checks.values()), checks
    assert [decision.code for decision in decisions] == ["rotary-unfused"]
    for length in (8, 16, 17, 40):
        ids = zoo.ids(2, length)
        assert relative(loaded.run(loaded.state(2, length), ids.numpy()), expected(model, ids)) < LIMIT


BERT = {key: value for key, value in zoo.ARCHITECTURES["bert"][2].items() if key != "num_hidden_layers"}
SINKS = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
ALIBI = {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}
ONE = {**BERT, "num_hidden_layers": 2, "embedding_size": 32}
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "sinks": ("GptOss", SINKS, "attention-unsupported", "attention with s_aux"),
    "alibi": ("Bloom", ALIBI, "attention-unsupported", "layer 0 does not go through"),
    "attention of its own": ("MPNet", {**BERT, "num_hidden_layers": 2}, "attention-unsupported", "does not go through"),
    "one block for all": ("Albert", ONE, "export-untraceable", "used more than once"),
    "angles from data": ("Llama", {**LLAMA, **DYNAMIC}, "export-untraceable", "data-dependent"),
    "other heads than the config says": ("GPTNeoX", LLAMA, "attention-unsupported", "keys and values of"),
}


@pytest.mark.parametrize(("name", "settings", "code", "part"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, name: str, settings: dict[str, Any], code: str, part: str
) -> None:
    problem = refused(tmp_path, architecture(name, **settings))
    assert problem.code == code
    assert part in str(problem.value)


# --- traced once ------------------------------------------------------------------------------------------------------


def drawn(traced: transformer.Traced) -> str:
    return str(traced.model.graph)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every trace from here on."""
    runs: list[str] = []
    inner = transformer._traced
    monkeypatch.setattr(transformer, "_traced", lambda *args: runs.append(args[1]) or inner(*args))
    transformer._last.clear()
    return runs


@pytest.mark.parametrize(("name", "kind"), beside([("llama", "decoder")], [("llama", "decoder"), ("bert", "encoder")]))
def test_a_second_trace_of_the_same_model_is_a_copy_and_another_config_is_traced_by_itself(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = counted(monkeypatch)
    first, second = (transformer.trace(zoo.tiny(name).to("meta"), kind) for _ in range(2))
    assert runs == [kind]
    as_traced = drawn(first)
    assert drawn(second) == as_traced
    assert dict(first.parameters) == dict(second.parameters)
    nodes = set(first.model.graph)
    assert not nodes & set(second.model.graph)
    for node in list(first.model.graph):  # what one dialect rewrites, the next one does not see
        node.name = "rewritten"
    assert drawn(second) == drawn(transformer.trace(zoo.tiny(name).to("meta"), kind)) == as_traced
    assert runs == [kind]
    epsilon = "rms_norm_eps" if name == "llama" else "layer_norm_eps"
    other = transformer.trace(zoo.tiny(name, **{epsilon: 1e-3}).to("meta"), kind)
    assert drawn(other) != as_traced
    assert runs == [kind, kind]
