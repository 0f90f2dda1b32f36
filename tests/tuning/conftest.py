"""A tiny decoder and a compile of it, prepared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.pipeline import Prepared, Request, prepare
from quantkit.recipe import Recipe


def recipe(**changes: Any) -> Recipe:
    data = {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 4, "tokens": 32},
        "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": True}},
        "passes": ["rtn"],
        "export": [{"checkpoint": {"layout": "pack-quantized"}}],
        **changes,
    }
    return Recipe.from_dict(data, name="tiny")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """Three blocks whose weights are large enough for their harm to be told apart."""
    import torch

    folder = tmp_path_factory.mktemp("tune") / "llama.tiny"
    made = zoo.tiny("llama", vocab_size=len(byte_tokenizer))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    made.save_pretrained(folder)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, few_scored: None) -> None:
    monkeypatch.setattr("quantkit.tuning.search.CHECKED", 300)


@pytest.fixture
def prepared(model: Path) -> Callable[..., Prepared]:
    def of(**changes: Any) -> Prepared:
        return prepare(Request.of(str(model), recipe=recipe(**changes), speed=False))

    return of
