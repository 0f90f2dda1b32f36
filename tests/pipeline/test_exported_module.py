"""`quantkit.compile(module)`: a torch module by way of its graph, a model of transformers by way of a folder."""

from itertools import product
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
import zoo
from thorough import beside

import quantkit
from quantkit.errors import InputError
from quantkit.graph.open import open_graph
from quantkit.graph.run import Runner
from quantkit.model.source.places import saved_in_memory
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.request import place

pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(module: Any, examples: Any, folder: Path, **held: Any) -> quantkit.Bundle:
    np.savez(folder / "set.npz", **held)
    return quantkit.compile(
        module, "int8", example_inputs=examples, calibration=folder / "set.npz", out=folder / "out", speed=False
    )


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
def test_what_cannot_be_exported(module: Any, examples: Any, code: str, tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(InputError) as caught:
        compiled(module, examples, tmp_path, x=np.random.default_rng(0).standard_normal((40, 5)))
    line = caught.value.line()
    assert caught.value.code == code, line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()
    assert not [path for path in own_cache.rglob("*") if path.is_file() and path.suffix != ".onnx"]


def language_model(dtype: torch.dtype, tokenizer: Any) -> Any:
    return zoo.tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=128).to(dtype)


SMALL = ["calibration.samples=4", "calibration.tokens=32", "scheme.weights.group=32", "gates={}"]


@pytest.mark.parametrize(
    ("dtype", "saved_before"),
    beside(
        [(torch.bfloat16, True), (torch.float32, False)],
        product([torch.bfloat16, torch.float32], [True, False]),
    ),
)
def test_a_language_model_in_memory_is_saved_with_its_tokenizer_and_measured_again(
    dtype: torch.dtype, saved_before: bool, tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SCORED", 100)
    model, given = language_model(dtype, byte_tokenizer), {"tokenizer": byte_tokenizer}
    if saved_before:  # as it is after `from_pretrained`, and changed since
        model.save_pretrained(tmp_path / "mine")
        byte_tokenizer.save_pretrained(tmp_path / "mine")
        model, given = type(model).from_pretrained(tmp_path / "mine", dtype=dtype), {}
        with torch.no_grad():
            model.lm_head.weight *= 1.5
    asked: dict[str, Any] = {"changes": SMALL, "speed": False, **given}
    bundle = quantkit.compile(model, "gptq-int4", out=tmp_path / "out", **asked)
    source = bundle.manifest.model.source
    assert bundle.manifest.model.name == ("mine" if saved_before else type(model).__name__)
    folder = saved_in_memory(source.sha256)
    assert folder is not None
    saved = type(model).from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.glob("*.json"))
    notes = [step.reason for step in bundle.manifest.decisions if step.where == "tokenizer"]
    assert notes == (
        ["none was given: the one of mine, where the model was loaded from, is taken"] if saved_before else []
    )
    again = bundle.measure(speed=False, quick=True)
    assert [row["value"] for row in again if row["name"] == "accuracy.kl"]
    twice = quantkit.compile(model, "gptq-int4", out=tmp_path / "two", **asked)
    assert twice.manifest.model.source.sha256 == source.sha256


def test_a_language_model_in_memory_without_a_tokenizer_is_told_how_to_give_one(
    tmp_path: Path, byte_tokenizer: Any
) -> None:
    model = language_model(torch.float32, byte_tokenizer)
    with pytest.raises(InputError) as caught:
        quantkit.compile(model, "gptq-int4", changes=SMALL, out=tmp_path / "out")
    assert caught.value.code == "tokenizer-missing"
    assert "compile(model, tokenizer=...)" in caught.value.remedy


def test_a_tokenizer_goes_with_a_model_in_memory_alone(tmp_path: Path, byte_tokenizer: Any) -> None:
    for model in ("smollm2-135m", torch.nn.Linear(4, 3)):
        with pytest.raises(InputError, match="tokenizer"):
            quantkit.compile(
                model, "int8-network", example_inputs=torch.randn(2, 4), tokenizer=byte_tokenizer, out=tmp_path / "out"
            )
