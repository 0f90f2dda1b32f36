"""The original's states are kept, and a cache that is damaged or cannot be written costs time, not the result."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo

from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
from quantkit.errors import Rebuilt
from quantkit.measurement.accuracy.score import counted, original_answers, rows, score
from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import Calls
from quantkit.model.streaming.stream import StreamedModel
from quantkit.report.bundle import figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("score") / "llama"
    zoo.tiny("llama").save_pretrained(path)  # type: ignore[operator]
    return path


def tokens(seed: int = 0) -> TokenSet:
    ids = zoo.ids(3, 12, seed=seed)
    return TokenSet(ids=ids, name="x", split="eval", sha256=ids_sha256(ids.numpy()))


def stream(folder: Path) -> StreamedModel:
    return StreamedModel(open_model(str(folder)))


class Refusing(StreamedModel):
    def through(self, ids: torch.Tensor, chunk: int = 4) -> Calls:
        raise AssertionError("was to be read from the cache")


def test_states_are_computed_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    first = original_answers(stream(folder), tokens()).all()
    assert torch.equal(first, stream(folder).answers(tokens().ids).all())
    assert torch.equal(original_answers(Refusing(open_model(str(folder))), tokens()).all(), first)
    with pytest.raises(AssertionError, match="cache"):
        original_answers(Refusing(open_model(str(folder))), tokens(seed=1)).all()
    assert len(list((tmp_path / "states").glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: b"{}", lambda data: data[:-1] + bytes([data[-1] ^ 1])],
    ids=["empty", "other", "one-bit"],
)
def test_a_damaged_cache_is_written_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    first = original_answers(stream(folder), tokens()).all()
    (file,) = (tmp_path / "states").glob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(Rebuilt):
        assert torch.equal(original_answers(stream(folder), tokens()).all(), first)
    assert torch.equal(original_answers(Refusing(open_model(str(folder))), tokens()).all(), first)


def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    assert original_answers(stream(folder), tokens()).all().shape[:2] == (3, 12)


def test_a_model_against_itself_is_no_different(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    told: list[float] = []
    items = score(stream(folder), stream(folder), tokens(), told.append)
    assert float(abs(items.kl).max()) < 1e-9
    assert items.agree.all()
    assert told == sorted(told)


@pytest.mark.parametrize("few", [1 << 23, 5 * zoo.VOCABULARY])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "gpt2", "opt"])
def test_scores_are_those_of_plain_models_in_float64(
    name: str, few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed in blocks and a few positions at a time, or whole models and textbook formulas: the same numbers."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.measurement.accuracy.score._LOGITS", few)
    models = [zoo.tiny(name), zoo.tiny(name)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.05)
    for model, place in zip(models, ("a", "b"), strict=True):
        model.save_pretrained(tmp_path / place)  # type: ignore[operator]
    found = score(stream(tmp_path / "a"), stream(tmp_path / "b"), tokens())
    ids = tokens().ids
    with torch.no_grad():
        p, q = (model(input_ids=ids).logits[:, :-1].double().log_softmax(-1) for model in models)
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    following = ids[:, 1:].unsqueeze(-1)
    assert torch.allclose(torch.from_numpy(found.kl), kl, atol=1e-5)
    assert torch.allclose(torch.from_numpy(found.nll_candidate), -q.gather(-1, following).flatten(), atol=1e-4)
    assert torch.allclose(torch.from_numpy(found.nll_original), -p.gather(-1, following).flatten(), atol=1e-4)
    assert found.kl.mean() > 1e-4


def test_an_encoder_has_a_cosine_with_its_interval_and_its_least(tmp_path: Path, own_cache: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        zoo.tiny("bert", seed).save_pretrained(tmp_path / name)  # type: ignore[operator]
    sides = [stream(tmp_path / name) for name in ("a", "b")]
    pooled = [zoo.outputs(zoo.tiny("bert", seed), tokens().ids).mean(dim=1).numpy() for seed in (0, 1)]
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*pooled, strict=True)]
    (row,), items = rows(*sides, tokens(), subject="aa", runtime="torch")
    assert items is None
    assert (row.name, row.value, row.n) == ("accuracy.cosine", pytest.approx(np.mean(cosines), abs=1e-5), 3)
    assert row.quantiles is not None
    assert row.quantiles["p0"] == pytest.approx(min(cosines), abs=1e-5)
    # what was scored are its 3 sequences, not the 33 positions in them
    assert figures.scored([row]).startswith("3 sequences of x (eval);")
    assert counted(sides[0], tokens()) == (3, "sequence")
    # three sequences: Student's t, wider than a normal's 1.96
    reach = 4.3027 * np.std(cosines, ddof=1) / 3**0.5
    assert row.ci95 == pytest.approx((np.mean(cosines) - reach, min(1.0, np.mean(cosines) + reach)), abs=1e-4)
    assert row.baseline is not None
    assert (row.baseline.subject, row.baseline.value) == (sides[0].source.sha256, 1.0)
