"""What lies before and behind the blocks, cut to a few rows: the same numbers as the whole model's."""

from __future__ import annotations

import pytest
import torch
import zoo

from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure import turn
from quantkit.model.structure.fold import InDouble
from quantkit.model.structure.turn import Ends


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt"])
def test_few_rows_give_the_numbers_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "ROWS", 40)
    model = zoo.tiny(name)
    ids = zoo.ids(2, 12) % 40
    found = Ends(LoadedModel(model), ids)
    assert max(value.shape[0] for value in found.model.parameters() if value.dim() == 2) <= 66
    start, given = found.start()
    expected = LoadedModel(model).begin(ids, 2).hidden
    assert start.dtype == torch.float64
    assert torch.allclose(start.float(), expected, atol=1e-5)
    assert all(isinstance(each, torch.Tensor) for each in given)
    with torch.no_grad(), InDouble():  # type: ignore[no-untyped-call]
        whole = model.double()(input_ids=ids, output_hidden_states=True)
        loaded = LoadedModel(model)
        calls = loaded.begin(ids, 2)
        hidden = calls.hidden
        for index in range(len(loaded.block_names)):
            hidden = calls.run(loaded.load(index), index, hidden)
        assert torch.allclose(found.finish(hidden), whole.logits[..., :40], atol=1e-9)
    # the model itself still has all of its rows, and its blocks
    assert model.get_input_embeddings().weight.shape[0] == zoo.VOCABULARY  # type: ignore[operator]


def test_tables_of_the_streams_width_are_named() -> None:
    found = Ends(LoadedModel(zoo.tiny("gpt2")), zoo.ids(2, 12))
    assert found.embeddings(64) == ("transformer.wte", "transformer.wpe")
    assert found.embeddings(32) == ()
