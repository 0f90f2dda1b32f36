"""What a plan says of a bundle's weights is what the bundle holds: real compiles, read back by their manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.bundle import Bundle
from quantkit.measurement.size import folder_of, weight_bytes
from quantkit.model.sizes import configs
from quantkit.model.sizes.storage import Storage
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe


def planned(path: Path, export: str) -> tuple[Storage, int]:
    """What its config and its recipe come to, and what its files are."""
    manifest = Bundle.load(path).manifest
    recipe = Recipe.from_dict({k: v for k, v in manifest.recipe.items() if k != "name"}, name="x")
    return storage(configs.read(str(path)), recipe, export), weight_bytes(manifest.files, folder=folder_of(export))


@pytest.mark.parametrize("which", ["packed", "both"])
def test_a_checkpoint(made: Any, which: str) -> None:
    found, real = planned(getattr(made, which), "checkpoint")
    assert found.total == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("which", ["both", "floating"])
def test_a_graph_with_its_data(made: Any, which: str) -> None:
    """All tensors of the graph; the graph itself is a few kB, which are much beside a model this small."""
    import onnx

    path = getattr(made, which)
    found, real = planned(path, "onnx")
    graph = onnx.load(str(path / "onnx" / "model.onnx"))
    tensors = sum(onnx.numpy_helper.to_array(each).nbytes for each in graph.graph.initializer)
    assert found.total - found.files == pytest.approx(tensors, rel=0.005)
    assert found.files == pytest.approx(real - tensors, abs=3_000)
