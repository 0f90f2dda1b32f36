"""The runtime with quantkit's own products: other people's graphs, computed otherwise, give what they gave."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_onnx
from small_onnx import Small, export, scheme

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.kernels.cpu import library
from quantkit.runtimes import load_runtime
from quantkit.runtimes.onnxruntime.own_products import own_products
from quantkit.runtimes.onnxruntime.session import OnnxModel

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(library._compiler() is None, reason="no C compiler is installed"),
]
NAMES = ["llama", "qwen2", "gemma3", "gpt2"]
# whose MLP is gated, by SiLU or GELU
GATED = {"llama": 1, "qwen2": 1, "gemma3": 1, "gpt2": 0}


@pytest.fixture(scope="module", params=NAMES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    place = tmp_path_factory.mktemp(request.param)
    return export(place, request.param, scheme(), accuracy_level=4, changes={"vocab_size": 130})


def test_every_product_is_ours_and_weights_stay_in_their_file(small: Small) -> None:
    model = onnx.load(small.onnx / "model.onnx", load_external_data=False)
    before = Counter(node.op_type for node in model.graph.node)
    stored = {value.name: value.data_location for value in model.graph.initializer}
    own_products(model)
    after = Counter(node.op_type for node in model.graph.node)
    assert before["MatMulNBits"] > 3 and after["MatMulNBits"] == 0
    assert after["Product"] + 2 * after["GatedMlp"] == before["MatMulNBits"]
    name = next(each for each in NAMES if each in str(small.onnx))
    assert bool(after["GatedMlp"]) == bool(GATED[name])
    assert {value.name: value.data_location for value in model.graph.initializer} == stored


def test_its_logits_are_as_close_to_the_exact_ones_as_those_of_onnxruntime(small: Small) -> None:
    exact, theirs, ours = (
        OnnxModel(small.onnx, threads=1, accuracy_level=0),
        OnnxModel(small.onnx, threads=1),
        OnnxModel(small.onnx, threads=1, own=True),
    )
    ids = np.arange(40).reshape(2, 20) + 3
    mask = np.ones_like(ids)
    mask[1, :7] = 0  # padding on the left
    states = [model.state(2, 24) for model in (exact, theirs, ours)]
    answers = [model.run(state, ids, mask) for model, state in zip((exact, theirs, ours), states, strict=True)]
    steps = [
        np.concatenate([model.run(state, ids[:, [at]]) for at in range(4)], axis=1)
        for model, state in zip((exact, theirs, ours), states, strict=True)
    ]
    shown = mask.astype(bool)
    for right, stock, own in ([each[shown] for each in answers], steps):
        error, allowed = np.square(own - right).mean(), np.square(stock - right).mean()
        assert 0 < error < 1.5 * allowed


def test_a_bundle_is_generated_from(tmp_path: Path, byte_tokenizer: object) -> None:
    small = export(tmp_path, "llama", scheme(), tokenizer=byte_tokenizer, changes=small_onnx.TEXT, accuracy_level=4)
    small_onnx.bundle(small.folder)
    runtime = load_runtime("quantkit_cpu")
    if "avx512_vnni" not in machine.isa_features():  # what its products are written for
        with pytest.raises(InputError) as met:
            runtime.generate(Bundle.load(small.folder), "the house", new_tokens=8)
        assert met.value.code == "runtime-not-here"
        return
    found = runtime.generate(Bundle.load(small.folder), "the house", new_tokens=8)
    assert found["tokens"] == 8 and found["tokens_per_s"] > 0


def test_a_graph_without_such_products_is_refused(tmp_path: Path) -> None:
    small = export(tmp_path, "llama", scheme(), accuracy_level=0)
    with pytest.raises(InputError, match="nothing-to-multiply"):
        OnnxModel(small.onnx, own=True)


def test_where_it_gains_nothing_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_runtime("quantkit_cpu")
    monkeypatch.setattr("quantkit.machine.isa_features", lambda: ["avx2", "avx"])
    assert "avx512_vnni" in str(runtime.why_not_here())
    monkeypatch.setattr("quantkit.machine.isa_features", lambda: ["avx512_vnni"])
    assert runtime.why_not_here() is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "compiler" in str(runtime.why_not_here())


def test_a_value_that_is_asked_for_is_not_joined_away(small: Small) -> None:
    model = onnx.load(small.onnx / "model.onnx", load_external_data=False)
    inner = next(node.output[0] for node in model.graph.node if node.op_type in ("Gelu", "Sigmoid", "Tanh"))
    running = OnnxModel(small.onnx, threads=1, own=True, shown=[inner])
    ids = np.arange(12)[None]
    assert np.asarray(running.session.run([inner], running.prompt(ids))[0]).shape[:2] == (1, 12)


@pytest.mark.parametrize("change", ["axis", "sizes", "epsilon", "lengths"])
def test_what_only_looks_alike_stays_as_it_is(tmp_path: Path, change: str) -> None:
    small = export(tmp_path, "llama", scheme(), accuracy_level=4, changes={"vocab_size": 130})
    model = onnx.load(small.onnx / "model.onnx", load_external_data=False)
    before, after = Counter(node.op_type for node in model.graph.node), "Split"
    for node in model.graph.node:
        if node.op_type == "Split" and change == "axis":
            next(each for each in node.attribute if each.name == "axis").i = 0
        elif node.op_type == "Split" and change == "sizes":
            node.input[1] = "uneven"
        elif node.op_type == "SkipSimplifiedLayerNormalization" and change == "epsilon":
            after = node.op_type
            del node.attribute[:]
        elif node.op_type == "GroupQueryAttention" and change == "lengths":
            after = node.op_type
            node.input[5] = "each"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([63, 65], np.int64), "uneven"))
    own_products(model)
    assert Counter(node.op_type for node in model.graph.node)[after] == before[after] > 0
