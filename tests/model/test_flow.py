"""Which way hidden states flow: held against the model's own forward, on classes whose blocks depend on each other."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import Tensor, nn
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import LoadedModel, StreamedModel

# class -> whether its forward has to run itself
CLASSES = {
    "LlamaForCausalLM": False,
    "GraniteMoeForCausalLM": False,  # makes a cache unless its config says otherwise
    "BloomForCausalLM": False,  # alibi has a row for each head of each sequence
    "DiffLlamaForCausalLM": False,  # draws parameters even on the meta device
    "Gemma3nForCausalLM": True,  # per-layer embeddings, shared keys, four streams of hidden states
    "Gemma4ForCausalLM": True,
    "T5EncoderModel": True,  # the first block makes the relative positions of all others
    "AlbertModel": False,  # one block, called again and again
}


@pytest.fixture(scope="module", params=CLASSES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("flow") / request.param
    shrink.tiny(request.param, folder)
    return request.param, folder


@torch.no_grad()
def own(folder: Path, ids: Tensor) -> Tensor:
    """Logits or last hidden states of plain transformers."""
    model = shrink.loaded(folder)
    runs = model if type(model).__name__.endswith("CausalLM") else model.base_model
    return shrink.answer(runs, ids)  # type: ignore[arg-type]


def test_chunks_of_other_content_are_called_with_their_own_arguments(saved: tuple[str, Path]) -> None:
    name, folder = saved
    ids = shrink.ids(5)
    stream = StreamedModel(open_model(str(folder)))
    expected = own(folder, ids)
    found = stream.answers(ids, chunk=2).all()
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert stream.flow.live == CLASSES[name]
    assert len(stream.visits) == (4 if name == "AlbertModel" else len(stream.block_names))


def test_a_head_is_given_what_the_models_own_forward_gives_it(saved: tuple[str, Path]) -> None:
    name, folder = saved
    if not name.endswith("CausalLM"):
        return
    ids, seen = shrink.ids(3), list[Tensor]()
    stream, model = StreamedModel(open_model(str(folder))), shrink.loaded(folder)
    assert stream.head is not None
    model.get_submodule(stream.head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        shrink.answer(model, ids)  # type: ignore[arg-type]
    answers = stream.answers_of(stream.through(ids, chunk=2), ids)
    found = torch.stack([answers.given(stream.head, index) for index in range(len(ids))])
    expected = torch.cat(seen).reshape(found.shape)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_row_by_itself_is_the_row_of_its_chunk(saved: tuple[str, Path]) -> None:
    _, folder = saved
    stream = StreamedModel(open_model(str(folder)))
    calls = stream.begin(shrink.ids(5), 2)
    block, whole = stream.load(0), calls.hidden
    outputs = calls.run_all(block, 0, whole)
    with torch.no_grad():
        for row in (0, 3, 4):
            alone = calls.forward_row(block, 0, whole[row : row + 1], row)
            assert float((alone - outputs[row]).abs().max()) < 1e-5 * float(outputs.abs().max())


class Deep(nn.Module):
    """The second block reads what the first one was given as well: that cannot be noted beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        first = self.table(input_ids)
        second = self.layers[0](first)
        return (self.layers[1](second + first),)


class Backwards(Deep):
    """Its blocks run in another order than they stand."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.layers[0](self.layers[1](self.table(input_ids))),)


def test_what_stands_between_blocks_is_the_models_own() -> None:
    model = Deep().eval()
    ids = torch.arange(12).reshape(3, 4)
    loaded = LoadedModel(model)
    calls = loaded.begin(ids, 2)
    assert loaded.flow.live
    hidden = calls.hidden
    for stage in range(2):
        hidden = calls.pass_on(stage, calls.run_all(loaded.load(stage), stage, hidden))
    with torch.no_grad():
        assert torch.allclose(hidden, model(ids)[0], atol=1e-6)


def test_blocks_in_another_order_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        LoadedModel(Backwards()).begin(torch.arange(8).reshape(2, 4), 2)
    assert caught.value.code == "stream-unsupported"
    assert "order" in str(caught.value)


def test_a_model_in_memory_is_left_as_it_was() -> None:
    model = zoo.tiny("llama")
    model.config.use_cache = True  # type: ignore[union-attr, assignment]
    before = [type(child) for child in model.modules()]
    LoadedModel(model).begin(zoo.ids(3, 8), 2)
    assert [type(child) for child in model.modules()] == before
    assert model.config.use_cache is True  # type: ignore[union-attr]


class Hungry(Deep):
    """There is no memory for what it wants."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.layers[1](self.layers[0](self.table(input_ids)) + torch.empty(1 << 50)),)


def test_no_memory_does_not_make_a_model_live_or_unsupported() -> None:
    with pytest.raises(InputError) as caught:
        LoadedModel(Hungry()).begin(torch.arange(8).reshape(2, 4), 2)
    assert caught.value.code == "out-of-memory"


class Configured(Deep):
    """Its blocks hold the user's config, as those of many classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        for block in self.layers:
            block.config = self.config


@pytest.mark.parametrize("first", [0, 1])
def test_a_users_config_is_left_alone_in_whatever_order_live_calls_end(first: int) -> None:
    model = Configured().eval()
    ids = torch.arange(12).reshape(3, 4)
    begun = [LoadedModel(model).begin(ids, 2) for _ in range(2)]
    assert all(calls.live for calls in begun)
    for calls in begun:  # whoever runs the model meanwhile finds it as it was
        assert calls.model.config.use_cache is False  # type: ignore[attr-defined]
        assert model.config.use_cache is True
    del calls
    del begun[first]
    gc.collect()
    assert model.config.use_cache is True
    begun.clear()
    gc.collect()
    assert model.config.use_cache is True
