"""The score, held against plain transformers: what is wrong on either side is seen.

What was exported is scored by the runtime that reads it, or it is said why not.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo

from quantkit.measurement.accuracy.positions import Accuracy, Items
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline.blocks import score as confirming
from quantkit.pipeline.blocks.score import KL, LOSS, ORIGINAL, OUTPUT, confirm, unscored
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime


def stream_of(name: str, folder: Path) -> StreamedModel:
    zoo.tiny(name).save_pretrained(folder)  # type: ignore[operator]
    return StreamedModel(open_model(str(folder)))


def scored(before: torch.Tensor, after: torch.Tensor, ids: torch.Tensor) -> Items:
    accuracy = Accuracy()
    for row in range(len(ids)):
        accuracy.add_positions(row, ids[row, 1:], before[row, :-1], after[row, :-1])
    return accuracy.items()


def test_a_reloaded_export_that_gives_nan_is_no_small_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate that was scored diverges by nothing, and one NaN instead of a divergence was taken for nothing."""
    stream, ids = stream_of("llama", tmp_path / "llama"), zoo.ids(2, 24)
    logits = stream.answers(ids).all()
    items = scored(logits, logits, ids)
    assert float(np.abs(items.kl).max()) < 1e-6
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, items)}
    assert held[LOSS].ok and held[KL].ok
    monkeypatch.setattr(confirming, "_reloaded", lambda *_: torch.full_like(logits, torch.nan))
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, items)}
    assert held[LOSS].ok and not held[KL].ok


def test_the_noise_of_an_original_that_rounds_its_inputs_is_allowed_for() -> None:
    ids, generator = zoo.ids(2, 24), torch.Generator().manual_seed(0)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(2, 24, zoo.VOCABULARY, generator=generator)

    expected = noise(2.0)
    streamed = expected + noise(0.1)
    before, after = expected + noise(0.06), streamed + noise(0.06)
    (_, held) = confirming._decoder(before, after, ids, None, streamed, None, expected)
    assert held.name == KL and held.ok and held.value > confirming.LIMIT  # type: ignore[operator]
    # what is not explained by it is still seen, and without noise there is no more room
    (_, wrong) = confirming._decoder(before, after + noise(0.3), ids, None, streamed, None, expected)
    assert not wrong.ok
    (_, plain) = confirming._decoder(expected, after, ids, None, streamed, None, expected)
    assert not plain.ok


def test_an_encoders_original_is_confirmed_beside_its_export(tmp_path: Path) -> None:
    stream, ids = stream_of("bert", tmp_path / "bert"), zoo.ids(2, 24)
    assert {each.name: each.ok for each in confirm(stream, tmp_path / "bert", ids, None)} == {
        ORIGINAL: True,
        OUTPUT: True,
    }

    class Wrong(StreamedModel):
        def load(self, index: int) -> torch.nn.Module:
            block = super().load(index)
            weight = next(value for value in block.parameters() if value.dim() == 2)
            weight.data = weight.data.roll(1, dims=0)
            return block

    wrong = Wrong(open_model(str(tmp_path / "bert")))
    held = {each.name: each.ok for each in confirm(wrong, tmp_path / "bert", ids, None)}
    assert held == {ORIGINAL: False, OUTPUT: True}


def test_the_loss_and_the_divergence_are_those_of_plain_transformers(tmp_path: Path) -> None:
    """Of two different models; the figures are found without the code that is tested."""
    stream, ids = stream_of("llama", tmp_path / "llama"), zoo.ids(2, 24)
    zoo.tiny("llama", seed=1).save_pretrained(tmp_path / "other")  # type: ignore[operator]
    other = StreamedModel(open_model(str(tmp_path / "other"))).answers(ids).all()
    items = scored(stream.answers(ids).all(), other, ids)
    assert float(items.kl.mean()) > 0.01
    held = {each.name: each for each in confirm(stream, tmp_path / "other", ids, items)}
    assert all(each.ok and each.value is not None and each.value < 1e-5 for each in held.values())
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, items)}
    assert held[LOSS].ok and not held[KL].ok


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_kernels_of_a_library_have_the_room_that_their_rounding_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As far as rounding moves what is compared; the original is run by torch alone."""
    stream, ids = stream_of(name, tmp_path / name), zoo.ids(2, 24)
    logits = stream.answers(ids).all()
    items = scored(logits, logits, ids) if name == "llama" else None
    monkeypatch.setattr(confirming, "_has_kernels", lambda folder: True)
    real, noise = confirming._streamed, 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        confirming, "_streamed", lambda folder, rounded=False, **how: real(folder, **how) + (noise if rounded else 0)
    )
    first, second = confirm(stream, tmp_path / name, ids, items)
    assert first.limit == confirming.LIMIT
    off = float(noise.double().norm() / logits.double().norm())
    if items is not None:
        before, after = (each[:, :-1].double().log_softmax(-1) for each in (logits, logits + noise))
        off = float((before.exp() * (before - after)).sum(-1).square().mean().sqrt())
    assert second.limit == pytest.approx(confirming.LIMIT + 2 * off)


def test_where_inputs_are_rounded_both_sides_see_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a longer sequence made of the candidate is no error of its export; what the export itself does is."""
    stream, ids = stream_of("llama", tmp_path / "llama"), zoo.ids(2, 24)
    logits = stream.answers(ids).all()
    elsewhere = scored(logits, logits + 0.1 * torch.randn_like(logits), ids)
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, elsewhere)}
    assert held[LOSS].ok and not held[KL].ok
    monkeypatch.setattr(confirming, "_rounds_inputs", lambda _: True)
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, elsewhere)}
    assert held[LOSS].ok and held[KL].ok
    monkeypatch.setattr(confirming, "_reloaded", lambda *_: logits.roll(1, dims=-1))
    held = {each.name: each for each in confirm(stream, tmp_path / "llama", ids, elsewhere)}
    assert held[LOSS].ok and not held[KL].ok


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_an_engine_is_asked_of_the_library_that_made_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        runtime = load_runtime(name)
        monkeypatch.setattr(type(runtime), "why_not_here", lambda self, folder=None: f"no {self.name} here")
    steps = [
        ExportStep(name="checkpoint", options={}),
        ExportStep(name="tensorrt", options={"library": library, "sm": "9.0"}),
    ]
    (said,) = unscored(steps, tmp_path)
    assert said.reason == f"not run: no {library} here"
