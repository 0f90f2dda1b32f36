"""What is no float graph is refused in one line; what is comes with its inputs."""

import re
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_graph import Small

from quantkit.errors import InputError
from quantkit.graph.fuse import fuse
from quantkit.graph.open import is_graph, kind_of, open_graph
from quantkit.graph.run import Runner

HEAD = '<ir_version: 10, opset_import: ["" : {opset}{more}]> g (float[N,4] x) => (float[N,4] y) {{ {body} }}'


def written(path: Path, body: str = "y = Relu(x)", opset: int = 21, more: str = "", **replaced: str) -> Path:
    text = HEAD.format(body=body, opset=opset, more=more)
    for old, new in replaced.items():
        text = text.replace(old, new)
    ir.save(ir.from_onnx_text(text), path)
    return path


def refused(code: str, path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_graph(path)
    line = caught.value.line()
    assert caught.value.code == code, line
    assert "\n" not in line
    return line


def test_a_networks_inputs_and_identity(tmp_path: Path) -> None:
    graph = open_graph(networks.write(tmp_path / "tiny.onnx"))
    assert [(each.name, each.dtype, each.shape) for each in graph.inputs] == [("images", "float32", (None, 3, 12, 12))]
    assert graph.name == "tiny"
    assert len(graph.sha256) == 64
    assert is_graph("a/b.ONNX")
    assert not is_graph("smollm2-135m")
    model = ir.load(graph.path)
    for node in model.graph:
        node.name = ""
    ir.save(model, tmp_path / "nameless.onnx")
    nodes = list(open_graph(tmp_path / "nameless.onnx").model.graph)
    assert nodes and all(node.name == node.outputs[0].name for node in nodes), "which its own file knows"


def looked_up(*others: tuple[str, ir.DataType, int], name: str = "ids", cast: bool = False, **more: Any) -> str:
    """The kind of a graph that reads rows of a table by whole numbers, beside other inputs of so many sizes."""
    small = Small()
    ids = small.input(name, "N", "T", dtype=ir.DataType.INT64)
    for other, dtype, sizes in others:
        small.input(other, *["N", "T", 3, 4][:sizes], dtype=dtype)
    which = small.op("Cast", ids, to=ir.DataType.INT32) if cast else ids
    read = small.op("Gather", small.constant(small.normal(9, 4), "table"), which, **more)
    return kind_of(small.model(small.op("ReduceMean", read, np.array([1]), keepdims=0)))


def test_what_takes_token_ids_is_an_encoder(tmp_path: Path) -> None:
    floats, whole = ir.DataType.FLOAT, ir.DataType.INT64
    assert looked_up() == looked_up(cast=True) == "encoder"
    assert looked_up(("attention_mask", whole, 2), ("token_type_ids", whole, 2)) == "encoder"
    assert looked_up(("mask", floats, 2)) == "encoder"
    # images beside them, or what is looked up is no row
    assert looked_up(("images", floats, 4)) == "network"
    assert looked_up(axis=1) == "network"
    assert looked_up(axis=1, name="input_ids") == "encoder"
    assert open_graph(networks.write(tmp_path / "tiny.onnx")).kind == "network"
    # the size of each image, in whole numbers, looks nothing up
    small = Small()
    sizes = small.input("sizes", "N", 2, dtype=whole)
    assert kind_of(small.model(small.op("Cast", sizes, to=floats))) == "network"


def test_what_is_no_float_graph(tmp_path: Path) -> None:
    refused("file-missing", tmp_path / "none.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"\x08\x09 not a model")
    refused("onnx-unreadable", tmp_path / "junk.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    refused("onnx-unreadable", tmp_path / "empty.onnx")
    path = tmp_path / "x.onnx"
    body = "s = Constant <value = float {0.5}> () z = Constant <value = uint8 {0}> () q = QuantizeLinear(x, s, z)"
    body += " y = DequantizeLinear(q, s, z)"
    assert "before it was quantized" in refused("onnx-quantized", written(path, body))
    assert "'my.ops'" in refused("onnx-operator", written(path, "y = my.ops.Magic(x)", more=', "my.ops" : 1'))
    old = onnx.load(written(path, opset=11))
    (converting,) = re.findall(r"onnx\.version_converter\.\S+ \d+\)", refused("onnx-opset", path))
    onnx.save(eval(converting, {"onnx": onnx, "model": old}), path)
    assert [each.name for each in open_graph(path).inputs] == ["x"]


def test_weights_are_finite_float32(tmp_path: Path) -> None:
    graph = open_graph(networks.write(tmp_path / "tiny.onnx"))
    weight = next(value for value in graph.model.graph.initializers.values() if "stem.0.weight" in str(value.name))
    values = weight.const_value.numpy().copy()  # type: ignore[union-attr]
    values[0, 0, 0, 0] = np.nan
    weight.const_value = ir.tensor(values, name=weight.name)
    ir.save(graph.model, tmp_path / "nan.onnx")
    assert "stem.0.weight" in refused("onnx-weights", tmp_path / "nan.onnx")
    weight.const_value = ir.tensor(values.astype(np.float16), name=weight.name)
    ir.save(graph.model, tmp_path / "half.onnx")
    assert "float16" in refused("onnx-dtype", tmp_path / "half.onnx")


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """A graph whose weights lie beside it."""
    model = ir.load(networks.write(tmp_path / "whole.onnx"))
    folder = tmp_path / "apart"
    folder.mkdir()
    ir.save(model, folder / "model.onnx", external_data="weights.bin", size_threshold_bytes=64)
    return folder


def moved(folder: Path, place: str) -> Path:
    """The same graph, its weights said to be elsewhere."""
    data = (folder / "model.onnx").read_bytes()
    made = folder / "moved.onnx"
    model: Any = ir.load(folder / "model.onnx")
    assert b"weights.bin" in data
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            new = ir.ExternalTensor(
                place, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name
            )
            value.const_value = new
    made.write_bytes(ir.to_proto(model).SerializeToString())
    return made


def test_weights_beside_the_graph_are_read_from_its_folder_alone(apart: Path, tmp_path: Path) -> None:
    found = open_graph(apart / "model.onnx")
    assert found.sha256 != open_graph(tmp_path / "whole.onnx").sha256
    (tmp_path / "outside.bin").write_bytes((apart / "weights.bin").read_bytes())
    for place in ("../outside.bin", str(tmp_path / "outside.bin"), "..\\outside.bin", "none.bin", "C:/x.bin"):
        refused("onnx-external", moved(apart, place))
    (apart / "link.bin").symlink_to(tmp_path / "outside.bin")
    assert "is a link" in refused("onnx-external", moved(apart, "link.bin"))
    (apart / "weights.bin").write_bytes((apart / "weights.bin").read_bytes()[:100])
    assert "a weight ends at" in refused("onnx-external", apart / "model.onnx")


def test_a_constant_that_holds_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    model = ir.from_onnx_text(HEAD.format(body="y = Relu(x)", opset=21, more=""))
    tensor = ir.ExternalTensor("w.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape((4,)), name="c")
    node = ir.node("Constant", [], attributes={"value": tensor}, name="held")
    model.graph.insert_before(model.graph[0], node)
    (tmp_path / "x.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    assert "held has a constant in another file" in refused("onnx-external", tmp_path / "x.onnx")


def test_weights_among_the_inputs_are_weights(tmp_path: Path) -> None:
    path = networks.write(tmp_path / "tiny.onnx")
    model = ir.load(path)
    model.graph.inputs.extend(model.graph.initializers.values())
    (tmp_path / "old.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    assert [each.name for each in open_graph(tmp_path / "old.onnx").inputs] == ["images"]
    assert open_graph(path).bytes == path.stat().st_size


FUNCTION = '<domain: "my", opset_import: ["" : {opset}, "my" : 1]> {body}'


def functions(path: Path, *bodies: str, call: str = "Outer", opset: int = 17) -> Path:
    text = HEAD.format(body=f"y = my.{call}(x)", opset=17, more=', "my" : 1')
    text += "".join(FUNCTION.format(opset=opset, body=body) for body in bodies)
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


INNER = "Inner <alpha> (X) => (Y) { A = LeakyRelu <alpha: float = @alpha> (X) Y = Neg(A) }"
OUTER = "Outer (X) => (Y) { A = my.Inner <alpha = 0.5> (X) Y = my.Inner <alpha = 0.25> (A) }"


@pytest.mark.parametrize("opset", [17, 13])
def test_functions_are_put_in_the_place_of_their_calls(tmp_path: Path, opset: int) -> None:
    path = functions(tmp_path / "m.onnx", INNER, OUTER, opset=opset)
    model = open_graph(path).model
    assert (len(model.functions), [node.op_type for node in model.graph]) == (0, ["LeakyRelu", "Neg"] * 2)
    x = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    np.testing.assert_array_equal(Runner(model)(x)["y"], Runner(path)(x)["y"])
    # what is converted to another opset, as for an engine, is converted everywhere
    fuse(model, [x])
    assert model.opset_imports[""] == 21


def test_functions_without_an_end_are_refused(tmp_path: Path) -> None:
    line = refused("onnx-unreadable", functions(tmp_path / "a.onnx", "Outer (X) => (Y) { Y = my.Outer(X) }"))
    assert "the function Outer calls itself" in line
    twice = [f"F{n + 1} (X) => (Y) {{ A = my.F{n}(X) Y = my.F{n}(A) }}" for n in range(40)]
    line = refused(
        "onnx-unreadable", functions(tmp_path / "b.onnx", "F0 (X) => (Y) { Y = Relu(X) }", *twice, call="F40")
    )
    assert "a graph has at most 1,000,000" in line
    foreign = functions(tmp_path / "c.onnx", "Outer (X) => (Y) { Y = other.Thing(X) }")
    assert "(Thing) of 'other'" in refused("onnx-operator", foreign)
