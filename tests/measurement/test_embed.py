"""Texts of any length get the vector that the whole model gives them, padded and masked or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

from measurement.labelled.made_up import about
from quantkit.calibrate.sets.pairs import PairSet
from quantkit.calibrate.tokens.ids import TokenSet, token_ids
from quantkit.measurement.accuracy.purpose import TextResults, embeddings, result_rows
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming.stream import StreamedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embed") / "bert"
    zoo.tiny("bert").save_pretrained(path)  # type: ignore[operator]
    return path


def texts(n: int = 7) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, zoo.VOCABULARY, size=length).tolist() for length in ([5, 3, 9, 5, 1, 3, 5] * n)[:n]]


class Session:
    """A session's way to answer, with the whole model behind it."""

    together, headed = 32, False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def encode(self, ids: np.ndarray) -> np.ndarray:
        return zoo.outputs(self.model, torch.from_numpy(ids)).numpy()


@torch.no_grad()
def masked(model: torch.nn.Module, ids: list[list[int]]) -> np.ndarray:
    """All texts at once, padded, as sentence-transformers does it."""
    width = max(map(len, ids))
    padded = torch.tensor([text + [0] * (width - len(text)) for text in ids])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in ids])
    hidden = model(input_ids=padded, attention_mask=mask)[0]
    return ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()


def test_equals_padding_with_a_mask(folder: Path) -> None:
    model, ids = zoo.tiny("bert"), texts()
    oracle = masked(model, ids)
    for side in (StreamedModel(open_model(str(folder))), Session(model)):
        found = embeddings(side, ids, ["mean"])  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, oracle, atol=2e-5)
    assert embeddings(Session(model), [], ["mean"]).shape[0] == 0  # type: ignore[arg-type]


def test_the_tokenizer_cuts_where_the_model_ends() -> None:
    asked: dict[str, Any] = {}

    class Tokenizer:
        model_max_length = 64

        def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
            asked.update(options)
            return {"input_ids": [[len(text)] for text in texts]}

    assert token_ids(["ab", "c"], Tokenizer()) == [[2], [1]]
    assert asked == {"truncation": True, "max_length": 64}
    token_ids(["a"], Tokenizer(), 16)
    assert asked["max_length"] == 16


def test_rows_say_which_pairs_and_against_what(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = texts(24)
    words = {f"left {i}": ids[i] for i in range(12)} | {f"right {i}": ids[i][::-1] for i in range(12)}

    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [words[text] for text in texts]}

    pairs = PairSet([f"left {i}" for i in range(12)], [f"right {i}" for i in range(12)], "verses", "eval", "dd")
    monkeypatch.setattr(Source, "tokenizer", lambda source: tokenizer)
    stream, tokens = StreamedModel(open_model(str(folder))), TokenSet(torch.ones(1, 1), "x", "eval", "0", pairs=pairs)
    result, session = TextResults(stream, tokens), Session(zoo.tiny("bert"))
    rows = result_rows(stream, session, tokens, result, about())  # type: ignore[arg-type]
    assert [row.name for row in rows] == [*(f"accuracy.recall_at_{k}" for k in (1, 5, 10)), "accuracy.cosine"]
    for row in rows:
        assert row.data is not None
        assert (row.data.set, row.data.sha256, row.data.items, row.subject) == ("verses", "dd", 12, "aa")
    # a bag of words in another order is nearly the same vector: the partner is found, by both sides
    assert rows[0].baseline is not None
    assert rows[0].baseline.difference == 0
    assert rows[-1].value == pytest.approx(1.0, abs=1e-6)
