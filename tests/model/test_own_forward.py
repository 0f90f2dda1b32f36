"""The stream is held against plain transformers; what departs is named."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming import own_forward
from quantkit.model.streaming.stream import StreamedModel


@pytest.fixture(scope="module", params=["llama", "gemma3", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("own") / request.param
    zoo.tiny(request.param).save_pretrained(place)  # type: ignore[operator]
    return place


class Wrong(StreamedModel):
    """Its second block has another bias, or its tables other rows, than the files say."""

    block, outside = True, False

    def load(self, index: int) -> nn.Module:
        block = super().load(index)
        if self.block and index == 1:
            weight = next(value for value in block.parameters() if value.dim() == 2)
            weight.data = weight.data.roll(1, dims=0)  # a factor alone may be what a norm takes off again
        return block

    def ends(self) -> nn.Module:
        model = super().ends()
        if self.outside:
            table = model.get_input_embeddings()  # type: ignore[operator]
            table.weight = nn.Parameter(table.weight * 1.001)
        return model


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_stream_that_is_the_model_passes(folder: Path, blocks: int) -> None:
    check = own_forward.demand_equal(StreamedModel(open_model(str(folder))), zoo.ids(5, 24), blocks)
    assert check.ok and check.value is not None and check.value < 1e-5


def test_the_first_block_that_departs_is_named(folder: Path) -> None:
    stream = Wrong(open_model(str(folder)))
    with pytest.raises(InputError) as caught:
        own_forward.demand_equal(stream, zoo.ids(5, 24), 3)
    assert caught.value.code == "stream-differs"
    assert stream.block_names[1] in str(caught.value)


def test_a_model_whose_own_states_are_not_finite_is_told_apart(tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    for name in ("up_proj", "gate_proj"):
        model.get_submodule(f"model.layers.1.mlp.{name}").weight.data *= 1e25  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"activations-nonfinite.*model\.layers\.1"):
        own_forward.demand_equal(StreamedModel(open_model(str(tmp_path))), zoo.ids(5, 24), 3)


def test_what_lies_before_the_blocks_is_named(folder: Path) -> None:
    stream = Wrong(open_model(str(folder)))
    stream.block, stream.outside = False, True
    with pytest.raises(InputError) as caught:
        own_forward.demand_equal(stream, zoo.ids(5, 24), 3)
    assert caught.value.code == "stream-differs"
    assert "before the first block" in str(caught.value)


def test_a_model_of_few_blocks_is_compared_up_to_there(folder: Path) -> None:
    """With one block in memory, what is wrong in the second one cannot be seen; with two it is."""
    stream = Wrong(open_model(str(folder)))
    assert own_forward.demand_equal(stream, zoo.ids(5, 24), 1).ok
    with torch.no_grad(), pytest.raises(InputError):
        own_forward.demand_equal(stream, zoo.ids(5, 24), 3)


def test_a_cut_model_is_compared_behind_its_last_block_and_its_ends(folder: Path) -> None:
    """Of large models only the first blocks fit: those, and what lies before and behind the blocks."""
    stream = Wrong(open_model(str(folder)))
    with pytest.raises(InputError) as caught:
        own_forward.demand_equal(stream, zoo.ids(5, 24), 2)
    assert stream.block_names[1] in str(caught.value)


class WrongHead(StreamedModel):
    """Its last norm has another weight than the files say."""

    def ends(self) -> nn.Module:
        model = super().ends()
        weight = model.get_submodule("model.norm").weight
        weight.data = weight.data + torch.linspace(0, 1, weight.numel())  # type: ignore[union-attr, operator]
        return model


@pytest.mark.parametrize("blocks", [1, 3])
def test_what_follows_the_blocks_is_compared(tmp_path: Path, blocks: int) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    with pytest.raises(InputError) as caught:
        own_forward.demand_equal(WrongHead(open_model(str(tmp_path / "llama"))), zoo.ids(5, 24), blocks)
    assert "the part behind the last block" in str(caught.value)


def test_sequences_that_begin_alike_are_compared_where_they_differ() -> None:
    prompt = torch.arange(40).repeat(6, 1)
    ids = torch.cat([prompt, zoo.ids(6, 60)], dim=1)
    few = own_forward.few_of(ids)
    assert few.shape == (4, 32)
    assert len({tuple(row) for row in few.tolist()}) == 4


def test_one_long_sequence_is_taken_for_several() -> None:
    few = own_forward.few_of(zoo.ids(1, 300))
    assert few.shape == (4, 32)
    assert len({tuple(row) for row in few.tolist()}) == 4


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "Gemma3nForCausalLM"])
def test_a_model_whose_parts_depend_on_how_many_blocks_there_are_is_not_cut(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables of per-layer embeddings have a part for each block. All of it is compared, and its blocks stay on
    disk: it never is in memory as a whole."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    shrink.tiny(name, tmp_path / "model")
    source = open_model(str(tmp_path / "model"))
    stream = StreamedModel(source)
    count = len(stream.block_names)
    assert not any(source.can_be_cut(blocks) for blocks in range(1, count))
    where: list[set[str]] = []

    def load(self: Source, blocks: int | None = None, placed: Any = None) -> Any:
        model = whole(self, blocks, placed)
        parts = model.get_submodule(stream.paths[0]).parameters(), model.get_input_embeddings().parameters()
        where.extend({value.device.type for value in part} for part in parts)
        return model

    whole = Source.load
    monkeypatch.setattr(Source, "load", load)
    assert own_forward.demand_equal(stream, shrink.ids(5), count - 1).ok
    assert where == [{"meta"}, {"cpu"}]
    left = [path.name for path in (tmp_path / "cache").glob("*")]
    assert left in ([], ["sources"]), "nothing is left of what was put there, but where the model lies"
    if name.startswith("Gemma4"):
        with pytest.raises(InputError, match="stream-differs"):
            own_forward.demand_equal(Wrong(source), shrink.ids(5), 1)


def test_a_full_disk_is_no_fault_of_the_architecture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamedModel(open_model(str(folder)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(own_forward, "_demand_equal", full)
    with pytest.raises(OSError, match="No space"):
        own_forward.demand_equal(stream, zoo.ids(5, 24), 1)


def test_no_memory_is_no_fault_of_the_architecture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamedModel(open_model(str(folder)))
    monkeypatch.setattr(own_forward, "own_forward", lambda *_: torch.empty(1 << 50))
    with pytest.raises(InputError, match=r"\[out-of-memory\]"):
        own_forward.demand_equal(stream, zoo.ids(5, 24), 1)
