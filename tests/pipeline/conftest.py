"""Tiny bundles with an ONNX graph, compiled once; a test that changes one takes a copy."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.bundle import Bundle
from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe

CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Made:
    """Bundles of one tiny decoder of 64 positions.

    Args:
        model: the folder that they were made from.
        packed: checkpoint alone.
        both: checkpoint and ONNX.
        floating: the float model as ONNX alone.
    """

    model: Path
    packed: Path
    both: Path
    floating: Path


def recipe(*exports: str, passes: tuple[str, ...] = ("rtn",), **changes: Any) -> Recipe:
    data = {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
        "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
        "passes": list(passes),
        "export": [{name: {}} for name in exports],
        **({} if passes else {"scheme": {}}),
        **changes,
    }
    return Recipe.from_dict(data, name="tiny")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Made:
    home = tmp_path_factory.mktemp("made")
    model = home / "llama.tiny"
    zoo.save(model, byte_tokenizer, "llama", **CHANGES)
    found = Made(model, home / "packed", home / "both", home / "floating")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(home / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        for out, chosen in (
            (found.packed, recipe("checkpoint")),
            (found.both, recipe("checkpoint", "onnx")),
            (found.floating, recipe("onnx", passes=())),
        ):
            compile_model(Request.of(str(model), recipe=chosen, out=out, speed=False))
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Bundle]:
    """A bundle of one's own."""

    def copy(path: Path) -> Bundle:
        return Bundle.load(shutil.copytree(path, tmp_path / path.name))

    return copy
