"""Which way hidden states flow: held against the model's own forward, on classes whose blocks depend on each other."""

import errno
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.model.source.open import open_model
from quantkit.model.streaming import answers as answering
from quantkit.model.streaming import calls as calling
from quantkit.model.streaming.answers import Answers
from quantkit.model.streaming.calls import Calls, Shelf, held
from quantkit.model.streaming.live import LiveCalls
from quantkit.model.streaming.stream import LoadedModel, StreamedModel

pytestmark = pytest.mark.usefixtures("own_cache")

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
    with pytest.raises(InputError, match=r"\[out-of-memory\]"):
        LoadedModel(Hungry()).begin(torch.arange(8).reshape(2, 4), 2)


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


def test_torchs_own_error_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    said = out_of_memory("a model", caught.value)
    assert (said.code, said.where) == ("out-of-memory", "a model")
    assert "allocate" in str(said) or "memory" in str(said)


def test_what_was_raised_from_it_is_too() -> None:
    with pytest.raises(ValueError, match="a class") as caught:
        try:
            torch.empty(1 << 50)
        except RuntimeError as problem:
            raise ValueError("a class made something of it") from problem
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOMEM, "no memory")]
)
def test_every_out_of_memory_error_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert out_of_memory("x", error).value


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "full"), ValueError("1")])
def test_other_trouble_is_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def is_in_file(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, hidden: Tensor, own: Tensor, mask: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden + own)) * mask


class PerLayer(nn.Module):
    """Each block is given embeddings of its own, and all of them one mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.tables = nn.Embedding(32, 64), nn.Embedding(32, 3 * 64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        hidden, tables = self.table(input_ids), self.tables(input_ids).unflatten(-1, (3, 64))
        mask = torch.linspace(0, 1, input_ids.shape[1] * 64).reshape(input_ids.shape[1], 64)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, tables[:, :, index], mask)
        return (hidden,)


def through(loaded: LoadedModel, calls: Calls) -> Tensor:
    hidden = calls.hidden
    for stage, index in enumerate(loaded.visits):
        hidden = calls.pass_on(stage, calls.run_all(loaded.load(index), stage, hidden))
    return hidden


def test_what_chunks_are_given_lies_in_files_but_for_what_all_of_them_share(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = PerLayer().eval(), torch.arange(80).remainder(31).reshape(5, 16)
    loaded = LoadedModel(model)
    expected = through(loaded, loaded.begin(ids, 2))
    monkeypatch.setattr(calling, "ON_DISK", 1)
    calls = loaded.begin(ids, 2)
    assert not calls.live
    assert torch.equal(through(loaded, calls), expected)
    masks = {id(given.args[1]) for chunk in calls._given for given in chunk}
    assert len(masks) == 1, "one mask, which every block of every chunk is given"
    assert all(is_in_file(given.args[0]) for chunk in calls._given for given in chunk)
    with torch.no_grad():
        assert torch.allclose(expected, model(ids)[0], atol=1e-5)
    assert not list(own_cache.glob("*")), "files have no name"


def test_of_a_few_chunks_nothing_is_written() -> None:
    loaded = LoadedModel(PerLayer().eval())
    calls = loaded.begin(torch.arange(80).remainder(31).reshape(5, 16), 2)
    assert not any(is_in_file(given.args[0]) for chunk in calls._given for given in chunk)


@pytest.fixture(scope="module")
def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4}
    return zoo.filled(transformers.T5EncoderModel, transformers.T5Config(vocab_size=zoo.VOCABULARY, **sizes))


def test_what_forwards_that_stand_still_hold_lies_in_files(
    t5: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, ids = LoadedModel(t5), zoo.ids(3, 24)
    expected = through(loaded, loaded.begin(ids, 1))
    monkeypatch.setattr(calling, "ON_DISK", 1)
    calls = loaded.begin(ids, 1)
    assert isinstance(calls, LiveCalls)
    hidden = calls.hidden
    for stage, index in enumerate(loaded.visits):
        for forward in calls._forwards:
            large = [each for each in held(forward.gr_frame) if each.numel() > 512 and type(each) is Tensor]
            assert large
            ours = [each for each in large if each.untyped_storage().data_ptr() not in calls._fixed]
            assert [tuple(each.shape) for each in ours if not is_in_file(each)] == []
        put_out = calls.run_all(loaded.load(index), stage, hidden)
        for others in calls._returned:  # relative positions that a block made or hands on
            parts = [each for each in others if isinstance(each, Tensor) and each.numel()]
            assert all(is_in_file(each) for each in parts)
        hidden = calls.pass_on(stage, put_out)
    assert torch.equal(hidden, expected)
    with torch.no_grad():
        own = t5(input_ids=ids[1:2])[0][0]
    assert torch.allclose(calls.finish(1)[0][0], own, atol=1e-5)
    assert not list(own_cache.glob("*"))


def test_views_stay_views_and_what_somebody_else_sees_too_stays_where_it_is() -> None:
    whole = torch.arange(4096.0)
    part = whole.view(64, 64)[3:].T
    other = torch.arange(4096.0)
    unseen = other[7:]
    before = part.clone(), other.clone()
    Shelf().move([whole, part, part._base, other])  # type: ignore[list-item]
    assert is_in_file(whole)
    assert is_in_file(part)
    assert not is_in_file(other)
    assert torch.equal(part, before[0])
    whole[3 * 64] = -1.0
    other[7] = -2.0
    assert part[0, 0] == -1.0
    assert unseen[0] == -2.0
    waves = torch.ones(512, dtype=torch.complex64) * 1j
    turned = waves.conj()
    Shelf().move([waves, turned])
    assert turned[0] == -1j
    copied = Shelf().copy(before[0][:, ::2])
    assert torch.equal(copied, before[0][:, ::2])
    assert is_in_file(copied)
    assert not is_in_file(Shelf().copy(torch.ones(3)))


def test_one_sequences_logits_are_held_at_a_time_and_many_of_them_in_a_file(
    t5: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, ids = LoadedModel(t5), zoo.ids(3, 24)
    calls = loaded.begin(ids, 1)
    calls.hidden = through(loaded, calls)
    finish, alive, made = calls.finish, [], []  # type: ignore[attr-defined]

    def watched(number: int) -> object:
        alive.append(sum(each() is not None for each in made))
        found = finish(number)
        made.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(calls, "finish", watched)
    answers = Answers(calls, ids)
    with torch.no_grad():
        for row in range(3):
            if row == 2:
                monkeypatch.setattr(answering, "ANSWERS_ON_DISK", 1)
            found = answers(row, slice(3, 9))
            assert torch.allclose(found, t5(input_ids=ids[row : row + 1])[0][0, 3:9], atol=1e-5)
            assert is_in_file(found) == (row == 2)
            del found
    assert alive == [0, 0, 0]
    assert not any(hidden.numel() for _, hidden, _ in calls._stands)  # type: ignore[attr-defined]
