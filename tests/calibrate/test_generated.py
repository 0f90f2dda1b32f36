"""Text that a model writes itself, held against transformers' own probabilities."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

from quantkit import machine
from quantkit.calibrate.tokens.generated import generated
from quantkit.model.source.open import Source, open_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("written") / "tiny"
    model = zoo.tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)  # so that probabilities are far from alike
    model.save_pretrained(folder)
    return open_model(str(folder))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))


def drawn(source: Source, **changes: Any) -> torch.Tensor:
    found = generated(source, **{"samples": 40, "tokens": 24, "seed": 0, "before": []} | changes)
    assert found is not None
    return found


def test_what_is_drawn_is_as_likely_as_the_model_says(source: Source) -> None:
    ids = drawn(source, samples=200, before=[5])
    assert ids.shape == (200, 24)
    assert (ids[:, 0] == 5).all()
    with torch.no_grad():
        logs = source.load()(input_ids=ids).logits[:, :-1].log_softmax(-1)
    lost = -logs.gather(2, ids[:, 1:, None]).squeeze(2)
    entropy, spread = -(logs.exp() * logs).sum(2), lost.std() / lost.numel() ** 0.5
    assert entropy.mean() < 0.9 * torch.tensor(float(logs.shape[2])).log()
    assert abs(float(lost.mean() - entropy.mean())) < 4 * float(spread)


def test_a_seed_gives_the_same_and_another_seed_does_not(source: Source, tmp_path: Path) -> None:
    first = drawn(source)
    assert torch.equal(drawn(source), first)
    (kept,) = (tmp_path / "generated").glob("*.safetensors")
    kept.unlink()
    assert torch.equal(drawn(source), first), "drawn again"
    assert not torch.equal(drawn(source, seed=1), first)


def test_a_text_that_ends_is_no_end_of_the_sequence(source: Source, tmp_path: Path) -> None:
    end = int(drawn(source).mode(dim=1).values[0])
    folder = Path(shutil.copytree(source.path, tmp_path / "ends"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": end}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = drawn(open_model(str(folder)))
    ended = ids[:, :-1] == end
    assert ended.any()
    assert (ids[:, 1:][ended] != end).any()


def test_no_caller_s_draws_are_moved(source: Source) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    drawn(source)
    assert torch.equal(torch.rand(2), expected)


def test_a_model_that_does_not_fit_writes_nothing(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 1000)
    assert generated(source, samples=1, tokens=4, seed=0, before=[]) is None
