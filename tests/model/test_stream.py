"""Streaming: a model run block by block equals the model, over every architecture, from disk and in memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.source.weights import Weights
from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.calls import primary
from quantkit.model.streaming.stream import LoadedModel, StreamedModel, set_tensor
from quantkit.model.structure.traced import find_blocks


@pytest.fixture(scope="module", params=zoo.ARCHITECTURES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    """(name, model, folder it was saved to)."""
    folder = tmp_path_factory.mktemp("zoo") / request.param
    model = zoo.tiny(request.param)
    model.save_pretrained(folder)  # type: ignore[operator]
    return request.param, model, folder


def answer(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits, or an encoder's last hidden states."""
    with torch.no_grad():
        output = model(input_ids=ids)
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-6 * expected.abs().max())


def test_streamed_from_disk_is_the_model(saved: tuple[str, nn.Module, Path]) -> None:
    _, model, folder = saved
    ids = zoo.ids(3, 20)
    stream = StreamedModel(open_model(str(folder)))
    assert len(stream.block_names) == 3
    whole = stream.run(ids, chunk=3)
    # a last chunk that is smaller than the others is called with its own masks
    assert close(stream.run(ids, chunk=2), whole)
    assert close(stream.run(ids, chunk=1), whole)
    head = Head(stream.rest(), stream.paths, stream.flow)
    assert close(head(whole, ids), answer(model, ids))
    assert close(head(whole[1:2], ids[1:2]), answer(model, ids[1:2]))


def test_a_head_alone_needs_no_run(saved: tuple[str, nn.Module, Path]) -> None:
    """Hidden states that were kept from before are as good as fresh ones."""
    _, model, folder = saved
    ids = zoo.ids(2, 9, seed=5)
    kept = StreamedModel(open_model(str(folder))).run(ids)
    later = StreamedModel(open_model(str(folder)))
    assert close(later.answers_of(None, ids, kept).all(), answer(model, ids))


def test_loaded_in_memory_is_the_model(saved: tuple[str, nn.Module, Path]) -> None:
    _, model, folder = saved
    ids = zoo.ids(3, 20, seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = answer(model, ids)
    loaded, stream = LoadedModel(model), StreamedModel(open_model(str(folder)))
    assert loaded.block_names == stream.block_names
    for chunk in (3, 2):
        calls = loaded.begin(ids, chunk)
        hidden = calls.hidden
        for index in range(len(loaded.block_names)):
            hidden = calls.run_all(loaded.load(index), index, hidden)
        assert close(hidden, stream.run(ids, chunk))
    # recording has put everything back
    assert torch.equal(answer(model, ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_blocks_come_one_at_a_time_with_their_own_weights(saved: tuple[str, nn.Module, Path]) -> None:
    _, model, folder = saved
    stream = StreamedModel(open_model(str(folder)))
    for index, name in enumerate(stream.block_names):
        block = stream.load(index)
        assert not block.training
        for key, value in model.get_submodule(name).state_dict().items():
            assert torch.equal(block.state_dict()[key], value)
    # the skeleton stays without weights
    assert all(parameter.is_meta for parameter in stream.skeleton.parameters())
    first, second = stream.load(0), stream.load(0)
    next(first.parameters()).data.zero_()
    assert bool(next(second.parameters()).any())


def test_the_rest_holds_everything_but_the_blocks(saved: tuple[str, nn.Module, Path]) -> None:
    name, model, folder = saved
    stream = StreamedModel(open_model(str(folder)))
    rest = stream.rest()
    outside = {key: value for key, value in rest.named_parameters() if not key.startswith(tuple(stream.block_names))}
    assert outside
    for key, value in outside.items():
        assert torch.equal(value, model.get_parameter(key))
    if name in ("llama-tied", "gemma2", "gemma3", "gpt2", "opt"):
        tied = rest.get_output_embeddings().weight  # type: ignore[operator]
        assert tied.data_ptr() == rest.get_input_embeddings().weight.data_ptr()  # type: ignore[operator]


def test_ends_that_are_alive_together_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path / "m")  # type: ignore[operator]
    stream, ids = StreamedModel(open_model(str(tmp_path / "m"))), zoo.ids(2, 8)
    assert stream.flow
    read: list[str] = []
    real = Weights.read

    def spy(weights: Weights, name: str, *how: Any) -> torch.Tensor:
        read.extend([] if ".layers." in name else [name])
        return real(weights, name, *how)

    monkeypatch.setattr(Weights, "read", spy)
    answers = stream.on(stream.device).answers(ids)
    outside = sorted({stream.files[name] for name in stream.rest_names()})
    assert sorted(read) == outside
    assert torch.equal(stream.answers(ids).all(), answers.all())
    assert sorted(read) == outside, "the answers still hold them"
    del answers
    gc.collect()
    ends, rest = stream.ends(), stream.rest()
    assert sorted(read) == sorted(3 * outside)
    rest.get_parameter("model.norm.weight").data.zero_()
    assert bool(ends.get_parameter("model.norm.weight").any())


def test_bfloat16_weights_are_computed_in_float32(tmp_path: Path) -> None:
    model = zoo.tiny("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path / "half")))
    ids = zoo.ids(2, 8)
    found = stream.run(ids)
    assert found.dtype == torch.float32
    head = Head(stream.rest(), stream.paths, stream.flow)
    plain = type(model).from_pretrained(tmp_path / "half", dtype=torch.float32).eval()  # type: ignore[attr-defined]
    assert close(head(found, ids), answer(plain, ids))


def test_a_transform_reaches_every_block_and_the_rest(tmp_path: Path) -> None:
    class Doubling:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def block(self, index: int, block: nn.Module) -> None:
            self.seen.append(index)
            for parameter in block.parameters():
                parameter.data = parameter.data * 2

        def rest(self, model: nn.Module) -> None:
            self.seen.append("rest")
            model.get_parameter("model.norm.weight").data.mul_(3)

    model = zoo.tiny("llama")
    model.save_pretrained(tmp_path / "m")  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path / "m")))
    doubling = Doubling()
    stream.transforms.append(doubling)
    weight = stream.load(1).get_parameter("self_attn.q_proj.weight")
    assert torch.equal(weight, model.get_parameter("model.layers.1.self_attn.q_proj.weight") * 2)
    rest = stream.rest()
    assert torch.equal(stream.value(rest, "model.norm.weight"), model.get_parameter("model.norm.weight") * 3)
    assert doubling.seen == [1, "rest"]


class Nested(nn.Module):
    """Two lists of like modules; the larger one holds the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
        self.outer = nn.Module()
        self.outer.big = nn.ModuleList([nn.Linear(9, 9) for _ in range(2)])
        self.mixed = nn.ModuleList([nn.Linear(99, 99), nn.ReLU()])


def test_blocks_are_the_list_of_like_modules_with_most_of_the_weights() -> None:
    assert find_blocks(Nested()) == "outer.big"
    with pytest.raises(InputError, match=r"\[blocks-not-found\]"):
        find_blocks(nn.Sequential(nn.Linear(3, 3)))


def test_small_helpers() -> None:
    hidden = torch.ones(1)
    assert primary((hidden, None)) is hidden
    assert primary(hidden) is hidden
    module = nn.Sequential(nn.BatchNorm1d(2))
    set_tensor(module, "0.weight", torch.full((2,), 3.0))
    set_tensor(module, "0.running_mean", torch.full((2,), 4.0))
    assert isinstance(module[0].weight, nn.Parameter)
    assert module.state_dict()["0.weight"].tolist() == [3.0, 3.0]
    assert module.state_dict()["0.running_mean"].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("name", ["CpmAntForCausalLM", "ProphetNetForCausalLM"])
def test_parts_of_an_answer_where_hidden_states_are_not_of_one_token_each(name: str, tmp_path: Path) -> None:
    """A prompt of the model's own before the text; a stream more for each n-gram."""
    shrink.tiny(name, tmp_path)
    ids = shrink.ids(2)
    streamed = StreamedModel(open_model(str(tmp_path)))
    calls = streamed.through(ids, 2)
    assert calls.hidden.shape[1] > ids.shape[1]
    answers = streamed.answers_of(calls, ids)
    true = shrink.truth(tmp_path, ids)
    for row in range(2):
        found = torch.cat([answers(row, part) for part in (slice(0, 7), slice(7, None))])
        assert float((found - true[row]).abs().max()) < 1e-4


class Stack(nn.Module):
    """A list of like layers that takes no token ids: no transformer, so the whole of it is one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_transformer_is_its_layers() -> None:
    model = zoo.tiny("llama")
    model.train()
    loaded = LoadedModel(model)
    assert loaded.block_names == [f"model.layers.{index}" for index in range(3)]
    assert loaded.load(2) is model.get_submodule("model.layers.2")
    assert not model.training


def test_a_module_without_token_ids_is_one_block() -> None:
    for module in (Stack(), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(6, 3)):
        loaded = LoadedModel(module)
        assert loaded.block_names == [""]
        assert loaded.load(0) is module
        x = torch.randn(5, 6)
        calls = loaded.begin(x, 2)
        assert torch.equal(calls.hidden, x)
        alone = calls.forward_row(module, 0, x[3:4], 3)
        assert torch.allclose(alone, module(x[3:4]), atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(calls.run_all(module, 0, calls.hidden), module(x), atol=1e-6)
