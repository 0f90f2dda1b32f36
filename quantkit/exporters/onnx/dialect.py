"""Rewrite a traced graph for ONNX Runtime: placeholders become its fused operators.

    Linear      MatMulNBits (weights of 2, 4 or 8 bits in blocks of 16 to 256), integer products (weights and inputs of
                8 bits: `integers.py`), MatMul, or FusedMatMul for a head that is tied to the embedding (it reads the
                embedding's tensor); linears of one input become one product
    RMSNorm     RMSNormalization, or SkipSimplifiedLayerNormalization with the addition before it
    LayerNorm   unchanged, but the Add before it becomes a Sum: the runtime fuses an Add into SkipLayerNormalization,
                which takes several times as long as both (ONNX Runtime 1.31)
    Attention   GroupQueryAttention, with rotary embedding inside and q, k, v in one tensor if the graph allows it;
                MultiHeadAttention in encoders

The operator's rotary embedding counts columns, not tokens. Padding on the left rotates queries and keys of a row by the
same additional angle, so their products do not change.
Operators: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quantkit.exporters import unattended
from quantkit.exporters.onnx.integers import MICROSOFT, Bytes, Codes, Integers
from quantkit.exporters.onnx.nbits import ROTARY_HEAD, Array, EmbeddingTable, PackedWeights, pack
from quantkit.exporters.trace import CHECKPOINT
from quantkit.exporters.trace.rewrite import DOMAIN, Rewriting, is_producer, name_of
from quantkit.formats import load_format
from quantkit.passes import decision

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor


# bias for the scores of padding, so its weight after a softmax is 0
_MASKED = -1e9


@dataclass
class OrtDialect(Rewriting):
    """The rewriting of one graph."""

    accuracy_level: int = 0  # MatMulNBits: 0 computes in float32, 4 rounds activations to int8
    positions: int = 0  # tokens of the context; the length of the rotary tables
    merge: bool = True  # True joins linears of one input to one product
    codes: Codes = "uint8"  # storage of weights with quantized inputs

    def __post_init__(self) -> None:
        self._integers = Integers(self._node, self._new, self._constant, self.weights, self.codes)

    def apply(self) -> ir.Model:
        """Rewrite everything; no placeholder is left."""
        self._table()
        self._parameters()
        if self.traced.decoder:
            self._attention()
        else:
            self._encoder_attention()
        self._norms()
        self._products()
        return self._finish({MICROSOFT: 1}, ir_version=10)

    # --- embedding ----------------------------------------------------------------------------------------------------

    def _table(self) -> None:
        """Let the graph look up token ids in a quantized embedding."""
        table = self.weights.ends.table if self.weights.ends is not None else None
        if table is None:
            return
        for node in list(self.graph):
            looked_in = node.inputs[0] if node.op_type == "Gather" else None
            if looked_in is None or self.traced.parameters.get(looked_in.name or "") != table.parameter:
                continue
            total, *others = self._looked_up(node, table)
            for other in others:
                (total,) = self._node(node, "Add", [total, other], ["embedding/sum"])
            self._replace(node, [total])

    def _looked_up(self, node: ir.Node, table: EmbeddingTable) -> list[ir.Value]:
        """Return the dequantized rows for the ids of a Gather, one value for every set of codes."""
        values = []
        if table.head:
            packed, (codes, *grid) = self._packed_weights([table.head], table.head)
            flat = self._constant("embedding/flat", [0, -1], np.int64)
            (turned,) = self._node(node, "Reshape", [codes, flat], ["embedding/codes"])
            values.append(self._looked_up_in(node, turned, grid, packed.bits, packed.block, "embedding/head"))
        if (own := table.own) is not None:
            codes, scales = self._symmetric(own, "embedding")
            bits, block = load_format(own.scheme.format).bits, own.scheme.group or 0
            values.append(self._looked_up_in(node, codes, [scales], bits, block, "embedding/own"))
        return values

    def _symmetric(self, own: QuantTensor, name: str, *, blocks: bool = False) -> tuple[ir.Value, ir.Value]:
        """Add codes, [V, K·bits/8] or with a dimension for blocks, and scales of symmetric groups within a row."""
        bits, block = load_format(own.scheme.format).bits, own.scheme.group or 0
        rows, columns = own.shape
        shape = (rows, columns // block, block * bits // 8) if blocks else (rows, columns * bits // 8)

        def words() -> Array:
            unsigned = (own.codes.numpy().astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
            return pack(unsigned, bits).reshape(shape)

        codes = self._new(f"{name}.codes", shape, np.uint8, words)
        return codes, self._new(f"{name}.scales", own.scale.shape, np.float32, lambda: own.scale.float().numpy())

    def _looked_up_in(
        self, node: ir.Node, codes: ir.Value, grid: Sequence[ir.Value], bits: int, block: int, name: str
    ) -> ir.Value:
        how = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
        return self._node(node, "GatherBlockQuantized", [codes, node.inputs[1], *grid], [name], MICROSOFT, **how)[0]

    # --- norms --------------------------------------------------------------------------------------------------------

    def _norms(self) -> None:
        for node in self._placeholders("RMSNorm"):
            name, epsilon = name_of(node), node.attributes["epsilon"].as_float()
            gamma, source = self._gamma(node), node.inputs[0]
            total = self._sum(source)
            if total is None:
                inputs, outputs = [source, gamma], [f"{name}/output"]
                self._replace(node, self._node(node, "RMSNormalization", inputs, outputs, axis=-1, epsilon=epsilon))
                continue
            outputs = [f"{name}/output", "", "", f"{name}/sum"]
            normed, _, _, added = self._node(
                total,
                "SkipSimplifiedLayerNormalization",
                [*total.inputs, gamma],
                outputs,
                MICROSOFT,
                epsilon=epsilon,
            )
            self._replace(node, [normed])
            self._replace(total, [added])
        for node in self.graph:
            total = self._sum(node.inputs[0]) if node.op_type == "LayerNormalization" else None
            if total is not None:
                self._replace(total, self._node(total, "Sum", total.inputs, [f"{total.outputs[0].name}/sum"]))

    def _sum(self, value: ir.Value | None) -> ir.Node | None:
        """Return the addition of two hidden states that yields a value, if it is one."""
        node = is_producer(value, "Add")
        if value is None or node is None or any(x is None or x.is_initializer() for x in node.inputs):
            return None
        shapes = [x.shape for x in node.inputs if x is not None]
        if any(shape is None or len(shape) != 3 for shape in shapes) or value.is_graph_output():
            return None
        return node if shapes[0] == shapes[1] else None  # adding positions [1, S, K] to embeddings [B, S, K] is not one

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """Rewrite cached attention; all layers share one mask: two lengths for the operator, and a bias for padding."""
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        mask = nodes[0].inputs[3]
        assert mask is not None
        lengths, total, bias = self._mask(next(iter(self.graph)), mask, self._input("input_ids"))
        tables = RotaryTables(self.graph, self.positions, self._constant)
        unfused: list[str] = []
        for index, node in enumerate(nodes):
            query, key, value, _, past_key, past_value = node.inputs
            assert query is not None and key is not None and value is not None
            q, k = tables.strip(query), tables.strip(key)
            angles = None
            size = past_key.shape[3] if past_key is not None and past_key.shape is not None else None
            whole = isinstance(size, int) and size % ROTARY_HEAD == 0
            if whole and q is not None and k is not None and q[1] is k[1]:
                query, key, angles = q[0], k[0], q[1]
            elif q is not None or k is not None or None in tables.known.values():
                unfused.append(str(index))
            name = f"attention.{index}"
            flat = [self._flat(node, x, f"{name}/{part}") for x, part in ((query, "q"), (key, "k"), (value, "v"))]
            how: dict[str, Any] = {
                "num_heads": node.attributes["heads"].as_int(),
                "kv_num_heads": node.attributes["kv_heads"].as_int(),
                "scale": node.attributes["scale"].as_float(),
            }
            if (window := node.attributes["window"].as_int()) > 0:
                how["local_window_size"] = window
            if (softcap := node.attributes["softcap"].as_float()) > 0:
                how["softcap"] = softcap
            cos = sin = None
            if angles is not None:
                how["do_rotary"] = 1
                cos, sin = angles.cos, angles.sin
            packed = self._packed(node, flat, name)
            inputs = [*(packed or flat), past_key, past_value, lengths, total, cos, sin, None, bias]
            outputs = [f"{name}/output", f"{name}/key", f"{name}/value"]
            attended = self._node(node, "GroupQueryAttention", inputs, outputs, MICROSOFT, **how)
            self._flat_again(node.outputs[0])
            self._replace(node, attended)
        if unfused:
            why = f"the rotation has an unusual form, or the width of heads is no multiple of {ROTARY_HEAD}"
            reason = f"layers {', '.join(unfused)}: {why}, so it stays outside attention"
            self.decisions.append(decision("onnx", "rotary-unfused", "onnx/model.onnx", reason))

    def _mask(self, first: ir.Node, mask: ir.Value, ids: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Convert [B, T] of ones and zeros: T - 1 for every row, T, and [B, 1, S, T] with 0 or a negative number."""

        def at(kind: str, inputs: list[ir.Value], output: str, **attributes: Any) -> ir.Value:
            return self._node(first, kind, inputs, [f"mask/{output}"], **attributes)[0]

        zero, one = self._constant("zero", [0], np.int64), self._constant("one", [1], np.int64)
        columns = at("Shape", [mask], "columns", start=1, end=2)
        rows = at("Shape", [mask], "rows", start=0, end=1)
        new = at("Shape", [ids], "new", start=1, end=2)
        total = at("Cast", [at("Squeeze", [columns, zero], "total64")], "total", to=int(ir.DataType.INT32))
        last = at("Cast", [at("Sub", [columns, one], "last")], "last32", to=int(ir.DataType.INT32))
        lengths = at("Expand", [last, rows], "lengths")
        floats = at("Cast", [at("Sub", [one, mask], "hidden")], "floats", to=int(ir.DataType.FLOAT))
        scaled = at("Mul", [floats, self._constant("mask/value", [_MASKED], np.float32)], "scaled")
        wide = at("Unsqueeze", [scaled, self._constant("mask/axes", [1, 2], np.int64)], "wide")
        shape = at("Concat", [one, one, new, one], "shape", axis=0)
        return lengths, total, at("Expand", [wide, shape], "bias")

    def _flat(self, node: ir.Node, value: ir.Value, name: str) -> ir.Value:
        """Return [B, H, S, D] as [B, S, H·D], undoing a reshape and transpose to heads, or transposing."""
        transpose = is_producer(value, "Transpose")
        before = transpose.inputs[0] if transpose is not None else None
        if (reshape := is_producer(before, "Reshape")) is not None:
            source = reshape.inputs[0]
            if source is not None and source.shape is not None and len(source.shape) == 3:
                return source
        if before is None:
            (before,) = self._node(node, "Transpose", [value], [f"{name}/turned"], perm=[0, 2, 1, 3])
        return self._node(node, "Reshape", [before, self._constant("flat", [0, 0, -1], np.int64)], [name])[0]

    def _flat_again(self, output: ir.Value) -> None:
        """Let readers of an output [B, S, H·D], split into heads and joined again, read the output itself."""
        for split in output.consumers():
            if split.op_type != "Reshape":
                continue
            for join in split.outputs[0].consumers():
                shape = join.outputs[0].shape
                same = shape is not None and output.shape is not None and list(shape) == list(output.shape)
                if join.op_type == "Reshape" and same:
                    ir.convenience.replace_all_uses_with(join.outputs[0], output)

    def _packed(self, node: ir.Node, flat: Sequence[ir.Value], name: str) -> list[ir.Value | None] | None:
        """Return one tensor of q, k and v, if they come from products of one input."""
        products = [product for value in flat if (product := _product(value)) is not None]
        if not self.merge or len(products) < len(flat):
            return None
        linears, biases = [linear for linear, _ in products], [bias for _, bias in products if bias is not None]
        names = [name_of(linear) for linear in linears]
        one_input = all(linear.inputs[0] is linears[0].inputs[0] for linear in linears)
        used_once = all(len(value.uses()) == 1 for value in flat)
        if not (one_input and used_once and self._mergeable(names)) or len(biases) not in (0, len(flat)):
            return None
        merged = self._merged(node, linears[0].inputs[0], names, f"{name}/qkv")
        if biases:
            joined = self._joined([bias.name or "" for bias in biases])
            (merged,) = self._node(node, "Add", [merged, joined], [f"{name}/qkv/biased"])
        return [merged, None, None]

    def _encoder_attention(self) -> None:
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        first = next(iter(self.graph))
        (keys,) = self._node(first, "Cast", [nodes[0].inputs[3]], ["mask/keys"], to=int(ir.DataType.INT32))
        for index, node in enumerate(nodes):
            query, key, value = node.inputs[:3]
            name, heads = f"attention.{index}", node.attributes["heads"].as_int()
            if node.attributes["window"].as_int() > 0 or node.attributes["softcap"].as_float() > 0:
                rule = "MultiHeadAttention supports neither"
                raise unattended(name, "a window or a soft cap in an encoder", rule, CHECKPOINT)
            key, value = (self._repeated(node, f"{name}/{part}", x) for part, x in (("keys", key), ("values", value)))
            assert query is not None and key is not None and value is not None and query.shape is not None
            flat = [self._flat(node, x, f"{name}/{part}") for x, part in ((query, "q"), (key, "k"), (value, "v"))]
            flat[2].shape = flat[2].shape or ir.Shape([query.shape[0], query.shape[2], heads * self._size(query)])
            how: dict[str, Any] = {"num_heads": heads, "scale": node.attributes["scale"].as_float()}
            if node.attributes["causal"].as_int():
                how["unidirectional"] = 1
            inputs, outputs = [*flat, None, keys], [f"{name}/output"]
            attended = self._node(node, "MultiHeadAttention", inputs, outputs, MICROSOFT, **how)
            self._flat_again(node.outputs[0])
            self._replace(node, attended)

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> None:
        shared: dict[ir.Value | None, list[ir.Node]] = {}
        for node in self._placeholders("Linear"):
            shared.setdefault(node.inputs[0], []).append(node)
        for nodes in shared.values():
            # the source may have changed: one linear may follow another, replaced one
            source = nodes[0].inputs[0]
            together = len(nodes) > 1 and self.merge and self._mergeable([name_of(node) for node in nodes])
            for some in [nodes] if together else [[node] for node in nodes]:
                self._multiplied(some, source)

    def _multiplied(self, nodes: Sequence[ir.Node], source: ir.Value | None) -> None:
        """Replace linears of one input by one product, and the additions of biases if the product can add them."""
        names = [name_of(node) for node in nodes]
        adds = [self._adds_bias(node, name) for node, name in zip(nodes, names, strict=True)]
        ends = nodes if None in adds else [add for add in adds if add is not None]
        bias = None if None in adds else self._joined([f"{name}.bias" for name in names])
        if len(nodes) == 1:
            self._replace(ends[0], [self._product(nodes[0], source, names[0], bias)])
            return
        merged = self._merged(nodes[0], source, names, f"{names[0].rpartition('.')[0]}/merged", bias)
        sizes = [self.weights.linears[name].rows for name in names]
        split = self._constant(f"split/{'-'.join(map(str, sizes))}", sizes, np.int64)
        parts = self._node(nodes[0], "Split", [merged, split], [f"{name}/output" for name in names], axis=-1)
        for end, part in zip(ends, parts, strict=True):
            self._replace(end, [part])

    def _adds_bias(self, node: ir.Node, name: str) -> ir.Node | None:
        """Return the addition of a linear's bias, if its product can do it and no other node reads the linear."""
        how, uses = self.weights.linears[name].input, list(node.outputs[0].uses())
        add = uses[0].node if len(uses) == 1 else None
        if how is None or how.scale is None or add is None or add.op_type != "Add":
            return None
        return add if any(value is self._names.get(f"{name}.bias") for value in add.inputs) else None

    def _mergeable(self, names: Sequence[str]) -> bool:
        linears = [self.weights.linears[name] for name in names]
        alike = len({(linear.scheme, linear.input) for linear in linears}) == 1
        return alike and all(linear.shared is None for linear in linears)

    def _product(self, before: ir.Node, source: ir.Value | None, name: str, bias: ir.Value | None) -> ir.Value:
        linear = self.weights.linears[name]
        if linear.scheme is None and linear.shared is not None:
            inputs = [source, self._tied(linear)]
            return self._node(before, "FusedMatMul", inputs, [f"{name}/output"], MICROSOFT, transB=1)[0]
        return self._merged(before, source, [name], name, bias)

    def _merged(
        self,
        before: ir.Node,
        source: ir.Value | None,
        names: Sequence[str],
        name: str,
        bias: ir.Value | None = None,
    ) -> ir.Value:
        """Make the product with the weights of one or more stacked linears; `bias` as `_adds_bias` allows it."""
        linear, ends = self.weights.linears[names[0]], self.weights.ends
        if linear.scheme is None:
            return self._node(before, "MatMul", [source, self._turned(name, names)], [f"{name}/output"])[0]
        if linear.input is not None:
            assert source is not None
            return self._integers.product(before, source, names, name, bias)
        packed, stored = self._packed_weights(names, name)
        if ends is not None and ends.rows is not None and names[0] == ends.head:
            return self._two_products(before, source, name, packed, stored, ends.rows)
        return self._nbits(before, [source, *stored], name, (packed.rows, packed.columns), packed.bits, packed.block)

    def _nbits(
        self,
        before: ir.Node,
        inputs: Sequence[ir.Value | None],
        name: str,
        shape: tuple[int, int],
        bits: int,
        block: int,
    ) -> ir.Value:
        """Make the product of a source with codes [N, K], scales, and zero points if there are any."""
        how = {"K": shape[1], "N": shape[0], "bits": bits, "block_size": block, "accuracy_level": self.accuracy_level}
        return self._node(before, "MatMulNBits", inputs, [f"{name}/output"], MICROSOFT, **how)[0]

    def _two_products(
        self,
        before: ir.Node,
        source: ir.Value | None,
        name: str,
        packed: PackedWeights,
        stored: Sequence[ir.Value],
        first: QuantTensor,
    ) -> ir.Value:
        """Multiply the first rows of a weight from codes of more bits, the others from its own, side by side.

        All rows of its own codes are stored, since the embedding may read them; a session cuts off the unused ones when
        it is created.
        """
        rows, columns = len(first.codes), packed.columns
        ends = [self._constant(f"rows/{side}", [at], np.int64) for side, at in (("start", rows), ("end", 2**62))]
        axis = self._constant("rows/axis", [0], np.int64)
        cut = [
            self._node(before, "Slice", [value, *ends, axis], [f"{name}/{number}/rest"])[0]
            for number, value in enumerate(stored)
        ]
        bits, block = load_format(first.scheme.format).bits, first.scheme.group or 0
        finer, left = self._symmetric(first, f"{name}.first", blocks=True), packed.rows - rows
        parts = [
            self._nbits(before, [source, *finer], f"{name}/first", (rows, columns), bits, block),
            self._nbits(before, [source, *cut], f"{name}/rest", (left, columns), packed.bits, packed.block),
        ]
        return self._node(before, "Concat", parts, [f"{name}/output"], axis=-1)[0]

    def _packed_weights(self, names: Sequence[str], name: str) -> tuple[PackedWeights, list[ir.Value]]:
        """Pack the weights of stacked linears; returns codes, scales, and zero points if there are any."""
        packed = self.weights.packed(*names)
        return packed, self._packed_tensors(packed, name)

    def _joined(self, parameters: Sequence[str]) -> ir.Value:
        def read() -> Array:
            return np.concatenate([self.weights.tensor(name) for name in parameters])

        size = sum(self.weights.shapes[name][0] for name in parameters)
        return self._new("+".join(parameters), (size,), np.float32, read)


class PromptDialect(OrtDialect):
    """Dialect for many rows: products of weights in fewer bits multiply in integers (`integers.py`).

    The weights say so (`prefill.many_rows`).
    """

    def __post_init__(self) -> None:
        self._integers = Bytes(self._node, self._new, self._constant, self.weights, "int8")


def _product(value: ir.Value) -> tuple[ir.Node, ir.Value | None] | None:
    """Return the Linear of a value, and its added bias, if any."""
    node, bias = value.producer(), None
    if node is not None and node.op_type == "Add":
        left, right = node.inputs
        if left is not None and right is not None and right.is_initializer():
            node, bias = left.producer(), right
    return None if node is None or node.domain != DOMAIN or node.op_type != "Linear" else (node, bias)


@dataclass(frozen=True)
class Angles:
    """Tables [positions, half a head] of cosines and sines, in the graph."""

    cos: ir.Value
    sin: ir.Value


@dataclass
class RotaryTables:
    """Rotary embedding outside attention: finds it, and lets the graph compute its angles for every position."""

    graph: ir.Graph  # graph that is being rewritten
    positions: int  # number of positions
    constant: Callable[[str, Any, Any], ir.Value]  # puts a table into the graph: name, values, dtype
    known: dict[tuple[ir.Value, ir.Value], Angles | None] = field(default_factory=dict)

    def strip(self, value: ir.Value) -> tuple[ir.Value, Angles] | None:
        """Split x·cos + half(x)·sin into x and the tables; None for anything else."""
        node = is_producer(value, "Add")
        products = [is_producer(x, "Mul") for x in node.inputs] if node is not None else []
        if len(products) != 2 or products[0] is None or products[1] is None:
            return None
        (x, cos), (half, sin) = products[0].inputs, products[1].inputs
        if x is None or cos is None or sin is None or half is None or _halved(half) is not x:
            return None
        angles = self._angles(cos, sin)
        return None if angles is None else (x, angles)

    def _angles(self, cos: ir.Value, sin: ir.Value) -> Angles | None:
        if (cos, sin) not in self.known:
            self.known[cos, sin] = self._table(cos, sin)
        return self.known[cos, sin]

    def _table(self, cos: ir.Value, sin: ir.Value) -> Angles | None:
        """Run the part of the graph for the angles on positions 0, 1, 2, ..."""
        import onnxruntime

        graph, length = self.graph, self.positions
        inputs = [value for value in graph.inputs if value.name in ("input_ids", "attention_mask")]
        try:
            part = ir.convenience.extract(graph, inputs, [cos, sin])
        except ValueError:  # they depend on more: the cache, the embeddings
            return None
        part.opset_imports.update(graph.opset_imports)
        part.opset_imports.pop(DOMAIN, None)
        model = ir.Model(part, ir_version=10)
        for value in part.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        proto = ir.to_proto(model)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        ones = np.ones((1, length), np.int64)
        feeds = {value.name: ones for value in session.get_inputs()}
        tables = [np.asarray(table)[0].reshape(length, -1) for table in session.run(None, feeds)]
        short = session.run(None, {name: values[:, :2] for name, values in feeds.items()})
        if any(not np.allclose(np.asarray(x)[0], y[:2], atol=1e-5) for x, y in zip(short, tables, strict=True)):
            # they change with the length of the text (longrope): no single table fits
            return None
        half = tables[0].shape[1] // 2
        if any(not np.array_equal(table[:, :half], table[:, half:]) for table in tables):
            return None
        number = sum(angles is not None for angles in self.known.values())
        return Angles(
            self.constant(f"rotary.{number}.cos", tables[0][:, :half], np.float32),
            self.constant(f"rotary.{number}.sin", tables[1][:, :half], np.float32),
        )


def _halved(value: ir.Value) -> ir.Value | None:
    """Return x for concat(-x[half:], x[:half]) along the last axis."""
    node = is_producer(value, "Concat")
    if node is None or len(node.inputs) != 2:
        return None
    left, right = is_producer(node.inputs[0], "Neg"), is_producer(node.inputs[1], "Slice")
    back = is_producer(left.inputs[0], "Slice") if left is not None else None
    if right is None or back is None or back.inputs[0] is not right.inputs[0]:
        return None
    x = right.inputs[0]
    size = x.shape[-1] if x is not None and x.shape is not None else None
    if not isinstance(size, int):
        return None
    (start, middle), (second, end) = ([_number(cut.inputs[place]) for place in (1, 2)] for cut in (right, back))
    exact = (start, middle, second) == (0, size // 2, size // 2) and end is not None and end >= size
    return x if exact else None


def _number(value: ir.Value | None) -> int | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else int(tensor.numpy().reshape(-1)[0])
