"""The whole block loop on a GPU that is not there (`fake_gpu`): all of it lies there, and nothing is waited for.

What a value decides is waited for: whether any Hessian of a block had no factor, once a block, and whether its folds
hold, where it has any. What is found on the first block alone (what outputs are added to) is waited for there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import fake_gpu
import pytest
import torch
import zoo
from thorough import beside
from zoo import shrink

# what these make when they are imported is not to be made of fake tensors
import quantkit.passes.solvers.awq
import quantkit.passes.solvers.gptq
import quantkit.passes.solvers.hqq
import quantkit.passes.solvers.smoothquant  # noqa: F401
from quantkit.errors import InputError
from quantkit.model import finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.live import LiveCalls
from quantkit.model.streaming.stream import LoadedModel, StreamedModel, set_tensor
from quantkit.model.structure import fold, traced
from quantkit.passes import pass_of
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.blocks.work import Known, PassRun, Worked, work
from quantkit.recipe import Recipe

FAILED = "calibrate/statistics/collected.py:failed"
LOOKED = "calibrate/statistics/scales.py:look"
INVERTED = "passes/solvers/gptq_grid.py:inverted"
FACTORED = "passes/solvers/factor.py:awaited"
PROVED = "model/structure/traced.py:__torch_dispatch__"
# operators that a block may launch, and those of them that are not its own forward
LAUNCHES, BESIDES = 200, 110
FORWARD = "model/streaming/calls.py:run"
# of recipes whose blocks run twice, how many more they may launch: those of what an original stream says
TWICE = {"awq-int4": 0, "int4-best": 22}
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt", "bert"]


def on_gpu(
    model: torch.nn.Module,
    recipe: str,
    *changes: str,
    planted: dict[torch.dtype, object] | None = None,
    graded: bool = False,
) -> tuple[list[Worked], list[Counter[str]], list[list[str]]]:
    """The blocks, how many operators which function has launched on each, and what each has waited for."""
    chosen = Recipe.load(recipe, [*changes])
    ids, probe = zoo.ids(4, 16), zoo.ids(2, 8)
    stream = fake_gpu.FakeStream(model, ids, probe)
    layers = lay_out(chosen, model, stream.block_names, "float32")
    steps = [PassRun(pass_of(step), step.settings) for step in chosen.passes]
    real = LoadedModel(model)
    call, block = real.begin(probe, 2).call(0), real.load(0)
    folds, declined = fold.find(block, traced.trace(block, lambda: call(block)), call)
    worked, launched, waited = [], [], []
    with fake_gpu.gpu(planted) as watch:
        there = {name: replace(each, index=fake_gpu.like(each.index)) for name, each in folds.items()}
        for each in work(
            stream,
            steps,
            layers.schemes,
            fake_gpu.like(ids),
            probe_ids=fake_gpu.like(probe),
            widest=layers.widest,
            dtype=torch.bfloat16,
            activations=layers.activations,
            cache=chosen.scheme.kv_cache,
            known=Known(folds=(there, declined)),
            gradients=(lambda _: gradients(block)) if graded else None,
        ):
            counts, waits = watch.taken()
            worked.append(each)
            launched.append(counts)
            waited.append(waits)
    return worked, launched, waited


def gradients(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the linear behind the attention: thousands of operators solve it, and each is traced."""
    linears = [(name, one) for name, one in block.named_modules() if name.endswith("o_proj")]
    return {name: fake_gpu.like(torch.zeros(4, 16, one.out_features, dtype=torch.bfloat16)) for name, one in linears}


def demand_on_gpu(worked: list[Worked]) -> None:
    for each in worked:
        assert each.block.tensors
        for tensor in each.block.tensors.values():
            kept = [tensor.codes, tensor.scale, *([] if tensor.zero is None else [tensor.zero])]
            assert {part.device for part in kept} == {fake_gpu.CUDA}
        assert {value.device for value in each.block.module.parameters()} == {fake_gpu.CUDA}
        assert each.hidden is None or each.hidden.device == fake_gpu.CUDA


@pytest.mark.parametrize("architecture", beside(["llama", "gemma3", "gpt2"], ARCHITECTURES))
def test_gptq_waits_once_a_block_and_takes_few_launches(architecture: str) -> None:
    worked, launched, waited = on_gpu(model := zoo.tiny(architecture), "gptq-int4", "scheme.weights.group=32")
    demand_on_gpu(worked)
    assert waited == [[FAILED]] * len(worked)
    for counts in launched:
        assert 0 < counts.total() <= LAUNCHES
        assert 0 < counts.total() - counts[FORWARD] <= BESIDES
    # traced without values, it is what a run finds
    real = LoadedModel(model)
    call, block = real.begin(zoo.ids(2, 8), 2).call(0), real.load(0)
    assert worked[0].block.structure == traced.trace(block, lambda: call(block))


def test_codes_of_four_bits_are_joined_on_the_card_before_they_are_copied() -> None:
    worked, _, _ = on_gpu(zoo.tiny("llama", num_hidden_layers=2), "gptq-int4", "scheme.weights.group=32")
    with fake_gpu.gpu() as watch:
        tensors = {
            name: tensor.replace(codes=fake_gpu.like(tensor.codes), scale=fake_gpu.like(tensor.scale), zero=None)
            for name, tensor in worked[1].block.tensors.items()
        }
        stored = finished.flat(tensors, {})
        launched, waited = watch.taken()
    assert not waited
    assert launched["model/finished.py:_joined"] <= 4 * len(tensors)
    assert {value.device for value in stored.values()} == {fake_gpu.CUDA}
    codes = sum(value.nbytes for name, value in stored.items() if "::joined" in name)
    assert 2 * codes == sum(tensor.codes.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("architecture", beside(["gemma3", "gpt2"], ["gemma3", "gpt2", "opt"]))
def test_awq_takes_few_launches_besides_two_forwards(architecture: str) -> None:
    """A tied value path, a norm that adds 1, biases, weights that lie the other way."""
    worked, launched, waited = on_gpu(zoo.tiny(architecture), "awq-int4", "scheme.weights.group=32")
    demand_on_gpu(worked)
    assert waited[1:] == [[FAILED]] * 2
    for counts in launched[1:]:
        assert counts.total() - counts[FORWARD] <= BESIDES


def test_what_is_not_finite_is_an_error_when_the_block_is_done() -> None:
    # the factor, then, where the block is done again, the inputs themselves
    planted = {torch.float32: torch.nan, torch.float64: torch.nan}
    with pytest.raises(InputError, match=r"activations-nonfinite.*model\.layers\.0\.self_attn\.q_proj"):
        on_gpu(zoo.tiny("llama"), "gptq-int4", "scheme.weights.group=32", planted=planted)


@pytest.mark.parametrize(
    ("recipe", "changes", "waits"),
    [
        ("awq-int4", ["scheme.weights.group=32"], [FAILED]),
        ("int8-dynamic", [], [FAILED]),
        ("int4-best", ["scheme.weights.group=32"], [FAILED]),
        pytest.param("int3", ["scheme.weights.group=32"], [FAILED], marks=pytest.mark.thorough),
        pytest.param("int4-fast", ["scheme.weights.group=32"], [FAILED], marks=pytest.mark.thorough),
        ("nf4", ["scheme.weights.group=32"], [FAILED]),
        ("fp8", [], [FAILED]),
        pytest.param("nvfp4", [], [FAILED], marks=pytest.mark.thorough),
        pytest.param("mxfp4", [], [FAILED], marks=pytest.mark.thorough),
        ("int8+kv-fp8", ["passes=[gptq: {correction: 0}]"], [FAILED, LOOKED]),
        ("rtn-int4", ["scheme.weights.group=32"], []),
        pytest.param("int8-weights", [], [], marks=pytest.mark.thorough),
    ],
)
def test_recipes_wait_for_what_decides(recipe: str, changes: list[str], waits: list[str]) -> None:
    # whatever is compared is equal: outputs are then added to something, which is counted
    planted: dict[torch.dtype, object] = {torch.bool: recipe == "int4-best"}
    worked, launched, waited = on_gpu(zoo.tiny("llama", num_hidden_layers=2), recipe, *changes, planted=planted)
    demand_on_gpu(worked)
    if recipe in TWICE:  # the block runs twice
        assert launched[-1].total() <= LAUNCHES + TWICE[recipe]
        assert launched[-1].total() - launched[-1][FORWARD] <= BESIDES + TWICE[recipe]
    assert launched[-1].total() <= 2000
    # a list of values is asked for one by one here, and is one wait
    assert all([*dict.fromkeys(each)] == waits for each in waited[1:])
    assert len(waited) > 1


def test_gradients_are_used_on_the_card() -> None:
    planted: dict[torch.dtype, object] = {torch.bool: True}
    how = {"planted": planted, "graded": True}
    worked, _, waited = on_gpu(zoo.tiny("llama", num_hidden_layers=2), "int4-best", "scheme.weights.group=32", **how)
    demand_on_gpu(worked)
    assert {*waited[1]} == {FAILED, FACTORED, INVERTED}


def test_folds_are_proved_again_where_another_thing_is_computed() -> None:
    model = zoo.tiny("llama")
    model.get_submodule("model.layers.2.post_attention_layernorm").variance_epsilon = 1e-3  # type: ignore[assignment]
    _, _, waited = on_gpu(model, "rtn-int4", "scheme.weights.group=32", "passes=[fold_norms, rtn]")
    assert [PROVED in each for each in waited] == [True, False, True]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_folds_are_found_there_too(architecture: str) -> None:
    ids = zoo.ids(2, 8)
    stream = fake_gpu.FakeStream(zoo.tiny(architecture), ids)
    with fake_gpu.gpu({torch.bool: True}):  # whatever is asked holds: that folds hold at all is asked elsewhere
        call, block = stream.begin(fake_gpu.like(ids), 2).call(0), stream.load(0)
        structure = traced.trace(block, lambda: call(block))
        folds, declined = fold.find(block, structure, call)
    assert set(folds) == {group.name for group in structure.groups} and not declined
    assert {each.index.device for each in folds.values()} == {fake_gpu.CUDA}


def test_a_live_model_stays_there(tmp_path: Path) -> None:
    shrink.tiny("T5EncoderModel", tmp_path / "model")
    stream = StreamedModel(open_model(str(tmp_path / "model")))
    assert stream.flow.live
    rest, block, ids = stream.rest(), stream.load(0), shrink.ids(5)
    with fake_gpu.gpu():
        for module in (rest, block):
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if not value.is_meta:
                    set_tensor(module, name, fake_gpu.like(value))
        calls = LiveCalls(rest, stream.paths, stream.visits, fake_gpu.like(ids), stream.flow.batch, stream.runs(rest))
        hidden = calls.pass_on(0, calls.run_all(block, 0, calls.hidden))
    assert calls.device == hidden.device == fake_gpu.CUDA


def test_what_lies_on_the_processor_is_seen() -> None:
    with fake_gpu.gpu(), pytest.raises(RuntimeError, match="device"):
        torch.zeros(2) + torch.zeros(2, device=fake_gpu.CUDA)


def test_a_read_of_a_device_value_is_counted() -> None:
    with fake_gpu.gpu() as watch:
        float(torch.zeros(2, device=fake_gpu.CUDA).sum())
        bool((torch.zeros(2, device=fake_gpu.CUDA) > 0).any())
    assert len(watch.waits) == 2


def test_weights_that_were_looked_at_on_opening_are_read_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through page-locked pieces, each on its way while the next is read."""
    zoo.tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    weights = open_model(str(tmp_path)).weights
    weights.largest(weights.entries)
    pieces: list[int] = []
    monkeypatch.setattr(
        "quantkit.model.source.weights._filled", lambda _, raw, entry: pieces.append(raw.numel()) or raw
    )
    monkeypatch.setattr("quantkit.model.device._PIECE", 4096)
    for opened, waits in ((weights, 0), (replace(weights, magnitudes={}), len(weights.entries))):
        pieces.clear()
        with fake_gpu.gpu({torch.bool: True}) as watch:
            assert {opened.read(name, fake_gpu.CUDA).device for name in weights.entries} == {fake_gpu.CUDA}
            launched, waited = watch.taken()
        assert len(waited) == waits
        assert max(pieces) <= 4096 and sum(pieces) == weights.total_bytes()
        assert launched["model/device.py:filled"] == len(pieces)
