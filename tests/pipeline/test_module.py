"""`quantkit.Pipeline`: the passes of a recipe on a module in memory, whatever kind of module that is."""

import pytest
import torch
import zoo
from torch import Tensor, nn

import quantkit
from quantkit.errors import InputError
from quantkit.formats import load_format

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}


class Mlp(nn.Module):
    """With a linear that no input reaches, and one that only large inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.unused, self.rare = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.rare(y) if float(x.abs().max()) > 100 else y


def test_the_example_of_the_readme() -> None:
    model, ids = zoo.tiny("llama"), zoo.ids(4, 16)
    before = [parameter.clone() for parameter in model.parameters()]
    pipeline = quantkit.Pipeline(["fold_norms", {"gptq": {}}], weights=GROUPED)
    assert pipeline.apply(model, ids) is model
    assert len(pipeline.tensors) == 21
    form = load_format("int4")
    for name, tensor in pipeline.tensors.items():
        assert tensor.scheme.group == 32
        assert torch.equal(model.get_submodule(name).weight, form.dequantize(tensor))
    assert torch.equal(model.get_parameter("model.layers.0.input_layernorm.weight"), torch.ones(64))
    assert not pipeline.decisions
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture_in_memory(name: str) -> None:
    model, ids = zoo.tiny(name), zoo.ids(2, 12)
    with torch.no_grad():
        before = model(input_ids=ids)[0]
        quantkit.Pipeline(["fold_norms", "gptq"], weights={"format": "int8"}).apply(model, ids)
        after = model(input_ids=ids)[0]
    assert 0 < float((after - before).norm() / before.norm()) < 0.1


@pytest.mark.parametrize("assigner", ["rtn", "gptq"])
def test_any_module_is_one_block(assigner: str) -> None:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    model = Mlp()
    pipeline = quantkit.Pipeline(["fold_norms", "awq", assigner], weights=GROUPED)
    with torch.no_grad():
        before = Mlp()(x)
        after = pipeline.apply(model, x)(x)
    assert pipeline.tensors.keys() == {"up", "down"}
    assert 0 < float((after - before).norm() / before.norm()) < 0.1
    never = {each.where: each for each in pipeline.decisions if each.code == "never-ran"}
    assert never.keys() == {"unused", "rare"}
    assert all("stays in high precision" in each.reason for each in never.values())
    assert torch.equal(model.unused.weight, Mlp().unused.weight)


def test_what_only_the_trace_reaches_is_recorded_too() -> None:
    """The first samples go through `rare`, as long as they are traced with all others they do not exist alone."""

    class Late(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(torch.relu(self.up(x)))
            return self.rare(y) if x.shape[0] <= 2 else y

    pipeline = quantkit.Pipeline(["gptq"], weights=GROUPED)
    pipeline.apply(Late(), torch.randn(40, 32))
    assert pipeline.tensors.keys() == {"up", "down"}
    assert {each.where for each in pipeline.decisions} == {"unused", "rare"}
    scaled = quantkit.Pipeline(["awq", "gptq"], weights=GROUPED)
    scaled.apply(Late(), torch.randn(40, 32))
    assert ("rare", "not-scaled") in {(each.where, each.code) for each in scaled.decisions}


def test_a_lone_linear_and_a_stack_of_likes() -> None:
    x = torch.randn(20, 32)
    lone = nn.Linear(32, 16)
    pipeline = quantkit.Pipeline(["gptq"], weights=GROUPED)
    pipeline.apply(lone, x)
    assert list(pipeline.tensors) == [""]
    stack = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    pipeline.apply(stack, x)
    assert list(pipeline.tensors) == ["0", "2"], "what was found before is not carried along"


def test_bfloat16_models_get_bfloat16_scales_and_say_so() -> None:
    model = zoo.tiny("llama").to(torch.bfloat16)
    pipeline = quantkit.Pipeline(["fold_norms", "gptq"], weights=GROUPED)
    pipeline.apply(model, zoo.ids(2, 12))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {tensor.scale.dtype for tensor in pipeline.tensors.values()} == {torch.bfloat16}
    assert [each.code for each in pipeline.decisions] == ["scale-dtype"]


def test_the_default_is_int8_per_channel() -> None:
    pipeline = quantkit.Pipeline(["rtn"], weights={"format": "int8"})
    pipeline.apply(nn.Linear(4, 4), torch.randn(3, 4))
    assert (pipeline.tensors[""].scheme.format, pipeline.tensors[""].scheme.granularity) == ("int8", "channel")


@pytest.mark.parametrize(
    ("passes", "options", "code", "says"),
    [
        (["gtpq"], {}, "recipe-invalid", "did you mean 'gptq'?"),
        ([{"gptq": {"dampning": 1}}], {}, "recipe-invalid", "did you mean 'damping'?"),
        (["fold_norms"], {"weights": {"format": "int8"}}, "recipe-invalid", "exactly one of"),
        (["rtn"], {"weights": {"format": "int5"}}, "recipe-invalid", "int5"),
        (["rtn"], {"on_indivisible": "drop"}, "recipe-invalid", "on_indivisible"),
        (
            ["rtn"],
            {"weights": {"format": "int8"}, "overrides": [{"match": "*", "weights": {"grup": 1}}]},
            "recipe-invalid",
            "did you mean 'group'?",
        ),
    ],
)
def test_wrong_use_is_refused_when_it_is_made(
    passes: list[object], options: dict[str, object], code: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        quantkit.Pipeline(passes, **options)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert says in caught.value.line()


@pytest.mark.parametrize(
    ("passes", "options", "code"),
    [
        (["gptq", "fold_norms"], {}, "pass-order"),
        (["rtn", "awq"], {}, "pass-order"),
        (["fuse_qkv", "rtn"], {}, "pass-order"),
        (["rtn"], {"keep": ["*.nothing"]}, "keep-unmatched"),
        (["rtn"], {"overrides": [{"match": "nothing.*"}]}, "override-unmatched"),
        (["rtn"], {"weights": {**GROUPED, "group": 48}}, "group-indivisible"),
        (["rtn"], {"keep": ["*"]}, "nothing-to-quantize"),
    ],
)
def test_what_does_not_fit_the_model_leaves_it_untouched(
    passes: list[str], options: dict[str, object], code: str
) -> None:
    model = zoo.tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = quantkit.Pipeline(passes, **{"weights": GROUPED, **options})  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        pipeline.apply(model, zoo.ids(2, 8))
    assert caught.value.code == code
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_module_without_linears_has_nothing_to_quantize() -> None:
    with pytest.raises(InputError, match="nothing-to-quantize"):
        quantkit.Pipeline(["rtn"], weights={"format": "int8"}).apply(nn.LayerNorm(4), torch.randn(2, 4))
    with pytest.raises(InputError, match="nothing-to-quantize"):
        quantkit.Pipeline(["rtn"], weights={"format": "int8"}).apply(nn.ReLU(), torch.randn(2, 4))


@pytest.mark.parametrize("fixed", [False, True])
def test_linears_see_quantized_inputs_from_then_on(fixed: bool) -> None:
    model, ids = zoo.tiny("llama"), zoo.ids(2, 12)
    how = {"format": "int8", **({"granularity": "tensor", "dynamic": False} if fixed else {})}
    quantkit.Pipeline(["rtn"], weights={"format": "int8", "scale": "float32"}, activations=how).apply(model, ids)
    seen: list[Tensor] = []
    linear = model.get_submodule("model.layers.1.mlp.down_proj")
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids)
    (found,) = seen
    rows = found.reshape(1, -1) if fixed else found.reshape(-1, found.shape[-1])
    assert all(row.unique().numel() <= 256 for row in rows)
    assert any(hook.waits is False for hook in linear._forward_pre_hooks.values() if hasattr(hook, "waits"))


class Departing(nn.Module):
    """Its blocks look as if each read what the one before put out; of longer sequences they do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 32)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        hidden = self.layers[0](self.table(input_ids))
        return (self.layers[1](2 * hidden if input_ids.shape[1] > 8 else hidden),)


def test_a_model_that_is_not_its_blocks_is_refused_before_it_is_changed() -> None:
    model = Departing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        quantkit.Pipeline(["rtn"], weights=GROUPED).apply(model, torch.arange(96).remainder(32).reshape(4, 24))
    assert caught.value.code == "stream-differs"
    assert "layers.0" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_its_blocks(dtype: torch.dtype) -> None:
    quantkit.Pipeline(["rtn"], weights=GROUPED).apply(zoo.tiny("llama").to(dtype), zoo.ids(5, 24))
