"""The runtime `openvino`: text, steps that can be timed, files that do not load."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_onnx import TEXT, bundle, export, scheme

from quantkit.errors import InputError, MissingDependency
from quantkit.exporters import load_exporter
from quantkit.runtimes import load_runtime
from quantkit.runtimes.openvino.session import OpenvinoModel

pytestmark = pytest.mark.usefixtures("one_thread")
RUNTIME = load_runtime("openvino")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Any:
    pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("ov")
    return export(folder, "llama", scheme(), tokenizer=byte_tokenizer, changes=TEXT, exporter=load_exporter("openvino"))


def test_it_goes_on_from_a_prompt(made: Any) -> None:
    whole = bundle(made.folder)
    found = RUNTIME.generate(whole, "abc", new_tokens=5)
    assert found["tokens"] <= 5
    model = RUNTIME.load(whole, threads=1, accuracy_level=0)
    ids = np.array([[97, 98, 99]])
    state = model.state(1, 5)
    first = model.run(state, ids, keep=1)[0, -1]
    again = model.run(model.state(1, 5), ids)[0, -1]
    assert np.allclose(first, again, atol=1e-6)
    with pytest.raises(InputError, match="there is room for 5"):
        model.run(state, ids)


def test_a_step_that_is_timed_is_the_same_each_time(made: Any) -> None:
    model = OpenvinoModel(made.folder / "openvino", threads=1)
    step = model.decode(2, 7)
    assert all(0 < step() < 10 for _ in range(3))
    model.prefill(1, 9)()
    with pytest.raises(InputError, match="the context holds 128"):
        model.decode(1, 128)


def test_rounding_inputs_is_what_the_file_asks_for(made: Any) -> None:
    ids = np.arange(24)[None]
    exact, rounded = (
        model.run(model.state(1, 24), ids)
        for model in (OpenvinoModel(made.folder / "openvino", threads=1, accuracy_level=level) for level in (0, 4))
    )
    apart = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert apart < 0.05  # without VNNI nothing is rounded


@pytest.mark.parametrize("spoil", ["truncated", "no weights", "not xml", "short weights"])
def test_a_file_that_does_not_load_is_one_line(made: Any, tmp_path: Path, spoil: str) -> None:
    for name in ("model.xml", "model.bin"):
        (tmp_path / name).write_bytes((made.folder / "openvino" / name).read_bytes())
    xml, weights = tmp_path / "model.xml", tmp_path / "model.bin"
    if spoil == "no weights":
        weights.unlink()
    elif spoil == "short weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        xml.write_bytes(xml.read_bytes()[:3000] if spoil == "truncated" else b"\0nothing")
    with pytest.raises(InputError) as caught:
        OpenvinoModel(tmp_path, threads=1)
    line = caught.value.line()
    assert caught.value.code == "openvino-unreadable" and "\n" not in line and "quantkit verify" in line


def test_an_operator_that_it_does_not_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from onnx import TensorProto, helper, save

    from quantkit.exporters.openvino.model import converted

    value = helper.make_tensor_value_info
    node = helper.make_node("Strange", ["x"], ["y"], domain="of.nobody")
    x, y = (value(name, TensorProto.FLOAT, [1]) for name in "xy")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("of.nobody", 1)]
    save(helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets), tmp_path / "g.onnx")
    with pytest.raises(InputError, match="openvino-operator"):
        converted(tmp_path / "g.onnx")


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingDependency, match=r"-e '\.\[openvino\]'"):
        OpenvinoModel(tmp_path)


def test_a_bundle_without_it_says_how_to_add_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="--to openvino"):
        RUNTIME.folder(bundle(tmp_path))
