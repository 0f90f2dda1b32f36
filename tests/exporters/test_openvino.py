"""The OpenVINO export: read again by OpenVINO, held against transformers' own forward, its codes bit by bit."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_onnx import Small, expected, export, relative, scheme
from thorough import beside

from quantkit.errors import InputError
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.exporters.openvino import model
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

pytest.importorskip("openvino")
pytestmark = pytest.mark.usefixtures("one_thread")
EXPORT = load_exporter("openvino")
BYTES = WeightScheme(format="int8", granularity="channel", symmetric=True, scale="float32")
SYMMETRIC = WeightScheme(format="int4", granularity="group", group=32, symmetric=True)
FIXED = ActivationScheme(format="int8", granularity="tensor", dynamic=False, symmetric=False)
# float32 sums in another order, through three layers
LIMIT = 5e-6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Small] = {}

    def of(name: str, schemes: Any = None, **options: Any) -> Small:
        key = f"{name} {schemes} {sorted(options)}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = export(folder, name, schemes or scheme(), exporter=EXPORT, **options)
        return made[key]

    return of


def opened(made: Small, **settings: Any) -> Any:
    from quantkit.runtimes.openvino.session import OpenvinoModel

    return OpenvinoModel(made.folder / "openvino", **{"threads": 1, "accuracy_level": 0, **settings})


def constants(made: Small) -> dict[str, tuple[str, Any]]:
    """As OpenVINO reads them, without any code of the exporter."""
    import openvino

    model = openvino.Core().read_model(str(made.folder / "openvino" / "model.xml"))
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    return {n.get_friendly_name(): (n.get_element_type().get_type_name(), n) for n in nodes}


# gpt2 has no rotation, gemma2 caps scores and has windows, llama-tied a head that is the table, bert no cache
@pytest.mark.parametrize("name", beside(["gemma2", "bert"], ["llama-tied", "gemma2", "gpt2", "bert"]))
def test_it_computes_what_transformers_does(small: Any, name: str) -> None:
    made = small(name)
    assert all(each.ok for each in made.check().values())
    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    model = opened(made)
    if name == "bert":
        assert relative(model.encode(ids.numpy()), expected(made.model, ids)) < LIMIT
        return
    state = model.state(2, 9)
    parts = [model.run(state, ids[:, :5].numpy())]
    parts += [model.run(state, ids[:, [at]].numpy()) for at in range(5, 9)]
    assert relative(np.concatenate(parts, axis=1), expected(made.model, ids)) < LIMIT
    assert model.run(model.state(2, 9), ids.numpy(), keep=1).shape == (2, 1, model.vocabulary)


@pytest.mark.parametrize("how", [scheme(), SYMMETRIC, BYTES], ids=["zero points", "symmetric", "8 bits"])
def test_codes_are_ours_as_they_are(small: Any, how: WeightScheme, request: pytest.FixtureRequest) -> None:
    made = small("llama-tied", how)
    stored = constants(made)
    linear = "model.layers.1.mlp.down_proj"
    kind, node = stored[f"{linear}.codes"]
    assert kind == {"zero points": "u4", "symmetric": "i4", "8 bits": "u8"}[request.node.callspec.id]
    tensor = made.results.quantized(linear)
    raw = node.data.reshape(-1)
    found = (raw if kind == "u8" else np.stack([raw & 15, raw >> 4], -1).reshape(-1)).astype(np.int16)
    if kind == "i4":  # two's complement
        found = np.where(found > 7, found - 16, found)
    wanted = tensor.codes.numpy().astype(np.int16) + {"u4": 8, "i4": 0, "u8": 128}[kind]
    # a row is filled up to whole blocks, where there are no groups
    assert (found.reshape(len(wanted), -1)[:, : wanted.shape[1]] == wanted).all()
    assert (f"{linear}.zeros" in stored) is (not how.symmetric)


def test_symmetric_codes_are_multiplied_in_4_bits(small: Any) -> None:
    """Packed until the product, with nothing subtracted: what the CPU's plug-in says that it runs."""
    made = small("llama-tied", SYMMETRIC)
    assert all(each.ok for each in made.check().values())
    ran = [each.get_rt_info() for each in opened(made)._model.get_runtime_model().get_ordered_ops()]
    told = [each for each in ran if "layerType" in each and each["layerType"].astype(str) == "FullyConnected"]
    kinds = [each["runtimePrecision"].astype(str) for each in told]
    assert kinds.count("i4") == len([name for name in constants(made) if name.endswith(".codes")])


def test_a_symmetric_file_with_the_wrong_type_is_named(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU refuses zero points: codes that are right, but from 0, are not what was asked for."""
    made = copy.copy(small("llama-tied", SYMMETRIC))
    found = model.constants
    monkeypatch.setattr(
        model,
        "constants",
        lambda model: [(name, "u4" if kind == "i4" else kind, data) for name, kind, data in found(model)],
    )
    assert not made.check()["openvino.codes"].ok


def test_the_same_model_is_the_same_file(small: Any, tmp_path: Path) -> None:
    made = small("llama-tied")
    again = export(tmp_path, "llama-tied", scheme(), exporter=EXPORT)
    for name in ("model.xml", "model.bin"):
        assert (again.folder / "openvino" / name).read_bytes() == (made.folder / "openvino" / name).read_bytes()


def test_fixed_inputs_are_multiplied_in_bytes(small: Any) -> None:
    made = small("bert", BYTES, activations=FIXED)
    assert all(each.ok for each in made.check().values())
    ran = opened(made)._model.get_runtime_model().get_ordered_ops()
    kinds = [n.get_rt_info()["runtimePrecision"].astype(str) for n in ran if n.get_type_name() == "ExecutionNode"]
    assert kinds.count("i8") >= 18  # six linears in each of three layers


def test_a_wrong_code_is_named(small: Any, tmp_path: Path) -> None:
    made = copy.copy(small("llama-tied"))
    shutil.copytree(made.folder, tmp_path / "b")
    made.folder = tmp_path / "b"
    path = made.folder / "openvino" / "model.bin"
    whole = bytearray(path.read_bytes())
    codes = constants(made)["model.layers.0.mlp.up_proj.codes"][1].data.tobytes()
    whole[whole.index(codes)] ^= 1
    path.write_bytes(whole)
    found = made.check()
    assert list(found) == ["openvino.codes"] and not found["openvino.codes"].ok
    assert found["openvino.codes"].where == "model.layers.0.mlp.up_proj.codes"


@pytest.mark.parametrize(
    ("options", "schemes", "inputs", "cache", "code", "says"),
    [
        ({}, WeightScheme(format="int3", granularity="group", group=32), None, None, "layout-unsupported", "4 and 8"),
        ({}, BYTES, ActivationScheme(format="int8", granularity="token"), None, "layout-unsupported", "scales"),
        ({}, BYTES, None, CacheScheme(format="int8"), "layout-unsupported", "float32"),
        ({"device": "NPU"}, scheme(), None, None, "npu-unsupported", "docs.openvino.ai"),
    ],
)
def test_what_it_cannot_take_is_refused_before_any_work(
    options: Any, schemes: WeightScheme, inputs: Any, cache: Any, code: str, says: str
) -> None:
    given = {"model.x": inputs} if inputs else {}
    with pytest.raises(InputError) as caught:
        EXPORT.accepts(EXPORT.Options(**options), LayerSpec({"model.x": schemes}, activations=given, cache=cache))
    assert caught.value.code == code and says in caught.value.line() and "\n" not in caught.value.line()


def test_an_npu_takes_encoders_of_one_shape_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cache grows"):
        export(tmp_path / "a", "llama-tied", SYMMETRIC, exporter=EXPORT, device="NPU")
    with pytest.raises(InputError, match="any shape"):
        export(tmp_path / "b", "bert", SYMMETRIC, exporter=EXPORT, device="NPU")
    made = export(tmp_path / "c", "bert", SYMMETRIC, exporter=EXPORT, device="NPU", shape=(2, 9))
    # weights without zero points, in the file too
    stored = constants(made)
    assert {kind for name, (kind, _) in stored.items() if name.endswith(".codes")} == {"i4"}
    assert not any(kind in ("u4", "u8") for kind, _ in stored.values())
    model = opened(made, device="CPU")
    ids = np.ones((2, 9), np.int64)
    assert relative(model.encode(ids), expected(made.model, torch.from_numpy(ids))) < LIMIT
    with pytest.raises(InputError, match="written for 2 of 9"):
        model.encode(ids[:, :4])
    with pytest.raises(InputError, match="finds no NPU"):
        opened(made)


def test_a_network_s_codes_stay_and_are_multiplied_in_bytes(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    draw = np.random.default_rng(0)
    # as `unsaturated` bounds them: two products with bytes fit 16 bits, in which processors without VNNI add them up
    codes = draw.integers(64, 193, (8, 3, 3, 3), dtype=np.uint8)
    stored = {
        "c.weight.codes": codes,
        "c.weight.scale": draw.uniform(0.001, 0.002, 8).astype(np.float32),
        "c.weight.zero": np.full(8, 128, np.uint8),
        "x.scale": np.float32(0.02),
        "x.zero": np.uint8(128),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x.scale", "x.zero"], ["x.codes"]),
        helper.make_node("DequantizeLinear", ["x.codes", "x.scale", "x.zero"], ["x.values"]),
        helper.make_node(
            "DequantizeLinear", ["c.weight.codes", "c.weight.scale", "c.weight.zero"], ["c.weight"], axis=0
        ),
        helper.make_node("Conv", ["x.values", "c.weight"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    x, y = (value(name, TensorProto.FLOAT, ["n", size, None, None]) for name, size in (("x", 3), ("y", 8)))
    x.type.tensor_type.shape.dim[2].dim_value = x.type.tensor_type.shape.dim[3].dim_value = 16
    constants_ = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], constants_)
    path = tmp_path / "model.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    with pytest.raises(InputError, match="static shapes"):
        EXPORT.add_graph(path, tmp_path / "npu", EXPORT.Options(device="NPU"))
    EXPORT.add_graph(path, tmp_path / "openvino", EXPORT.Options(shape=(2,)))
    feed = {"x": draw.normal(size=(2, 3, 16, 16)).astype(np.float32)}
    assert {each.name: each.ok for each in EXPORT.check_graph(path, tmp_path / "openvino", feed)} == {
        "openvino.codes": True,
        "reload.openvino": True,
    }
    import openvino

    model = openvino.Core().read_model(str(tmp_path / "openvino" / "model.xml"))
    found = next(node for node in model.get_ordered_ops() if node.get_friendly_name() == "c.weight.codes")
    assert found.get_element_type().get_type_name() == "i8"
    assert (found.data.astype(np.int16) + 128 == codes).all()
    from quantkit.runtimes.openvino.session import OpenvinoGraph

    with pytest.raises(InputError, match="shape-unsupported"):
        OpenvinoGraph(tmp_path / "openvino" / "model.xml", 1)({"x": feed["x"][:1]})
