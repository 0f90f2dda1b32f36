"""A bundle on quantkit's own kernels (in Triton's interpreter) computes what plain transformers does with it."""

import functools
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import humming_library
import pytest
import torch
import transformers
import zoo

import quantkit
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.kernels.dispatch import EXPANDED, FILE, HUMMING, INT_MM, Choice, Recorded, Table, versions
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.runtimes.torch.decode_graph import DecodeGraph
from quantkit.runtimes.torch.packed import joined_layers

pytest.importorskip("triton")  # Linux alone has it
from quantkit.kernels.linear import QuantLinear

RUNTIME = load_runtime("torch")
GROUPS = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
BYTES = {"format": "int8", "granularity": "channel"}
# the interpreter computes four times as long with a model of 64 features
NARROW = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def compiled(tmp_path: Path, byte_tokenizer: Any, few_scored: None) -> Callable[..., Bundle]:
    """A bundle of a tiny Llama, whose weights are rounded as the scheme says."""

    def make(weights: dict[str, Any], layout: str = "pack-quantized", wide: bool = False, **scheme: Any) -> Bundle:
        folder = tmp_path / "model"
        sizes = {} if wide else NARROW
        zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), num_hidden_layers=1, **sizes)
        recipe: dict[str, Any] = {"schema": 1, "summary": "a test", "passes": [{"rtn": {}}]}
        recipe |= {name: scheme.pop(name) for name in ("keep", "overrides") if name in scheme}
        recipe["scheme"] = {"weights": weights, **scheme}
        recipe["export"] = [{"checkpoint": {"layout": layout}}]
        made = Recipe.from_dict(recipe, name="test")
        return quantkit.compile(str(folder), made, out=tmp_path / "bundle", speed=False)

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=zoo.ids()[:1, :5]).logits.float()
    return found


def plain(bundle: Bundle) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(bundle.model_folder, dtype="auto").eval()
    return logits(model)


def linears(model: Any) -> list[QuantLinear]:
    return [each for each in model.modules() if isinstance(each, QuantLinear)]


def test_every_quantized_linear_stays_packed(compiled: Callable[..., Bundle], recwarn: pytest.WarningsRecorder) -> None:
    bundle = compiled(GROUPS, wide=True)
    model = bundle.model(kernels=True, device="cpu")
    shapes = {layer.name.rpartition(".")[2]: layer.shape for layer in bundle.manifest.layers}
    # q, k and v are one product, and so are gate and up
    expected = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    packed = [each.packed for each in linears(model)]
    assert sorted(each.shape for each in packed) == sorted(
        (sum(shapes[name][0] for name in names), shapes[names[0]][1]) for names in expected
    )
    assert not [each for each in recwarn if "no kernel" in str(each.message) or "one by one" in str(each.message)]
    stored = sum(layer.bits_per_weight / 8 * layer.shape[0] * layer.shape[1] for layer in bundle.manifest.layers)
    assert sum(each.resident_bytes for each in packed) <= 1.5 * stored, "no float copy is kept"
    expanded = plain(bundle)
    error = (logits(model) - expanded).norm() / expanded.norm()
    assert 0 < error < 4e-3, "float16 for float32, and nothing else"


@pytest.mark.parametrize("ids", [zoo.ids()[:2, :3]])
def test_joined_products_have_the_bits_of_the_members(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor
) -> None:
    from quantkit.runtimes.torch import packed

    bundle = compiled(GROUPS)
    joined = bundle.model(kernels=True, device="cpu")
    monkeypatch.setattr(packed, "one_input", lambda skeleton: [])
    apart = bundle.model(kernels=True, device="cpu")
    assert (len(linears(joined)), len(linears(apart))) == (4, 7)
    with torch.no_grad():
        assert torch.equal(joined(input_ids=ids).logits, apart(input_ids=ids).logits)


def test_linears_that_cannot_be_joined_are_said(compiled: Callable[..., Bundle]) -> None:
    value = {"match": "*.v_proj", "weights": {"format": "int8", "granularity": "channel"}}
    bundle = compiled({**GROUPS, "symmetric": True}, overrides=[value])
    with pytest.warns(UserWarning, match=r"one by one: 1 .*v_proj: int8 beside int4; joined weights have a format"):
        model = bundle.model(kernels=True, device="cpu")
    # q and k are one product, and v another
    assert len(linears(model)) == 5
    error = (logits(model) - plain(bundle)).norm() / plain(bundle).norm()
    assert error < 4e-3


def test_a_model_that_does_not_run_without_values_keeps_its_linears_apart(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.runtimes.torch import packed

    def fails(skeleton: Any) -> Any:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(packed, "one_input", fails)
    with pytest.warns(UserWarning, match="LlamaForCausalLM: data-dependent; it does not run without values"):
        model = compiled(GROUPS).model(kernels=True, device="cpu")
    assert len(linears(model)) == 7


def test_the_linears_with_one_input_are_those_that_read_one_tensor() -> None:
    from quantkit.runtimes.torch.packed import one_input

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dummy_inputs = {"x": torch.ones(2, 4)}
            self.a, self.b, self.c, self.d = (torch.nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) + self.b(x)
            x += 1
            return self.c(y) + self.d(x) + self.d(y)

    with torch.device("meta"):
        assert one_input(Block()) == [("a", "b")]
        changed = Block()
    # outputs that lie in a wider row have no view of all of their elements
    changed.a.register_forward_hook(lambda _, inputs, output: output.view(-1))
    with pytest.raises(RuntimeError):
        one_input(changed)


def test_inputs_of_eight_bits_are_quantized_as_the_checkpoint_says(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled(BYTES, "int-quantized", wide=True, activations={"format": "int8"})
    shapes = {(layer.shape[0], layer.shape[1]) for layer in bundle.manifest.layers}
    # a table of another format says for one shape what this cannot run, and of this format for the others
    names = {shape: EXPANDED if shape == max(shapes) else INT_MM for shape in shapes}
    table = Table({shape: (Choice(64, names[shape], None, 1.0, 1),) for shape in shapes})
    model = bundle.model(kernels=True, device="cpu", table=table)
    found = linears(model)
    assert {each.packed.kind for each in found} == {"int8.native"}
    # a joined weight has a shape of its own, which was not timed
    assert {names.get(each.packed.shape) for each in found if each.table is table} == {INT_MM}
    assert all((each.table is table) == (names.get(each.packed.shape) == INT_MM) for each in found)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(bundle.model_folder, dtype="auto").eval()
    name, x = "model.layers.0.mlp.up_proj", torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    logits(theirs)  # packed weights are expanded by the first forward
    with torch.no_grad():
        expected, found = theirs.get_submodule(name)(x), model.get_submodule(name)(x.half()).float()
    dense = RUNTIME.stream(bundle.model_folder).source.weights.read(f"{name}.weight").float()
    noise = (torch.nn.functional.linear(x, dense) - expected).norm()
    # codes that lie between two numbers in float16 may be rounded otherwise than in float32; others may not
    assert (found - expected).norm() < 0.4 * noise


def float_inputs(bundle: Bundle) -> torch.Tensor:
    """The same weights, expanded, and nothing done to the inputs."""
    config = transformers.AutoConfig.from_pretrained(bundle.model_folder)
    del config.quantization_config
    weights = RUNTIME.stream(bundle.model_folder).source.weights
    state = {name: weights.read(name) for name in weights.entries}
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return logits(model.eval())


@pytest.mark.parametrize(
    ("weights", "more", "reason"),
    [
        ({**GROUPS, "format": "int3"}, {}, "int3"),
        ({**GROUPS, "group": 16}, {}, "group 16"),
        (BYTES, {"activations": {"format": "int8", "dynamic": False, "granularity": "tensor"}}, "inputs in int8"),
        (BYTES, {"activations": {"format": "int8", "symmetric": False}}, "inputs in int8"),
    ],
)
def test_what_no_kernel_takes_is_expanded_and_said(
    compiled: Callable[..., Bundle], weights: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    bundle = compiled(weights, "int-quantized" if more else "pack-quantized", **more)
    with pytest.warns(UserWarning, match=rf"no kernel takes these.*: {len(bundle.manifest.layers)} \(.*{reason}"):
        model = bundle.model(kernels=True, device="cpu")
    assert not linears(model)
    expected = float_inputs(bundle)
    assert (logits(model) - expected).norm() / expected.norm() < 4e-3


def test_what_none_of_our_kernels_takes_goes_to_another_library_if_it_is_there(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from quantkit.kernels.humming import NAME, HummingLinear

    bundle = compiled({"format": "nvfp4"}, "nvfp4-pack-quantized")
    humming_library.install(monkeypatch)
    model = bundle.model(kernels=True, device="cpu", dtype=torch.bfloat16)
    theirs = {name: each for name, each in model.named_modules() if isinstance(each, HummingLinear)}
    assert set(theirs) == {layer.name for layer in bundle.manifest.layers}
    assert not [each for each in recwarn if "no kernel" in str(each.message)]
    up = theirs["model.layers.0.mlp.up_proj"]
    assert up.resident_bytes == up.shape[0] * up.shape[1] * (1 / 2 + 1 / 16) + 4, "no float copy is kept"
    expected = plain(bundle)
    assert (logits(model) - expected).norm() / expected.norm() < 2.0**-6, "bfloat16"

    def why(table: Table | None) -> str:
        with pytest.warns(UserWarning) as caught:
            found = bundle.model(kernels=True, device="cpu", table=table)
        assert not any(isinstance(each, HummingLinear) for each in found.modules())
        return str(caught[0].message)

    # as measured: something else was the fastest; what it would leave as memory was; not there
    shapes = {(layer.shape[0], layer.shape[1]) for layer in bundle.manifest.layers}
    copy = Table({shape: (Choice(1, EXPANDED, None, 1.0, 1),) for shape in shapes})
    assert f"{NAME} was not the fastest" in why(copy)
    kept = Table({shape: (Choice(1, NAME, None, 1.0, 1),) for shape in shapes})
    assert any(
        isinstance(each, HummingLinear) for each in bundle.model(kernels=True, device="cpu", table=kept).modules()
    )
    monkeypatch.setattr(
        humming_library.HummingLayer, "named_parameters", lambda self: iter([("weight_zero_point", None)])
    )
    assert "not stored: weight_zero_point" in why(None)
    monkeypatch.setitem(sys.modules, "humming.layer", None)
    assert "pip install -e '.[humming]'" in why(None)


def test_a_layer_is_in_the_packing_that_its_table_names(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.kernels.humming import HummingLinear
    from quantkit.measurement.timing.cuda import _cost, linears_seconds

    humming_library.install(monkeypatch)
    bundle = compiled(GROUPS, wide=True)
    joined = joined_layers(bundle.model_folder, bundle.manifest.layers)
    sizes = {layer.name.rpartition(".")[2]: (layer.shape[0], layer.shape[1]) for layer in joined}
    kept = sizes["o_proj"]
    choices = {shape: (Choice(5, EXPANDED if shape == kept else HUMMING, None, 1.0, 1),) for shape in sizes.values()}
    table = Table(choices)
    model = bundle.model(kernels=True, device="cpu", table=table)
    theirs = [module for module in model.modules() if isinstance(module, HummingLinear)]
    # q, k and v are one product there too, and so are gate and up
    assert sorted(module.shape for module in theirs) == sorted(set(sizes.values()) - {kept})
    assert [layer.packed.shape for layer in linears(model)] == [kept]
    expected = plain(bundle)
    assert (logits(model) - expected).norm() / expected.norm() < 4e-3
    assert linears_seconds(model, 5, table) == 4.0
    assert linears_seconds(model, 5, Table({shape: (Choice(5, EXPANDED, None, 1.0, 1),) for shape in choices})) is None
    stored = sum(module.resident_bytes for module in [*theirs, *linears(model)])
    assert _cost(model, "int4", "fp16").weight_bytes == stored + model.lm_head.weight.numel() * 2
    # another library than the one that was timed refuses what it took there
    monkeypatch.setattr(humming_library.HummingLayer, "transform", lambda self: (_ for _ in ()).throw(ValueError("no")))
    with pytest.warns(UserWarning, match=r"humming was the fastest and does not take these.*: 3 \(the first: no; "):
        model = bundle.model(kernels=True, device="cpu", table=table)
    assert len(linears(model)) == 4


def test_what_cannot_be_is_refused(compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = compiled(GROUPS)
    with pytest.raises(InputError, match=r"kernel-dtype.*float32"):
        bundle.model(kernels=True, device="cpu", dtype=torch.float32)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"device-absent.*no GPU"):
            bundle.model(kernels=True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match=r"device-absent.*a cpu"):
        bundle.model(kernels=True, device="cpu")


@pytest.mark.parametrize("at_once", [1 << 15, 4])
def test_steps_of_decoding_are_those_of_the_whole_sequence(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("quantkit.runtimes.torch.decode_graph._AT_ONCE", at_once)
    model, ids = zoo.tiny("llama"), zoo.ids()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    decoding = DecodeGraph(model, ids.shape[0], ids.shape[1])
    for _ in range(2):  # the second time in the places of the first
        found = [decoding.prefill(ids[:, :3])]
        found += [decoding.step(ids[:, place]).clone() for place in range(3, ids.shape[1])]
        assert torch.allclose(torch.stack(found, dim=1), expected[:, 2:], atol=1e-5)
    with pytest.raises(InputError, match="context-full"):
        decoding.step(ids[:, 0])
    decoding.rewind(4)
    assert torch.allclose(decoding.step(ids[:, 4]), expected[:, 4], atol=1e-5)


def test_a_step_that_torch_compiles_is_the_step_and_one_graph(compiled: Callable[..., Bundle]) -> None:
    """The backend here runs what was traced and generates nothing."""
    model, ids = compiled(GROUPS).model(kernels=True, device="cpu"), zoo.ids()[:1, :5]
    plainly, fused = DecodeGraph(model, 1, 5), DecodeGraph(model, 1, 5, fuse="aot_eager")
    for each in (plainly, fused):
        each.prefill(ids[:, :3])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for place in (3, 4):
        assert torch.equal(fused.step(ids[:, place]), plainly.step(ids[:, place]))
    seen = torch._dynamo.utils.counters
    assert (seen["stats"]["unique_graphs"], dict(seen["graph_break"])) == (1, {})
    # a copy is a layer of its own
    copy = deepcopy(model)
    del model, plainly, fused
    assert torch.equal(logits(copy), logits(copy))


def test_a_head_in_eight_bits_is_packed_too(compiled: Callable[..., Bundle]) -> None:
    from quantkit.measurement.timing.cuda import _cost

    head = {"match": "lm_head", "weights": {"format": "int8", "granularity": "channel"}}
    bundle = compiled({**GROUPS, "symmetric": True}, keep=["embeddings"], overrides=[head])
    model = bundle.model(kernels=True, device="cpu")
    assert model.lm_head.packed.kind == "int8"
    error = (logits(model) - plain(bundle)).norm() / plain(bundle).norm()
    assert error < 4e-3
    cost = _cost(model, "int4", "fp16")
    assert (cost.float_bytes, cost.float_head_flops) == (0.0, 0.0)
    assert cost.head_flops == 2.0 * model.lm_head.packed.shape[0] * model.lm_head.packed.shape[1]
    assert cost.weight_bytes == sum(each.packed.resident_bytes for each in linears(model))


def test_what_was_chosen_on_another_device_is_not_used(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled(GROUPS)
    device = {"id": "gpu-x", "kind": "gpu", "name": "another GPU"}
    shapes = {(layer.shape[0], layer.shape[1]) for layer in bundle.manifest.layers}
    choices = {shape: (Choice(64, "dequantize_matmul", None, 1.0, 1),) for shape in shapes}
    bundle = bundle.put(FILE, Recorded(device, {}, "int4.g32.zeros", Table(choices)).as_bytes())
    with pytest.warns(UserWarning, match="measured on another GPU, and here is interpreter.*`quantkit tax BUNDLE"):
        bundle.model(kernels=True, device="cpu")
    here, own = versions(), {**device, "name": "interpreter"}
    for other, then in (("triton", "3.1.0"), ("torch", "2.0.0"), ("kernels", "of unknown version")):
        was = {name: version for name, version in here.items() if name != other}
        was |= {other: then} if other != "kernels" else {}
        bundle = bundle.put(FILE, Recorded(own, was, "x", Table(choices)).as_bytes())
        with pytest.warns(UserWarning, match=f"measured with {other} {then}, and here is {re.escape(here[other])}: it"):
            bundle.model(kernels=True, device="cpu")
    bundle = bundle.put(FILE, Recorded(own, {**here, "driver": "1"}, "x", Table(choices)).as_bytes())
    model = bundle.model(kernels=True, device="cpu")
    timed = [each.table for each in linears(model) if each.packed.shape in shapes]
    assert timed
    assert all(table.choices.keys() == choices.keys() for table in timed)


def test_steps_on_the_kernels_are_timed_against_sixteen_bits(
    compiled: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.kernels import linear, matmul
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.timing import cuda as speed_cuda
    from quantkit.measurement.timing.schedule import TimingPlan
    from quantkit.model.source.open import open_model

    # half a second each in the interpreter, a hundred times over: what they take is not what is looked at
    expanded = functools.cache(matmul.dequantize)
    monkeypatch.setattr(linear, "by_slabs", lambda x, w: torch.nn.functional.linear(x, expanded(w, x.dtype)))
    bundle = compiled(GROUPS)
    device, plan = GpuDevice("cpu", dry=True), TimingPlan((2,), (3,), (5,), seconds=0.01, cell_seconds=0.01, rounds=1)
    # as `quantkit tax` would time them
    joined = joined_layers(bundle.model_folder, bundle.manifest.layers)
    shapes = [(layer.shape[0], layer.shape[1]) for layer in joined]
    assert sorted(layer.name.rpartition(".")[2] for layer in joined) == [
        *("down_proj", "gate_proj+up_proj", "o_proj", "q_proj+k_proj+v_proj")
    ]
    choices = {shape: (Choice(2, "dequantize_matmul", None, 1e-6, 1),) for shape in shapes}
    bundle = bundle.put(FILE, Recorded(device.identity(), versions(), "int4.g32.zeros", Table(choices)).as_bytes())
    source = open_model(str(tmp_path / "model"))
    rows, said = speed_cuda.run(bundle, source, plan, device, dtype=torch.float16)
    assert said == ""
    (step,) = [row for row in rows if row.name == "latency.decode_step"]
    assert (step.runtime, step.batch, step.baseline.subject) == ("torch", 2, source.sha256)  # type: ignore[union-attr]
    assert step.settings["linears_s"] == pytest.approx(4e-6)
    assert step.settings["residual_s"] == pytest.approx((step.value or 0) - 4e-6)
    assert {"latency.prefill", "tax.total", "tax.break_even", "ceiling.read"} <= {row.name for row in rows}
    # four blocks of two before, and as many after
    assert {row.n for row in rows if row.name.startswith("ceiling.") and row.value is not None} == {16}
    (tax,) = [row for row in rows if row.name == "tax.total" and row.shape == step.shape]
    # 16 bits read more than 4 do
    assert tax.op.hp_bound_s > tax.op.bound_s  # type: ignore[union-attr, operator]


def test_what_a_gpu_run_holds_the_kernels_against(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks/gpu"))
    from parts import real_model

    bundle = compiled(GROUPS)
    ids = real_model.text_ids(bundle)
    monkeypatch.setattr(real_model, "_PROMPT", 3)
    monkeypatch.setattr(real_model, "_STEPS", 1)
    rows = list(real_model.graphed(bundle, ids, "cpu", (1, 2)))
    assert [(row["batch"], row["graphed"], row["equal"], row["ok"]) for row in rows] == [
        (1, False, True, True),
        (2, False, True, True),
    ]
    row = real_model.on_kernels(bundle, ids[:1, :5], "cpu", (torch.float16,))
    assert row["ok"]
    assert 0 < row["library"]["float16"] < 1e-5
    # outputs in the wrong order are far beyond what half precision explains
    forward = QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda layer, x: forward(layer, x).roll(1, dims=-1))
    assert not real_model.on_kernels(bundle, ids[:1, :5], "cpu", (torch.float16,))["ok"]
