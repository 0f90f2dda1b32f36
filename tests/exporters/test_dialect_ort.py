"""The dialect of ONNX Runtime on graphs made by hand: packing against a plain oracle, fusions against plain numpy."""

import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_matmulnbits
from small_onnx import scheme

from quantkit.errors import InputError
from quantkit.exporters.onnx.dialect import OrtDialect
from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName, block_size, pack
from quantkit.exporters.trace.rewrite import DOMAIN, Traced
from quantkit.scheme import WeightScheme

GROUP = {"granularity": "group"}


def weights(linears: dict[str, tuple[int, int, WeightScheme | None]], seed: int = 0, **tensors: Any) -> WeightsByName:
    """Random codes (or floats) by name, made anew whenever they are asked for."""
    generator = np.random.default_rng(seed)
    plain, coded = {}, {}
    for name, (rows, columns, how) in linears.items():
        plain[f"{name}.weight"] = generator.standard_normal((rows, columns)).astype(np.float32)
        if how is None:
            continue
        bits = int(how.format.removeprefix("int"))
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        group = how.group or columns
        filled = -(-columns // group) * group
        shape = {"tensor": (1, 1), "channel": (rows, 1)}.get(how.granularity, (rows, filled // group))
        codes = generator.integers(low, high, (rows, filled)).astype(np.int8)
        scale = generator.uniform(0.01, 0.1, shape).astype(np.float32)
        zero = None if how.symmetric else generator.integers(low, high, shape).astype(np.int8)
        # what fills a row up stands for zeros
        blank = np.zeros((rows, 1), np.int8) if zero is None else np.broadcast_to(zero[:, -1:], (rows, 1))
        codes[:, columns:] = blank
        coded[name] = codes, scale, zero
    found = {name: LinearSpec(rows, columns, how) for name, (rows, columns, how) in linears.items()}
    values = plain | tensors
    shapes = {name: value.shape for name, value in values.items()}
    return WeightsByName(found, shapes, values.__getitem__, lambda name: coded[name][0], lambda name: coded[name][1:])


def dense(given: WeightsByName, name: str) -> Any:
    """[N, K] float32 by the definition."""
    linear = given.linears[name]
    if linear.scheme is None:
        return given.tensor(f"{name}.weight")
    codes, (scale, zero) = given.codes(name), given.grid(name)
    steps = codes.astype(np.float32).reshape(*scale.shape[:1], -1) if scale.shape == (1, 1) else codes
    each = codes.shape[1] // scale.shape[1]
    wide = np.repeat(scale, each, axis=1)
    points = 0 if zero is None else np.repeat(zero.astype(np.float32), each, axis=1)
    values = (steps.reshape(codes.shape) - points) * wide
    return values[:, : linear.columns].astype(np.float32)


class Graph:
    """A traced graph with one input [B, S, K], grown node by node."""

    def __init__(self, columns: int) -> None:
        self.x = self.input("x", ("batch", "length", columns))
        self.nodes: list[Any] = []
        self.outputs: list[Any] = []
        self.parameters: dict[str, str] = {}
        self.inputs = [self.x]

    def input(self, name: str, shape: Any) -> Any:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    def parameter(self, name: str, shape: Any) -> Any:
        self.parameters[f"model.{name}"] = name
        return self.input(f"model.{name}", shape)

    def node(self, kind: str, *inputs: Any, shape: Any = None, domain: str = "", **attributes: Any) -> Any:
        value = self.input(f"{kind}.{len(self.nodes)}", shape or inputs[0].shape)
        given = ir.convenience.convert_attributes(attributes)
        self.nodes.append(ir.Node(domain, kind, list(inputs), given, outputs=[value]))
        return value

    def linear(self, name: str, x: Any, rows: int) -> Any:
        return self.node("Linear", x, shape=(*list(x.shape)[:-1], rows), domain=DOMAIN, name=name)

    def norm(self, name: str, x: Any, offset: float = 0.0) -> Any:
        return self.node("RMSNorm", x, domain=DOMAIN, name=name, epsilon=1e-5, offset=offset)

    def traced(self, *outputs: Any) -> Traced:
        graph = ir.Graph(self.inputs, list(outputs), nodes=self.nodes, opset_imports={"": 23, DOMAIN: 1}, name="g")
        return Traced(ir.Model(graph, ir_version=10), self.parameters, False, 0)


def run(model: Any, *feeds: Any) -> list[Any]:
    """In ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    found: list[Any] = session.run(None, {value.name: x for value, x in zip(session.get_inputs(), feeds, strict=True)})
    return found


def kinds(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


# --- packing ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_pack_is_one_long_little_endian_integer(bits: int, rows: int, count: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**bits, (rows, count * (8 // bits))).astype(np.uint8)
    packed = pack(words, bits)
    assert packed.shape == (rows, count)
    for row in range(rows):
        found = [plain_matmulnbits.word(bytes(packed[row]), place, bits) for place in range(words.shape[1])]
        assert found == words[row].tolist()


@pytest.mark.parametrize(
    ("columns", "how", "block"),
    [
        (4096, scheme(**GROUP, group=128), 128),
        (4096, scheme(**GROUP, group=512), 256),
        (4096, scheme(**GROUP, group=32), 32),
        (576, scheme(**GROUP, group=64), 64),
        (576, scheme(**GROUP, group=96), 32),
        (576, scheme(**GROUP, group=48), 16),
        (576, scheme(**GROUP, group=144), 16),
        (4096, scheme(granularity="channel"), 128),
        (96, scheme(granularity="channel"), 64),
        (17, scheme(granularity="tensor"), 16),
        (3, scheme(granularity="channel"), 16),
    ],
)
def test_blocks_divide_groups(columns: int, how: WeightScheme, block: int) -> None:
    assert block_size(columns, how, "a") == block


@pytest.mark.parametrize("group", [8, 24, 100, 72])
def test_groups_that_no_block_divides_are_refused(group: int) -> None:
    with pytest.raises(InputError, match=rf"a\.linear.*groups of {group}.*multiple of 16"):
        block_size(4096, scheme(**GROUP, group=group), "a.linear")


PRODUCTS = [
    (8, 64, scheme(**GROUP, group=16)),
    (8, 64, scheme(**GROUP, group=16, symmetric=False)),
    (8, 96, scheme(**GROUP, group=96, symmetric=False)),  # 3 blocks of 32: a zero point alone in its byte
    (8, 96, scheme(**GROUP, group=48, symmetric=False)),
    (3, 144, scheme(**GROUP, group=48, symmetric=False)),  # 9 blocks
    (5, 64, scheme(**GROUP, group=96, symmetric=False)),  # filled up to 96
    (5, 80, scheme(**GROUP, group=48, symmetric=False)),  # filled up to 96, two groups
    (5, 512, scheme(**GROUP, group=512, symmetric=False)),  # one group, two blocks
    (1, 17, scheme(granularity="channel", symmetric=False)),  # the last block nearly empty
    (7, 100, scheme(granularity="channel")),
    (4, 3, scheme(granularity="channel", symmetric=False)),
    (4, 100, scheme(granularity="tensor", symmetric=False)),
    (4, 100, scheme(granularity="tensor")),
    (7, 96, scheme("int2", **GROUP, group=32, symmetric=False)),  # zero points of 3 blocks in a byte
    (7, 160, scheme("int2", **GROUP, group=32)),
    (5, 80, scheme("int2", **GROUP, group=48, symmetric=False)),
    (3, 512, scheme("int2", **GROUP, group=256)),  # two blocks a group: none of 256 has a kernel
    (3, 50, scheme("int2", granularity="channel", symmetric=False)),
    (8, 64, scheme("int8", **GROUP, group=32)),
    (8, 96, scheme("int8", **GROUP, group=48, symmetric=False)),
    (3, 50, scheme("int8", granularity="channel", symmetric=False)),
]


@pytest.mark.parametrize("columns_first", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize(
    ("rows", "columns", "how"), PRODUCTS, ids=lambda value: value if isinstance(value, int) else value.granularity
)
def test_a_quantized_product_is_what_its_codes_say(
    rows: int, columns: int, how: WeightScheme, columns_first: bool
) -> None:
    names = {"block.a": rows, "block.b": rows + 1} if columns_first else {"block.a": rows}
    stored = weights({name: (count, columns, how) for name, count in names.items()})
    graph = Graph(columns)
    outputs = [graph.linear(name, graph.x, count) for name, count in names.items()]
    model = OrtDialect(graph.traced(*outputs), stored).apply()
    assert kinds(model) == ({"MatMulNBits": 1, "Split": 1} if columns_first else {"MatMulNBits": 1})
    tensors = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    (node,) = (node for node in ir.to_proto(model).graph.node if node.op_type == "MatMulNBits")
    expected = np.concatenate([dense(stored, name) for name in names])
    np.testing.assert_array_equal(plain_matmulnbits.of(node, tensors), expected)
    # three rows and one: the operator has a kernel for each
    x = np.random.default_rng(1).standard_normal((1, 3, columns)).astype(np.float32)
    for part in (x, x[:, :1]):
        found = np.concatenate(run(model, part), axis=-1)
        wanted = part.astype(np.float64) @ expected.astype(np.float64).T
        # float32 sums of K products
        assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max() + 1e-6 * columns


# --- products ---------------------------------------------------------------------------------------------------------


def test_linears_of_one_input_are_merged_only_where_they_are_alike() -> None:
    how = scheme()
    stored = weights({"b.a": (8, 64, how), "b.b": (4, 64, None), "b.c": (8, 64, scheme(**GROUP, group=64))})
    graph = Graph(64)
    outputs = [graph.linear(name, graph.x, linear.rows) for name, linear in stored.linears.items()]
    model = OrtDialect(graph.traced(*outputs), stored).apply()
    assert kinds(model) == {"MatMulNBits": 2, "MatMul": 1}
    x = np.random.default_rng(1).standard_normal((2, 3, 64)).astype(np.float32)
    for name, found in zip(stored.linears, run(model, x), strict=True):
        np.testing.assert_allclose(found, x @ dense(stored, name).T, rtol=1e-4, atol=1e-4)


def test_merging_keeps_which_output_is_which() -> None:
    sizes = {"b.gate": 5, "b.up": 7, "b.third": 1}
    stored = weights({name: (rows, 64, None) for name, rows in sizes.items()})
    for merge in (True, False):
        graph = Graph(64)
        outputs = [graph.linear(name, graph.x, rows) for name, rows in sizes.items()]
        model = OrtDialect(graph.traced(*reversed(outputs)), stored, merge=merge).apply()
        assert kinds(model) == ({"MatMul": 1, "Split": 1} if merge else {"MatMul": 3})
        x = np.random.default_rng(1).standard_normal((2, 3, 64)).astype(np.float32)
        for name, found in zip(reversed(sizes), run(model, x), strict=True):
            np.testing.assert_allclose(found, x @ dense(stored, name).T, rtol=1e-4, atol=1e-4)


def test_linears_of_different_inputs_are_not_merged() -> None:
    stored = weights({"b.a": (64, 64, None), "b.b": (64, 64, None)})
    graph = Graph(64)
    model = OrtDialect(graph.traced(graph.linear("b.b", graph.linear("b.a", graph.x, 64), 64)), stored).apply()
    assert kinds(model) == {"MatMul": 2}


def test_a_bias_stays_with_its_linear() -> None:
    bias = np.arange(8, dtype=np.float32)
    stored = weights({"b.a": (8, 64, scheme())}, **{"b.a.bias": bias})
    graph = Graph(64)
    y = graph.node("Add", graph.linear("b.a", graph.x, 8), graph.parameter("b.a.bias", (8,)))
    model = OrtDialect(graph.traced(y), stored).apply()
    x = np.zeros((1, 2, 64), np.float32)
    np.testing.assert_array_equal(run(model, x)[0], np.broadcast_to(bias, (1, 2, 8)))


# --- norms ------------------------------------------------------------------------------------------------------------


def rms(x: Any, gamma: Any) -> Any:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma


GAMMA = np.linspace(0.5, 2, 16).astype(np.float32)
NORMS = weights({}, **{"n.weight": GAMMA, "m.weight": GAMMA[::-1].copy()})
X = np.random.default_rng(2).standard_normal((2, 3, 16)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_without_a_sum_becomes_rms_normalization(offset: float) -> None:
    graph = Graph(16)
    model = OrtDialect(graph.traced(graph.norm("n", graph.x, offset)), NORMS).apply()
    assert kinds(model) == {"RMSNormalization": 1}
    np.testing.assert_allclose(run(model, X)[0], rms(X, GAMMA + offset), rtol=1e-5, atol=1e-5)


def test_a_sum_before_a_norm_is_fused_and_still_there_for_others() -> None:
    graph = Graph(16)
    total = graph.node("Add", graph.x, graph.node("Neg", graph.node("Exp", graph.x)))
    left, right = graph.norm("n", total), graph.norm("m", total)
    after = graph.node("Sin", total)
    model = OrtDialect(graph.traced(left, right, after), NORMS).apply()
    # both norms read one sum; only one of them can be made with it
    assert kinds(model)["SkipSimplifiedLayerNormalization"] == 1
    assert kinds(model)["RMSNormalization"] == 1
    assert kinds(model)["Add"] == 0
    found, other, sine = run(model, X)
    both = X - np.exp(X)
    np.testing.assert_allclose(found, rms(both, GAMMA), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other, rms(both, GAMMA[::-1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sine, np.sin(both), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_sum_that_broadcasts_is_not_fused_wrongly(first: bool) -> None:
    """Learned positions [1, S, K] plus embeddings [B, S, K], either way round."""
    graph = Graph(16)
    positions = graph.input("positions", (1, "length", 16))
    graph.inputs.append(positions)
    total = graph.node("Add", *((positions, graph.x) if first else (graph.x, positions)), shape=graph.x.shape)
    model = OrtDialect(graph.traced(graph.norm("n", total)), NORMS).apply()
    given = np.random.default_rng(3).standard_normal((1, 3, 16)).astype(np.float32)
    np.testing.assert_allclose(run(model, X, given)[0], rms(X + given, GAMMA), rtol=1e-5, atol=1e-5)


def test_a_bias_before_a_norm_and_a_sum_that_is_an_output_are_left_alone() -> None:
    graph = Graph(16)
    stored = replace(NORMS, shapes=NORMS.shapes | {"bias": (16,)}, tensor=lambda name: GAMMA)
    total = graph.node("Add", graph.x, graph.parameter("bias", (16,)))
    model = OrtDialect(graph.traced(graph.norm("n", total), total), stored).apply()
    assert kinds(model) == {"Add": 1, "RMSNormalization": 1}
    found, added = run(model, X)
    np.testing.assert_allclose(added, X + GAMMA, rtol=1e-6)
    np.testing.assert_allclose(found, rms(X + GAMMA, GAMMA), rtol=1e-5, atol=1e-5)

    graph = Graph(16)
    total = graph.node("Add", graph.x, graph.node("Neg", graph.x))
    model = OrtDialect(graph.traced(graph.norm("n", total), total), NORMS).apply()
    assert kinds(model)["Add"] == 1
    np.testing.assert_array_equal(run(model, X)[1], np.zeros_like(X))


# --- attention of encoders --------------------------------------------------------------------------------------------


def attention(**changes: Any) -> Any:
    graph = Graph(64)
    mask = ir.Value(name="mask", shape=ir.Shape(("batch", "length")), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(mask)
    heads = graph.input("heads", ("batch", 4, "length", 16))
    graph.inputs.append(heads)
    said = {"heads": 4, "kv_heads": 4, "scale": 0.25, "window": -1, "softcap": 0.0, "causal": 0, **changes}
    keys = heads
    if said["kv_heads"] != 4:
        keys = graph.input("keys", ("batch", said["kv_heads"], "length", 16))
        graph.inputs.append(keys)
    inputs = heads, keys, keys, mask
    node = graph.node("Attention", *inputs, shape=graph.x.shape, domain=DOMAIN, **said)
    return OrtDialect(graph.traced(node), NORMS)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_an_encoder_s_attention_sees_what_the_mask_shows(groups: int, causal: int) -> None:
    model = attention(causal=causal, kv_heads=groups).apply()
    generator = np.random.default_rng(4)
    heads, mask = generator.standard_normal((2, 4, 3, 16)).astype(np.float32), np.ones((2, 3), np.int64)
    keys = generator.standard_normal((2, groups, 3, 16)).astype(np.float32) if groups != 4 else heads
    shared = keys.repeat(4 // groups, axis=1)
    mask[1, 2:] = 0
    hidden = 1 - mask[:, None, None] * (np.tri(3, dtype=np.int64) if causal else 1)
    scores = 0.25 * heads @ shared.transpose(0, 1, 3, 2) - 1e9 * hidden
    weights_of = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights_of / weights_of.sum(-1, keepdims=True) @ shared
    (found,) = run(model, np.zeros((2, 3, 64), np.float32), mask, heads, *([keys] if groups != 4 else []))
    np.testing.assert_allclose(found, wanted.transpose(0, 2, 1, 3).reshape(2, 3, 64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"window": 8}, {"softcap": 50.0}])
def test_what_an_encoder_s_operator_has_not_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"attention-unsupported.*to a checkpoint alone"):
        attention(**changes).apply()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """16 linears of 1 MB: while the file is written, none but the one that is being written is alive."""
    from quantkit.exporters.trace.rewrite import save

    rows, columns, count = 512, 512, 16
    seen: list[weakref.ref[Any]] = []
    read: Counter[str] = Counter()
    most = 0

    class Watched(np.ndarray[Any, Any]):
        pass

    def watched(name: str) -> Any:
        nonlocal most
        found = np.full((rows, columns), float(name[6:-7]), np.float32).view(Watched)
        seen.append(weakref.ref(found))
        read[name] += 1
        most = max(most, sum(each() is not None for each in seen))
        return found

    names = [f"block.{index}" for index in range(count)]
    stored = WeightsByName(
        {name: LinearSpec(rows, columns, None) for name in names},
        {f"{name}.weight": (rows, columns) for name in names},
        watched,
        lambda name: pytest.fail(f"{name} is not quantized"),
        lambda name: pytest.fail(f"{name} is not quantized"),
    )
    graph = Graph(columns)
    value = graph.x
    for name in names:
        value = graph.linear(name, value, rows)
    model = OrtDialect(graph.traced(value), stored).apply()
    assert not read, "the graph is rewritten without reading a weight"
    save(model, tmp_path / "model.onnx", "model.onnx.data")
    assert set(read.values()) == {1}
    assert len(read) == count
    assert most <= 2
    size = (tmp_path / "model.onnx.data").stat().st_size
    assert size == count * rows * columns * 4
    written = onnx.load(str(tmp_path / "model.onnx"))
    for each in written.graph.initializer:
        assert (onnx.numpy_helper.to_array(each) == float(each.name[6:-7])).all()


def test_rewriting_reads_no_codes_either() -> None:
    def never(name: str) -> Any:
        raise AssertionError(name)

    how = scheme(**GROUP, group=48, symmetric=False)
    stored = replace(weights({"b.a": (8, 96, how), "b.b": (8, 96, how)}), tensor=never, codes=never)
    graph = Graph(96)
    model = OrtDialect(graph.traced(graph.linear("b.a", graph.x, 8), graph.linear("b.b", graph.x, 8)), stored).apply()
    # what stands in the graph's description is right all the same
    shapes = {name.rpartition(".")[2]: list(value.shape) for name, value in model.graph.initializers.items()}
    assert shapes["codes"] == [16, 6, 8]
    assert shapes["scales"] == [16, 6]
    assert shapes["zeros"] == [16, 3]


def test_no_placeholder_is_left_behind() -> None:
    graph = Graph(16)
    strange = graph.node("Unheard", graph.x, domain=DOMAIN)
    with pytest.raises(AssertionError, match="Unheard"):
        OrtDialect(graph.traced(strange), NORMS).apply()
