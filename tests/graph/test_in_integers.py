"""Products that ONNX Runtime would fuse before it quantizes, weights in other forms, and names that are taken."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators
from thorough import beside

import quantkit
from quantkit.errors import GateError
from quantkit.graph import integer
from quantkit.graph.codes import solve
from quantkit.graph.fuse import fuse, fusions
from quantkit.graph.integer import QuantizedSite, found
from quantkit.graph.pairs import placement, qdq
from quantkit.graph.run import Runner
from quantkit.graph.sites import left_in_floats, sites
from quantkit.pipeline.reload import reload
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.scheme import ActivationScheme

K = 8


def linear(small: Small, kind: str, x: ir.Value) -> ir.Value:
    weight, bias = small.normal(K, K) / 3, small.normal(K)
    if kind == "Gemm":
        return small.op("Gemm", x, weight, bias)
    y = small.op("MatMul", x, weight)
    return small.op("Add", y, bias) if kind == "biased" else y


def activated(small: Small, kind: str, y: ir.Value) -> ir.Value:
    if kind == "Clip":
        return small.op("Clip", y, np.float32(0), np.float32(6))
    return small.op(kind, y) if kind else y


def branch(small: Small, kind: str, z: ir.Value) -> ir.Value:
    """Both branches read a value of the graph around them."""
    made = []
    for operator in ("Relu", "Abs"):
        node = ir.node(operator, [z])
        node.outputs[0].name, node.outputs[0].dtype = f"{z.name}.{operator}", ir.DataType.FLOAT
        made.append(ir.Graph([], node.outputs, nodes=[node], name=operator, opset_imports={"": 21}))
    positive = small.op("Greater", small.op("ReduceSum", z, keepdims=0), np.float32(0))
    return small.op("If", positive, then_branch=made[0], else_branch=made[1])


READERS: dict[str, Any] = {
    "norm": lambda small, z, x: small.op("LayerNormalization", z, np.ones(K, np.float32), small.normal(K)),
    "residual": lambda small, z, x: small.op("Add", z, x),
    "other way round": lambda small, z, x: small.op("Relu", small.op("Add", x, z)),
    "twice": lambda small, z, x: small.op("Add", z, z),
    "gate": lambda small, z, x: small.op("Mul", z, x),
    "softmax": lambda small, z, x: small.op("Softmax", z),
    "concat": lambda small, z, x: small.op("Concat", z, x, axis=-1),
    "moved": lambda small, z, x: small.op("Transpose", small.op("Reshape", z, np.array([-1, 2])), perm=[1, 0]),
    "output": lambda small, z, x: z,
    "If": lambda small, z, x: branch(small, "If", z),
    "both": lambda small, z, x: small.op("Add", small.op("MatMul", small.op("Relu", z), small.normal(K, K)), z),
    "product": lambda small, z, x: small.op("MatMul", z, small.normal(K, 5)),
}


def in_integers(model: ir.Model, x: Any, folder: Path, *, symmetric: bool = False) -> integer.IntegerKernels:
    """What ONNX Runtime makes of a graph, whose numbers are compared with those of the graph in floats."""
    feeds = [{"x": x}]
    expected = Runner(model, optimised=False)(feeds[0])
    fuse(model, feeds, chosen=fusions(feeds, equalize=False))
    named = {site.name: site for site in sites(model)}
    place = placement.place(model, list(named.values()), named, absorbing=not symmetric)
    scheme = ActivationScheme(format="int8", granularity="tensor", dynamic=False, symmetric=symmetric)
    codes = {}
    for name, site in named.items():
        matrix = site.matrix()
        scale = np.abs(matrix).max(axis=1) / np.float32(127)
        bias = None if site.node.op_type == "MatMul" else np.zeros(len(scale), np.float32)
        given = qdq.bias_of(site)
        rounded = np.rint(matrix / scale[:, None]).astype(np.int8)
        codes[name] = qdq.Codes(rounded, scale, bias if given is None else given)
    made = qdq.insert(model, place, solve.ranges(model, place, feeds, scheme), codes, named, weight_type="int8")
    ir.save(made, folder / "made.onnx")
    for name, values in Runner(folder / "made.onnx")(feeds[0]).items():
        error = np.linalg.norm(values - expected[name]) / np.linalg.norm(expected[name])
        assert error < 0.05, f"{name}: {error}"  # two roundings to 1 / 255 of a range of some 6 deviations, summed
    write_optimized(folder / "made.onnx", folder / "optimised.onnx")
    wanted = [integer.QuantizedSite(name, f"{site.stem}.codes", 1.0, site.output) for name, site in named.items()]
    return integer.found(ir.load(folder / "optimised.onnx"), wanted)


@pytest.mark.parametrize(("sizes", "symmetric"), [(("n", K), False), ((6, K), True), (("n", 5, K), False)])
def test_products_whatever_reads_them(sizes: tuple[Any, ...], symmetric: bool, tmp_path: Path) -> None:
    small = Small()
    x = small.input("x", *sizes)
    ends = []
    kinds = ("Gemm", "MatMul", "biased") if len(sizes) == 2 else ("MatMul", "biased")
    for kind, activation, reader in product(kinds, ("", "Relu", "Clip", "LeakyRelu"), READERS):
        ends.append(READERS[reader](small, activated(small, activation, linear(small, kind, x)), x))
    values = np.random.default_rng(0).standard_normal((6, *sizes[1:])).astype(np.float32)
    found = in_integers(small.model(*ends), values, tmp_path, symmetric=symmetric)
    assert (found.share, found.floating) == (1.0, {})


def test_products_in_other_forms_are_matrices(tmp_path: Path) -> None:
    small = Small()
    x = small.input("x", K, K)
    y = small.op("Gemm", x, small.normal(K, K), small.normal(K), alpha=0.5, beta=2.0, transA=1, transB=1)
    y = small.op("Gemm", y, small.normal(K, K), small.op("Relu", x), beta=0.5)
    y = small.op("Gemm", y, small.normal(K, K), small.normal(K, K))
    y = small.op("MatMul", y, small.normal(1, K, K))
    first = small.op("MatMul", y, small.normal(1, 1, K, K))
    shared = small.constant(small.random.standard_normal((160, 160)).astype(np.float32))
    wide = small.op("MatMul", small.op("MatMul", x, small.normal(K, 160)), shared)
    ends = [first, small.op("MatMul", wide, small.op("Transpose", shared, perm=[1, 0]))]
    y = small.op(
        "Einsum",
        small.op("Einsum", x, small.normal(K, K), equation="ij,jk->ik"),
        small.normal(K, K),
        equation="...k, nk -> ...n",
    )
    ends.append(y)
    model = small.model(*ends)
    found = in_integers(model, small.normal(K, K), tmp_path)
    assert (found.share, left_in_floats(model), sum(found.kernels.values())) == (1.0, [], 10)


def test_what_is_left_in_floats_has_a_reason() -> None:
    small = Small()
    x = small.input("x", "n", 4, K)
    ids = small.input("ids", "n", dtype=ir.DataType.INT64)
    small.op("MatMul", x, small.normal(4, K, K), name="heads")
    small.op("MatMul", small.normal(4, 4), x, name="left")
    small.op("ConvTranspose", x, small.normal(4, 3, 2), name="up")
    small.op("GRU", x, small.normal(1, 9, K), small.normal(1, 9, 3), hidden_size=3, name="cell")
    small.op("Einsum", x, small.normal(K, K), equation="nij,jk->nki", name="sum")
    small.op("MatMul", x, np.zeros((K, K), np.float32), name="nothing")
    small.op("Gather", small.normal(5, K), ids, name="table")
    last = small.op("MatMul", x, small.normal(K, K), name="good")
    model = small.model(last)
    left = left_in_floats(model)
    assert [each.name for each in left] == ["heads", "left", "up", "cell", "cell", "sum", "nothing", "table"]
    assert [each.name for each in left if not each.reason] == ["table"]
    assert [site.name for site in sites(model)] == ["good"]


# what is put in is called `TENSOR.scale`, `OUTPUT.weight.codes`, `OUTPUT/codes`, ...
TAKEN = ("x.scale", "x.values", "x.quantized", "x/codes", "{}.weight.codes", "{}.weight", "{}.quantized", "{}.floats")


def hostile(path: Path) -> Path:
    """Products whose values, nodes and subgraphs have the names that new ones would get."""
    small = Small(opset=21)
    x = small.input("x", "n", 16)
    first = y = small.op("Gemm", x, small.normal(16, 16) / 4, small.normal(16), name="x/dq")
    ends = [y]
    for place, name in enumerate(TAKEN):
        own = small.op("Relu", y)
        y = small.op("Gemm", own, small.normal(16, 16) / 4, small.normal(16), name=f"{name}/q")
        (y if place % 2 else own).name = name.format(first.name)
    y.name = "x.scale_"
    z = branch(small, "If", y)
    inner = z.producer().attributes["then_branch"].as_graph()  # type: ignore[union-attr]
    inner[0].outputs[0].name = "x.scale_.scale"
    ends += [small.op("Gemm", z, small.normal(16, 4), small.normal(4), name="")]
    ends[-1].name = "x.zero"
    ir.save(small.model(*ends), path)
    return path


@pytest.mark.parametrize("recipe", beside(["int8-network"], ["int8-network", "int8-dynamic", "int8-tensorrt"]))
def test_names_that_are_taken(recipe: str, tmp_path: Path) -> None:
    path = hostile(tmp_path / "model.onnx")
    inputs = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
    np.savez(tmp_path / "set.npz", x=inputs)
    engine = recipe == "int8-tensorrt"
    changes = ["export=[{tensorrt: {engine: false}}]"] if engine else []
    given = {"target": "rtx-4090" if engine else None, "calibration": tmp_path / "set.npz", "speed": False}
    result = quantkit.compile(str(path), recipe=recipe, out=tmp_path / "out", changes=changes, **given)
    assert len(result.manifest.layers) == len(TAKEN) + 2
    assert all(each.ok for each in reload(result)[0])
    written = tmp_path / "out" / ("engine/network.onnx" if engine else "onnx/model.onnx")
    expected, found = Runner(path)({"x": inputs}), Runner(written, literal=engine)({"x": inputs})
    assert list(expected) == list(found)
    for name, values in expected.items():
        assert np.linalg.norm(found[name] - values) / np.linalg.norm(values) < 0.1, name
    assert "Gemm" not in operators(ir.load(written)) or not recipe.endswith("dynamic")


def test_weights_that_stay_in_floats_are_counted(tmp_path: Path) -> None:
    small = Small()
    heads = small.op("MatMul", small.input("x", "n", 4, 2, K), small.normal(4, K, K), name="heads")
    ir.save(small.model(small.op("MatMul", heads, small.normal(K, 2 * K), name="last")), tmp_path / "m.onnx")
    np.savez(tmp_path / "set.npz", x=small.normal(40, 4, 2, K))
    given: dict[str, Any] = {"recipe": "int8-network", "calibration": tmp_path / "set.npz", "speed": False}
    result = quantkit.compile(str(tmp_path / "m.onnx"), out=tmp_path / "out", **given)
    share = 4 * K * K / (4 * K * K + K * 2 * K)
    (warned,) = [each for each in result.manifest.decisions if each.code == "floats-left"]
    assert warned.to == pytest.approx(share, abs=1e-4)
    assert "heads: its weight is a stack of matrices" in warned.reason
    assert {each.example: each.state for each in result.manifest.weights} == {"heads": "carried", "last": "quantized"}
    with pytest.raises(GateError, match="floats-left"):
        quantkit.compile(str(tmp_path / "m.onnx"), out=tmp_path / "strict", strict=True, **given)


TEXT = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[M,4] x, uint8[M,4] q) => (float[M,3] a, float[M,3] b, float[M,3] c)
<float scale = {0.5}, uint8 zero = {128}, uint8[4,3] wa = {0,0,0,0,0,0,0,0,0,0,0,0},
 uint8[4,3] wb = {0,0,0,0,0,0,0,0,0,0,0,0}, uint8[4,3] wc_turned = {0,0,0,0,0,0,0,0,0,0,0,0}>
{
    a = com.microsoft.MatMulIntegerToFloat(q, wa, scale, scale, zero, zero)
    dense = DequantizeLinear(wb, scale, zero)
    b = MatMul(x, dense)
    sums = MatMulInteger(q, wc_turned, zero, zero)
    c = Cast <to = 1> (sums)
}
"""


def test_sites_are_found_by_their_codes() -> None:
    model = ir.from_onnx_text(TEXT)
    sites = [
        QuantizedSite("first", "wa", 6),
        QuantizedSite("second", "wb", 3),
        QuantizedSite("third", "wc", 1),
        QuantizedSite("fourth", "gone", 2),
    ]
    result = found(model, sites)
    assert result.share == pytest.approx(7 / 12)
    assert result.floating == {"second": "MatMul", "fourth": "no operator reads its weight"}
    assert result.kernels == {"MatMulIntegerToFloat": 1, "MatMulInteger": 1}


def test_a_site_whose_codes_were_renamed_is_found_by_what_it_makes() -> None:
    result = found(
        ir.from_onnx_text(TEXT), [QuantizedSite("first", "other", 1, "a"), QuantizedSite("second", "other", 1, "b")]
    )
    assert (result.share, result.floating) == (0.5, {"second": "MatMul"})


def test_a_name_that_begins_alike_is_another_tensor() -> None:
    assert found(ir.from_onnx_text(TEXT.replace("wc_turned", "wc2")), [QuantizedSite("third", "wc", 1)]).share == 0


def test_nothing_to_find_is_all() -> None:
    assert found(ir.from_onnx_text(TEXT), []).share == 1
