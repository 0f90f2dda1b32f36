"""Quantized mixtures of experts: each expert against one quantized by hand, rare experts, and what can be loaded."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zoo
from pipeline.conftest import recipe
from safetensors.torch import load_file
from thorough import beside
from torch import Tensor, nn
from zoo import shrink

from quantkit.calibrate.statistics.sums import InputStats
from quantkit.errors import GateError, InputError
from quantkit.model import layouts
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure import experts
from quantkit.passes import load_pass
from quantkit.passes.assign import nearest
from quantkit.passes.solvers.gptq import factor, gptq_shared
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.blocks.prepared import prepare
from quantkit.pipeline.blocks.work import PassRun, Rare, Worked, work
from quantkit.pipeline.gates import refuse
from quantkit.pipeline.plan import PlanQuestion, plan
from quantkit.scheme import WeightScheme

SCHEME = {"format": "int4", "granularity": "group", "group": 32, "symmetric": True, "scale": "float32"}
PLAIN = {"damping": 0.01, "shrink": 0.0, "act_order": True, "range": "minmax", "sweeps": 0, "refit": False}
EXPERTS = "mlp.experts"


def lopsided() -> nn.Module:
    """A Mixtral whose first layer never chooses expert 3."""
    model = zoo.mixture("mixtral")
    gate = model.get_submodule("model.layers.0.mlp.gate")
    with torch.no_grad():
        # a channel that is large for every token, and that attention leaves alone, decides against it
        model.get_input_embeddings().weight[:, 0] = 0.5  # type: ignore[operator]
        for part in "qkv":
            model.get_submodule(f"model.layers.0.self_attn.{part}_proj").weight[:, 0] = 0.0  # type: ignore[index, operator]
        model.get_submodule("model.layers.0.self_attn.o_proj").weight[0] = 0.0  # type: ignore[index, operator]
        gate.weight[:, 0] = 0.0  # type: ignore[index, operator]
        gate.weight[3, 0] = -20.0  # type: ignore[index, operator]
    return model


def worked(
    folder: Path, model: nn.Module, rare: Rare, scheme: dict[str, Any] = SCHEME, **settings: Any
) -> tuple[StreamedModel, Worked]:
    """The first block, quantized on four sequences of 24 tokens."""
    model.save_pretrained(folder)  # type: ignore[operator]
    stream = StreamedModel(open_model(str(folder)))
    chosen = recipe("checkpoint", passes=("gptq",), scheme={"weights": scheme})
    layers = lay_out(chosen, stream.skeleton, stream.block_names, "float32")
    gptq = load_pass("gptq")
    found = work(
        stream,
        [PassRun(gptq, gptq.Settings(**{**PLAIN, **settings}))],
        layers.schemes,
        zoo.ids(4, 24),
        probe_ids=zoo.ids(1, 6),
        widest=layers.widest,
        dtype=torch.float32,
        rare=rare,
    )
    return stream, next(found)


def by_hand(stream: StreamedModel, done: Worked, number: int, *, everything: bool) -> dict[str, Tensor]:
    """The codes of one expert, from the inputs that the finished block routes to it, or from all of its layer's."""
    calls = stream.begin(zoo.ids(4, 24), 4)
    seen: list[tuple[Tensor, ...]] = []
    layer = done.block.module.get_submodule(EXPERTS)
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args))
    calls.run_all(done.block.module, 0, calls.hidden)
    hook.remove()
    hidden, index, _ = seen[0]
    x = hidden if everything else hidden[(index == number).any(dim=1)]
    original = stream.load(0)
    old, new = (module.get_submodule(f"{EXPERTS}.{number}") for module in (original, done.block.module))
    with torch.no_grad():
        gate, up = (new.get_submodule(name)(x) for name in ("w1", "w3"))
        inner = torch.nn.functional.silu(gate) * up
    found = {}
    for names, inputs in ((("w1", "w3"), x), (("w2",), inner)):
        solved = factor(InputStats([inputs]).hessian, damping=0.01, shrink=0.0, act_order=True)
        weights = [old.get_submodule(name).weight.detach() for name in names]
        scheme = WeightScheme.model_validate(SCHEME)
        results = gptq_shared(weights, solved, scheme, range="minmax", sweeps=0, refit=False)
        found |= {name: result.tensor.codes for name, result in zip(names, results, strict=True)}
    return found


def codes(done: Worked, number: int) -> dict[str, Tensor]:
    return {name: done.block.tensors[f"{EXPERTS}.{number}.{name}"].codes for name in ("w1", "w3", "w2")}


@pytest.mark.parametrize("chunk", [4, 1], ids=["at once", "replayed"])
def test_experts_are_quantized_on_their_own_tokens_and_a_rare_one_on_all(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.work.chunk_size", lambda *_: chunk)
    stream, done = worked(tmp_path, lopsided(), Rare(8, "force"))
    routed = {number: done.routed[f"model.layers.0.{EXPERTS}.{number}.w2"] for number in range(4)}
    assert routed[3] == 0
    assert sum(routed.values()) == 2 * 4 * 24
    for number in range(4):
        expected = by_hand(stream, done, number, everything=number == 3)
        for name, found in codes(done, number).items():
            # sums in another order: a code at a boundary may fall to the other side
            assert float((found != expected[name]).float().mean()) < 0.01, (number, name)
    (taken,) = [each for each in done.decisions if each.code == "expert-unrouted"]
    assert (taken.where, taken.from_, taken.to) == (f"model.layers.0.{EXPERTS}.3", 0, "forced")
    # a recipe can ask for fewer tokens, not for this
    with pytest.raises(GateError, match="expert_tokens=1"):
        refuse([taken])
    # what was forced for the statistics is no part of the model
    assert not any(layer.forced for layer in experts.found_in(done.block.module).values())


def test_codes_differ_with_the_tokens_an_expert_sees(tmp_path: Path) -> None:
    stream, done = worked(tmp_path, lopsided(), Rare(8, "force"))
    wrong = by_hand(stream, done, 0, everything=True)
    assert float((codes(done, 0)["w2"] != wrong["w2"]).float().mean()) > 0.02


def test_a_rare_expert_is_kept_if_the_recipe_says_so(tmp_path: Path) -> None:
    _, done = worked(tmp_path, lopsided(), Rare(8, "keep"))
    kept = {name for name in done.block.module.state_dict() if f"{EXPERTS}.3." in name}
    assert len(kept) == 3
    assert not any(name.startswith(f"{EXPERTS}.3.") for name in done.block.tensors)
    assert f"{EXPERTS}.2.w2" in done.block.tensors
    (taken,) = [each for each in done.decisions if each.code == "expert-unrouted"]
    assert taken.to == "kept"
    assert not [each for each in done.decisions if each.code == "never-ran"]


@pytest.mark.parametrize("form", ["int4", "nvfp4"])
def test_an_expert_that_nothing_reaches_is_rounded_and_named(form: str, tmp_path: Path) -> None:
    """Some layers route by themselves, and take no forced tokens."""
    scheme = SCHEME if form == "int4" else {"format": form}
    with patch("quantkit.calibrate.statistics.routed.force"):
        stream, done = worked(tmp_path, lopsided(), Rare(8, "force"), scheme)
    assert done.block.tensors.keys() >= {f"{EXPERTS}.3.{name}" for name in ("w1", "w3", "w2")}
    pair = torch.cat([stream.tensor(f"model.layers.0.{EXPERTS}.3.{name}.weight") for name in ("w1", "w3")])
    wanted = nearest(pair, WeightScheme.model_validate(scheme)).codes
    assert torch.equal(torch.cat([codes(done, 3)[name] for name in ("w1", "w3")]), wanted)
    reasons = [each.reason for each in done.decisions if each.where == f"model.layers.0.{EXPERTS}.3"]
    assert any("rounded to nearest" in reason for reason in reasons)


def test_the_original_stream_runs_forced_experts_too(tmp_path: Path) -> None:
    _, plain = worked(tmp_path / "1", lopsided(), Rare(8, "force"))
    _, drifted = worked(tmp_path / "2", lopsided(), Rare(8, "force"), correction=0.5)
    # o_proj's inputs have drifted, so the tokens that reach the experts have; the correction is seen in the codes
    assert not torch.equal(codes(plain, 3)["w1"], codes(drifted, 3)["w1"])


@pytest.fixture
def small_scores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 100)


def folder_of(model: nn.Module, folder: Path, tokenizer: Any) -> str:
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("small_scores")
@pytest.mark.parametrize(
    ("name", "layout", "symmetric"),
    [
        ("mixtral", "pack-quantized", True),
        ("qwen2", "dense", False),
        ("deepseek", "pack-quantized", True),
    ],
)
def test_a_bundle_loads_in_plain_transformers(
    name: str, layout: str, symmetric: bool, tmp_path: Path, byte_tokenizer: Any
) -> None:
    model = folder_of(zoo.mixture(name, vocab_size=258), tmp_path / "model", byte_tokenizer)
    chosen = recipe(
        "checkpoint",
        scheme={"weights": {**SCHEME, "symmetric": symmetric}},
        passes=("gptq",),
        export=[{"checkpoint": {"layout": layout}}],
        calibration={"set": "prose-en", "samples": 2, "tokens": 32, "expert_tokens": 20},
    )
    made = compile_model(Request.of(model, recipe=chosen, out=tmp_path / "out", speed=False))
    manifest = made.bundle.manifest
    checks = {check.name: check.value for check in manifest.checks}
    # the whole model, as from_pretrained loads it, gives the logits of the codes
    assert checks["reload.transformers"] == pytest.approx(0.0, abs=1e-6)
    names = {layer.name for layer in manifest.layers}
    assert all(f"model.layers.1.mlp.experts.{i}.{leaf}" in names for i in range(4) for leaf in leaves(name))
    assert not any(part.endswith(("mlp.gate", "shared_expert_gate")) for part in names)
    inside = [layer for layer in manifest.layers if ".experts." in layer.name]
    assert all(layer.routed is not None for layer in inside)
    assert not any(layer.routed is not None for layer in manifest.layers if layer not in inside)
    rare = {layer.name.rpartition(".")[0] for layer in inside if (layer.routed or 0) < 20}
    assert rare == {each.where for each in manifest.decisions if each.code == "expert-unrouted"}


def leaves(name: str) -> tuple[str, ...]:
    return ("w1", "w2", "w3") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero points": (
        {"overrides": [{"match": "*.experts.*", "weights": {"symmetric": False}}]},
        "an expert with zero points",
    ),
    "kept by name": ({"keep": ["*.experts.2.*"]}, "an expert in high precision"),
    "kept if rare": (
        {"calibration": {"set": "prose-en", "samples": 2, "tokens": 32, "experts": "keep"}, "passes": ["gptq"]},
        "keep may leave",
    ),
    "several schemes": (
        {"overrides": [{"match": "*.self_attn.*", "weights": {"format": "int8"}}]},
        "one of several schemes",
    ),
    "a graph": ({"export": [{"onnx": {}}]}, "belongs to a mixture of experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_could_load_is_refused_before_any_work(case: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    changes, value = REFUSED[case]
    model = folder_of(zoo.mixture("mixtral", vocab_size=258), tmp_path / "model", byte_tokenizer)
    chosen = recipe("checkpoint", **{"scheme": {"weights": SCHEME}, **changes})
    with pytest.raises(InputError, match=f"layout-unsupported.*{value}"):
        compile_model(Request.of(model, recipe=chosen, out=tmp_path / "out", speed=False))
    assert not (tmp_path / "out").exists()


def test_the_default_recipe_takes_a_mixture_without_zero_points(tmp_path: Path, byte_tokenizer: Any) -> None:
    """transformers reads packed experts without zero points alone; the ONNX is left out."""
    model = folder_of(zoo.mixture("mixtral", vocab_size=258), tmp_path / "model", byte_tokenizer)
    changes = ["scheme.weights.group=32", "calibration.samples=2", "calibration.tokens=32"]
    prepared = prepare(Request.of(model, recipe="awq-int4", changes=changes, target="cpu-x86", speed=False))
    assert [step.name for step in prepared.request.recipe.export] == ["checkpoint"]
    assert all(scheme.symmetric for scheme in prepared.layers.schemes.values())
    taken = {each.code: each for each in prepared.decisions}
    assert taken["export-left-out"].where == "onnx"
    assert "without zero points" in taken["experts-symmetric"].reason
    with pytest.raises(GateError, match=r"--set scheme.weights.symmetric=true"):
        refuse([taken["experts-symmetric"]])
    emulated = taken["emulated"].reason
    assert "smaller, not faster" in emulated
    assert "--recipe" not in emulated
    assert "--set" not in emulated
    asked = PlanQuestion(model, ("awq-int4",), target="cpu-x86", prompt=16, output=8, changes=changes)
    notes = [note.partition(":")[0] for note in plan(asked).candidates[0].notes]
    assert {"compile leaves onnx out", "compile sets scheme.weights.symmetric to true"} <= {*notes}


# class -> its sizes
SIZES: dict[str, dict[str, int]] = {
    "GptOssForCausalLM": {"intermediate_size": 64},
    "GraniteMoeHybridForCausalLM": {"intermediate_size": 64, "shared_intermediate_size": 64},
    "MixtralForCausalLM": {"intermediate_size": 64},
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 64, "intermediate_size": 64},
}
# class and recipe as first typed -> the layout that the first remedy leads to, and a tensor of it
REMEDIES: dict[tuple[str, str], tuple[str, str]] = {
    ("GptOssForCausalLM", "awq-int4"): ("mxfp4", "experts.gate_up_proj_blocks"),
    ("GptOssForCausalLM", "int8-dynamic"): ("mxfp4", "experts.gate_up_proj_blocks"),
    ("GraniteMoeHybridForCausalLM", "awq-int4"): ("pack-quantized", "experts.0.gate_proj.weight_packed"),
    ("GraniteMoeHybridForCausalLM", "int8-dynamic"): ("int-quantized", "experts.0.gate_proj.weight_scale"),
    ("MixtralForCausalLM", "fp8"): ("float-quantized", "experts.0.w1.weight_scale"),
    ("Qwen3MoeForCausalLM", "fp8"): ("float-quantized", "experts.0.gate_proj.weight_scale"),
    ("Qwen3MoeForCausalLM", "int8-dynamic"): ("int-quantized", "experts.0.gate_proj.weight_scale"),
}
_BRIEF = [("GptOssForCausalLM", "int8-dynamic"), ("MixtralForCausalLM", "fp8"), ("Qwen3MoeForCausalLM", "int8-dynamic")]


@pytest.mark.parametrize(("name", "typed"), beside(_BRIEF, [*REMEDIES]))
def test_the_first_remedy_of_a_refused_mixture_is_followed_to_its_end(
    name: str, typed: str, tmp_path: Path, small_scores: None
) -> None:
    sizes, (layout, tensor) = SIZES[name], REMEDIES[name, typed]
    shrink.tiny(name, tmp_path / "model", vocab_size=258, head_dim=16, **sizes)
    shrink.tokenizer_of_bytes("<s> $A").save_pretrained(tmp_path / "model")
    small = ["calibration.samples=2", "calibration.tokens=32", "gates.kl_max=null", "gates.top1_agreement_min=null"]
    how: dict[str, Any] = {"target": "cpu-x86", "speed": False, "out": tmp_path / "out"}
    with pytest.raises(InputError, match="layout-unsupported") as refused:
        compile_model(Request.of(str(tmp_path / "model"), recipe=typed, changes=small, **how))
    with pytest.raises(InputError) as foreseen:
        plan(PlanQuestion(str(tmp_path / "model"), (typed,), target="cpu-x86", prompt=16, output=8, changes=small))
    assert str(foreseen.value) == str(refused.value)
    first, *others = refused.value.remedy.split(", or ")
    assert "values in floats: no smaller" in " ".join(others) or "--recipe int4-symmetric" in others
    words = shlex.split(re.sub(r" \(.*\)$", "", first))
    given = list(zip(words[::2], words[1::2], strict=True))
    chosen = next((value for option, value in given if option == "--recipe"), typed)
    changes = [value for option, value in given if option == "--set"]
    made = compile_model(Request.of(str(tmp_path / "model"), recipe=chosen, changes=[*small, *changes], **how))
    assert all(check.ok for check in made.bundle.manifest.checks)
    config = json.loads((made.bundle.model_folder / "config.json").read_text())["quantization_config"]
    assert layouts.of(config).name.replace("_", "-") == layout
    assert any(tensor in key for key in load_file(made.bundle.model_folder / "model.safetensors"))


def test_the_first_linears_of_an_expert_have_one_global_scale_and_experts_their_own(tmp_path: Path) -> None:
    """vLLM fuses w1 and w3 of an expert, and takes the number of w1 for both."""
    _, done = worked(tmp_path / "m", zoo.mixture("mixtral"), Rare(), {"format": "nvfp4"})
    scales = {name: float(tensor.global_scale) for name, tensor in done.block.tensors.items()}  # type: ignore[arg-type]
    for number in range(4):
        assert scales[f"{EXPERTS}.{number}.w1"] == scales[f"{EXPERTS}.{number}.w3"]
    assert len({scales[f"{EXPERTS}.{number}.{name}"] for number in range(4) for name in ("w1", "w2")}) == 8
