"""A tiny decoder and bundles of its checkpoint, compiled without calibrating: what runs on a device is the question."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe


@contextmanager
def tiny_home(path: Path, tokenizer: Any, formats: Mapping[str, str]) -> Iterator[Path]:
    """The folder with `model`, and of each name a bundle in its format; a cache of its own while it is used.

    Args:
        path: new.
        formats: name of a bundle -> format of its weights, in groups of 32 with zero points.
    """
    zoo.save(path / "model", tokenizer, "llama", vocab_size=258, num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(path / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        for name, form in formats.items():
            asked = {
                "summary": "a test",
                "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
                "scheme": {"weights": {"format": form, "granularity": "group", "group": 32, "symmetric": False}},
                "passes": ["rtn"],
                "export": [{"checkpoint": {}}],
            }
            recipe = Recipe.from_dict(asked, name="tiny")
            compile_model(Request.of(str(path / "model"), recipe=recipe, out=path / name, speed=False))
        yield path
