"""The loop over blocks: the next block sees the quantized ones, resuming is the same, folds are searched once."""

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from quantkit.errors import InputError
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure import fold
from quantkit.passes import load_pass
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.blocks.work import PassRun, Worked, check_order, looks_at_data, work
from quantkit.planning.compiling import chunk_size
from quantkit.recipe import Recipe


def steps(*names: str) -> list[PassRun]:
    """By name; `gptq+` corrects for the drift of its inputs, and so looks at the original stream."""
    found = [(load_pass(name.removesuffix("+")), name.endswith("+")) for name in names]
    gptq = {False: {"shrink": 0.25}, True: {"shrink": 0.25, "correction": 0.5}}
    return [PassRun(each, each.Settings(**(gptq[more] if each.name == "gptq" else {}))) for each, more in found]


def run(model: torch.nn.Module, names: tuple[str, ...], ids: Tensor | None, **options: Any) -> list[Worked]:
    recipe = Recipe.from_dict({"summary": "", "scheme": {"weights": {"format": "int4"}}, "passes": ["rtn"]}, name="x")
    stream = LoadedModel(model)
    layers = lay_out(recipe, model, stream.block_names, "float32")
    return list(
        work(
            stream,
            steps(*names),
            layers.schemes,
            ids,
            probe_ids=zoo.ids(2, 12, seed=9),
            widest=layers.widest,
            dtype=torch.float32,
            **options,
        )
    )


def test_the_next_block_sees_what_the_quantized_ones_put_out() -> None:
    model, ids = zoo.tiny("llama"), zoo.ids(4, 16)
    calls = LoadedModel(zoo.tiny("llama")).begin(ids, 4)
    done = run(model, ("gptq",), ids)
    hidden = calls.hidden
    for index, worked in enumerate(done):
        hidden = calls.run_all(model.get_submodule(f"model.layers.{index}"), index, hidden)
        assert worked.hidden is not None
        assert torch.allclose(worked.hidden, hidden, atol=1e-5)
        assert worked.block.index == index
        assert worked.errors.keys() == {f"model.layers.{index}.{name}" for name in worked.block.tensors}
        assert all(0 < error < 0.1 for error in worked.errors.values())


@pytest.mark.parametrize("names", [("gptq",), ("fold_norms", "awq", "gptq"), ("awq", "rtn"), ("gptq+",)])
def test_small_chunks_choose_next_to_the_same(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = zoo.ids(5, 16)
    whole = run(zoo.tiny("llama"), names, ids)
    monkeypatch.setattr("quantkit.planning.compiling.ACTIVATION_BYTES", 1)
    parts = run(zoo.tiny("llama"), names, ids)
    # a sum in another order may tip a code over, which then tips others: what stays is the output
    first, again = whole[0].block.tensors, parts[0].block.tensors
    assert all(float((first[name].codes == again[name].codes).float().mean()) > 0.95 for name in first)
    for one, other in zip(whole, parts, strict=True):
        assert one.hidden is not None
        assert other.hidden is not None
        assert float((one.hidden - other.hidden).norm() / one.hidden.norm()) < 0.05


@pytest.mark.parametrize("gptq", ["gptq", "gptq+"])
def test_going_on_from_a_finished_block_is_the_same(gptq: str) -> None:
    ids = zoo.ids(4, 16)
    whole = run(zoo.tiny("llama"), ("fold_norms", gptq), ids)
    states = {"hidden": whole[1].hidden, "original": whole[1].original}
    rest = run(zoo.tiny("llama"), ("fold_norms", gptq), ids, start=2, **states)
    (last,) = rest
    assert last.block.name == "model.layers.2"
    for name, tensor in whole[2].block.tensors.items():
        assert torch.equal(tensor.codes, last.block.tensors[name].codes)
    assert torch.equal(whole[2].hidden, last.hidden)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunked", [False, True])
def test_the_original_stream_is_what_the_float_model_puts_out(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr("quantkit.planning.compiling.ACTIVATION_BYTES", 1)
    ids = zoo.ids(5, 16)
    plain = LoadedModel(zoo.tiny("llama"))
    calls = plain.begin(ids, 5)
    expected = calls.hidden
    # folds reach the original stream too: its inputs are scaled like those of the block, its outputs are the same
    for index, worked in enumerate(run(zoo.tiny("llama"), ("fold_norms", "awq", "gptq+"), ids)):
        expected = calls.run_all(plain.load(index), index, expected)
        assert worked.original is not None
        assert worked.hidden is not None
        assert torch.allclose(worked.original, expected, atol=1e-4)
        assert not torch.allclose(worked.hidden, expected, atol=1e-2)
    assert all(worked.original is None for worked in run(zoo.tiny("llama"), ("gptq",), ids))


def test_passes_that_look_at_no_data_run_no_data() -> None:
    assert not looks_at_data(steps("rtn", "fold_norms", "fuse_qkv"))
    assert looks_at_data(steps("rtn", "gptq"))
    assert looks_at_data(steps("awq"))
    for passes, looks in (("rtn", False), ("gptq", True)):
        done = run(zoo.tiny("llama"), (passes,), zoo.ids())
        assert [(worked.hidden is not None, worked.calls is not None) for worked in done] == [(looks, looks)] * 3


def test_folds_are_searched_once_and_proved_on_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"find": 0, "prove_all": 0}
    for name in counts:
        plain = getattr(fold, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(fold, name, counted)
    run(zoo.tiny("llama"), ("rtn",), zoo.ids(2, 8))
    assert counts == {"find": 0, "prove_all": 0}, "nobody asked for folds"
    run(zoo.tiny("llama"), ("fold_norms", "rtn"), zoo.ids(2, 8))
    assert counts["find"] == 1
    assert counts["prove_all"] >= 2


def test_a_block_that_is_unlike_the_last_is_searched_anew() -> None:
    """The second block reads its norm twice: what held on the first does not hold there."""
    model, ids = zoo.tiny("llama"), zoo.ids(4, 12)

    class Leaky(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.5 * x

    model.get_submodule("model.layers.1.mlp").__class__ = Leaky
    with torch.no_grad():
        before = model(input_ids=ids)[0]
        done = run(model, ("fold_norms", "awq", "rtn"), ids)
        assert float((model(input_ids=ids)[0] - before).norm() / before.norm()) < 0.3
    assert "mlp.gate_proj" in done[0].block.folds
    assert "mlp.gate_proj" not in done[1].block.folds
    assert "outputs would differ" in done[1].block.declined["mlp.gate_proj"]
    assert "mlp.gate_proj" in done[2].block.folds
    assert any(each.where == "model.layers.1.mlp.gate_proj" for each in done[1].decisions)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("gptq", "fold_norms"), "fold_norms"),
        (("rtn", "awq"), "awq"),
        (("rtn", "rtn"), "rtn"),
        (("fuse_qkv", "rtn"), "fuse_qkv"),
    ],
)
def test_an_order_in_which_a_pass_lacks_what_it_needs(names: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(InputError) as caught:
        check_order(steps(*names))
    assert caught.value.code == "pass-order"
    assert caught.value.where == f"passes: {wrong}"


def test_orders_that_make_sense() -> None:
    for names in (("fold_norms", "awq", "gptq", "fuse_qkv"), ("awq", "fold_norms", "rtn"), ("rtn",), ()):
        check_order(steps(*names))


def test_a_forward_takes_what_its_memory_allows() -> None:
    assert chunk_size(64, 128) > 1000
    assert chunk_size(1536, 512) == 768 * 2**20 // (1536 * 512 * 4 * 6)
    assert chunk_size(10**9, 4096) == 1
