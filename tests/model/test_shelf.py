"""What a whole calibration set keeps besides hidden states lies in files where it is large, and is what it was."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

from quantkit.model.streaming import calls as calling
from quantkit.model.streaming import stream as streaming
from quantkit.model.streaming.calls import Calls, Shelf, held
from quantkit.model.streaming.live import LiveCalls
from quantkit.model.streaming.stream import Answers, LoadedModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    cache: Path, monkeypatch: pytest.MonkeyPatch
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
    assert not list(cache.glob("*")), "files have no name"


def test_of_a_few_chunks_nothing_is_written() -> None:
    loaded = LoadedModel(PerLayer().eval())
    calls = loaded.begin(torch.arange(80).remainder(31).reshape(5, 16), 2)
    assert not any(is_in_file(given.args[0]) for chunk in calls._given for given in chunk)


@pytest.fixture(scope="module")
def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4}
    return zoo.filled(transformers.T5EncoderModel, transformers.T5Config(vocab_size=zoo.VOCABULARY, **sizes))


def test_what_forwards_that_stand_still_hold_lies_in_files(
    t5: nn.Module, cache: Path, monkeypatch: pytest.MonkeyPatch
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
    assert not list(cache.glob("*"))


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
                monkeypatch.setattr(streaming, "ANSWERS_ON_DISK", 1)
            found = answers(row, slice(3, 9))
            assert torch.allclose(found, t5(input_ids=ids[row : row + 1])[0][0, 3:9], atol=1e-5)
            assert is_in_file(found) == (row == 2)
            del found
    assert alive == [0, 0, 0]
    assert not any(hidden.numel() for _, hidden, _ in calls._stands)  # type: ignore[attr-defined]
