"""The build-up of the error, held against whole models of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo

from quantkit.measure.build_up import build_up
from quantkit.model.open import open_model
from quantkit.model.stream import StreamedModel


def stream(model: torch.nn.Module, folder: Path) -> StreamedModel:
    model.save_pretrained(folder)  # type: ignore[operator]
    return StreamedModel(open_model(str(folder)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_it_is_the_error_of_the_hidden_states_behind_each_block(name: str, tmp_path: Path) -> None:
    models = [zoo.tiny(name), zoo.tiny(name)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    found = build_up(*(stream(model, tmp_path / str(i)) for i, model in enumerate(models)), zoo.ids(2, 12))
    states: list[list[torch.Tensor]] = []
    for model in models:
        behind: list[torch.Tensor] = []
        blocks = [model.get_submodule(block) for block, _ in found]
        for block in blocks:
            block.register_forward_hook(
                lambda _, __, out, kept=behind: kept.append(out[0] if isinstance(out, tuple) else out)
            )
        with torch.no_grad():
            model(input_ids=zoo.ids(2, 12)[:1])
        states.append(behind)
    wanted = [float((b - a).norm() / a.norm()) for a, b in zip(*states, strict=True)]
    assert [error for _, error in found] == pytest.approx(wanted, rel=1e-4)
    assert min(wanted) > 1e-3


def test_a_model_against_itself_and_no_more_tokens_than_a_curve_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.tiny("llama")
    one, two = (stream(model, tmp_path / name) for name in "ab")
    assert [error for _, error in build_up(one, two, zoo.ids(1, 8))] == [0.0, 0.0, 0.0]
    seen: list[torch.Size] = []
    begin = StreamedModel.begin

    def watched(self: StreamedModel, ids: torch.Tensor, chunk: int) -> object:
        seen.append(ids.shape)
        return begin(self, ids, chunk)

    monkeypatch.setattr("quantkit.measure.build_up._TOKENS", 5)
    monkeypatch.setattr(StreamedModel, "begin", watched)
    build_up(one, two, zoo.ids(3, 8))
    assert seen == [(1, 5), (1, 5)]
