"""`quantkit.compile(module)`: a torch module by way of its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import InputError
from quantkit.graph.open import open_graph
from quantkit.graph.run import Runner
from quantkit.pipeline.request import place


def compiled(module: Any, examples: Any, folder: Path, **held: Any) -> quantkit.Bundle:
    np.savez(folder / "set.npz", **held)
    return quantkit.compile(
        module, "int8", example_inputs=examples, calibration=folder / "set.npz", out=folder / "out", speed=False
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_module_of_several_inputs_becomes_a_bundle(tmp_path: Path) -> None:
    module, held = networks.two(), networks.two_inputs(80)
    examples = {name: torch.from_numpy(array[:1]) for name, array in held.items()}
    bundle = compiled(module, examples, tmp_path, **held)
    source = bundle.manifest.model.source
    assert (bundle.manifest.model.name, source.ref) == ("Two", "module:Two")
    kept = open_graph(place(source.sha256))
    assert kept.sha256 == source.sha256
    assert [(each.name, each.dtype, each.shape[0]) for each in kept.inputs] == [
        ("images", "float32", None),
        ("ids", "int64", None),
        ("mask", "float32", None),
    ]
    # the convolution and the classifier; what is looked up stays as it is
    assert len(bundle.manifest.layers) == 2
    feed = networks.two_inputs(16, seed=4)
    with torch.no_grad():
        expected = module(*(torch.from_numpy(array) for array in feed.values())).numpy()
    own = Runner(bundle.path / "onnx" / "model.onnx")(feed)["output"]
    assert 0 < np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.05
    assert {row["name"] for row in bundle.measurements} >= {"accuracy.cosine", "size.bytes"}


def test_a_module_that_fixes_its_batch_is_fed_just_that(tmp_path: Path) -> None:
    class Fixed(networks.Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(4, 3, networks.SIDE, networks.SIDE))

    torch.manual_seed(0)
    bundle = compiled(Fixed().eval(), torch.from_numpy(networks.images(4)), tmp_path, x=networks.images(90))
    assert bundle.manifest.calibration is not None
    assert bundle.manifest.calibration.samples == 76
    assert any("1 of 9 samples to eval fill no feed of 4" in each.reason for each in bundle.manifest.decisions)
    row = next(row for row in bundle.measurements if row["name"] == "accuracy.cosine")
    assert row["data"]["items"] == 8


@pytest.mark.parametrize(
    ("module", "examples", "code"),
    [
        (torch.nn.Linear(4, 3), torch.randn(2, 5), "module-export"),
        (torch.nn.Linear(4, 3), None, "module-inputs"),
        (torch.nn.Linear(4, 3), [1.0, 2.0], "module-inputs"),
        (lambda x: x, torch.randn(2, 5), "module-kind"),
        (torch.nn.Linear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64), "onnx-dtype"),
    ],
)
def test_what_cannot_be_exported(module: Any, examples: Any, code: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError) as caught:
        compiled(module, examples, tmp_path, x=np.random.default_rng(0).standard_normal((40, 5)))
    line = caught.value.line()
    assert caught.value.code == code, line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".onnx"]
