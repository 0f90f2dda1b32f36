"""The dialect of ONNX Runtime: placeholders become its fused operators.

    Linear      MatMulNBits (weights of 2, 4 or 8 bits in blocks of 16 to 256), integer products (weights and inputs of
                8 bits: `integers.py`), MatMul, or for a head that is tied to the embedding a FusedMatMul that reads the
                embedding's own tensor; those of one input are one product
    RMSNorm     RMSNormalization; with the sum before it SkipSimplifiedLayerNormalization
    LayerNorm   as traced, and the sum before it a Sum: of an Add the runtime makes SkipLayerNormalization, which takes
                several times as long as both (ONNX Runtime 1.31)
    Attention   GroupQueryAttention with rotary embedding inside and q, k, v in one tensor where the graph allows it;
                MultiHeadAttention in encoders

Rotary embedding by the op counts columns, not tokens: with padding on the left each row is turned by as many steps more
as it has padding, queries and keys alike, so their products stay the same.
Operators: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporters.onnx.integers import Bytes, Codes, Integers
from quantkit.exporters.onnx.nbits import ROTARY_HEAD, Array, EmbeddingTable, PackedWeights, block_size, pack
from quantkit.exporters.trace import CHECKPOINT
from quantkit.exporters.trace.rewrite import DOMAIN, Rewriting
from quantkit.exporters.trace.rotary import RotaryTables
from quantkit.formats import load_format
from quantkit.passes import decision

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor
    from quantkit.scheme import WeightScheme

MICROSOFT = "com.microsoft"
# added to the scores of padding: no weight is left of it after a softmax
_MASKED = -1e9


@dataclass
class OrtDialect(Rewriting):
    """The rewriting of one graph.

    Args:
        accuracy_level: of MatMulNBits: 0 computes in float32, 4 rounds activations to int8.
        positions: how many tokens the context holds; the length of the rotary tables.
        merge: whether linears of one input become one product.
        codes: how weights are stored whose inputs are quantized as well.
    """

    accuracy_level: int = 0
    positions: int = 0
    merge: bool = True
    codes: Codes = "uint8"

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
        model = self._finish()
        self.graph.opset_imports[MICROSOFT] = 1
        model.ir_version = 10
        return model

    # --- embedding ----------------------------------------------------------------------------------------------------

    def _table(self) -> None:
        """Let token ids be looked up in codes, if the table is in codes."""
        table = self.weights.ends.table if self.weights.ends is not None else None
        for node in list(self.graph) if table is not None else []:
            looked_in = node.inputs[0] if node.op_type == "Gather" else None
            if looked_in is None or self.traced.parameters.get(looked_in.name or "") != table.parameter:  # type: ignore[union-attr]
                continue
            parts = self._looked_up(node, table)  # type: ignore[arg-type]
            found = parts[0]
            for other in parts[1:]:
                (found,) = self._node(node, "Add", [found, other], ["embedding/sum"])
            self._replace(node, [found])

    def _looked_up(self, node: ir.Node, table: EmbeddingTable) -> list[ir.Value]:
        """What each of a table's codes gives for the ids of a Gather."""
        found = []
        if table.head:
            scheme = self.weights.linears[table.head].scheme
            assert scheme is not None
            packed, (codes, *grid) = self._packed_weights([table.head], table.head, scheme)
            flat = self._constant("embedding/flat", [0, -1], np.int64)
            (turned,) = self._node(node, "Reshape", [codes, flat], ["embedding/codes"])
            found.append(self._looked_up_in(node, turned, grid, packed.bits, packed.block, "embedding/head"))
        if (own := table.own) is not None:
            codes, scales = self._symmetric(own, "embedding")
            bits, block = load_format(own.scheme.format).bits, own.scheme.group or 0
            found.append(self._looked_up_in(node, codes, [scales], bits, block, "embedding/own"))
        return found

    def _symmetric(self, own: QuantTensor, name: str, *, blocks: bool = False) -> tuple[ir.Value, ir.Value]:
        """Codes, [V, K·bits/8] or with a dimension for blocks, and scales, of symmetric groups that end with a row."""
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
        inputs = [codes, node.inputs[1], *grid]
        options = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
        return self._node(node, "GatherBlockQuantized", inputs, [name], MICROSOFT, **options)[0]

    # --- norms --------------------------------------------------------------------------------------------------------

    def _norms(self) -> None:
        for node in self._placeholders("RMSNorm"):
            name, epsilon = node.attributes["name"].as_string(), node.attributes["epsilon"].as_float()
            gamma, source = self._gamma(node), node.inputs[0]
            assert source is not None
            total = self._sum(source)
            if total is None:
                made = self._node(
                    node, "RMSNormalization", [source, gamma], [f"{name}/output"], axis=-1, epsilon=epsilon
                )
                self._replace(node, made)
                continue
            normed, _, _, added = self._node(
                total,
                "SkipSimplifiedLayerNormalization",
                [*total.inputs, gamma],
                [f"{name}/output", "", "", f"{name}/sum"],
                MICROSOFT,
                epsilon=epsilon,
            )
            self._replace(node, [normed])
            self._replace(total, [added])
        for node in self.graph:
            total = self._sum(node.inputs[0]) if node.op_type == "LayerNormalization" and node.inputs[0] else None
            if total is not None:
                self._replace(total, self._node(total, "Sum", total.inputs, [f"{total.outputs[0].name}/sum"]))

    def _sum(self, value: ir.Value) -> ir.Node | None:
        """The addition of two hidden states that makes a value, if that is what makes it."""
        node = value.producer()
        if node is None or node.op_type != "Add" or any(x is None or x.is_initializer() for x in node.inputs):
            return None
        shapes = [x.shape for x in node.inputs if x is not None]
        if any(shape is None or len(shape) != 3 for shape in shapes) or value.is_graph_output():
            return None
        if shapes[0] != shapes[1]:  # positions [1, S, K] under embeddings [B, S, K]
            return None
        return node

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """Cached attention; the mask, in two numbers for the op and a bias for padding, is made once."""
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        mask = nodes[0].inputs[3]
        assert mask is not None
        ids = next(value for value in self.graph.inputs if value.name == "input_ids")
        first = next(iter(self.graph))
        lengths, total, bias = self._mask(first, mask, ids)
        tables = RotaryTables(self.graph, self.positions, self._constant)
        unfused: list[str] = []
        for index, node in enumerate(nodes):
            query, key, value, _, past_key, past_value = node.inputs
            assert query is not None and key is not None and value is not None
            q, k = tables.strip(query), tables.strip(key)
            angles = None
            size = node.inputs[4].shape[3] if node.inputs[4] is not None and node.inputs[4].shape is not None else None
            whole = isinstance(size, int) and size % ROTARY_HEAD == 0
            if whole and q is not None and k is not None and q[1] is k[1]:
                query, key, angles = q[0], k[0], q[1]
            elif q is not None or k is not None or None in tables.found.values():
                unfused.append(str(index))
            name = f"attention.{index}"
            flat = [self._flat(node, x, f"{name}/{what}") for x, what in ((query, "q"), (key, "k"), (value, "v"))]
            options: dict[str, Any] = {
                "num_heads": node.attributes["heads"].as_int(),
                "kv_num_heads": node.attributes["kv_heads"].as_int(),
                "scale": node.attributes["scale"].as_float(),
            }
            if (window := node.attributes["window"].as_int()) > 0:
                options["local_window_size"] = window
            if (softcap := node.attributes["softcap"].as_float()) > 0:
                options["softcap"] = softcap
            cos = sin = None
            if angles is not None:
                options["do_rotary"] = 1
                cos, sin = angles.cos, angles.sin
            packed = self._packed(node, flat, name)
            inputs = [*(packed or flat), past_key, past_value, lengths, total, cos, sin, None, bias]
            made = self._node(
                node,
                "GroupQueryAttention",
                inputs,
                [f"{name}/output", f"{name}/key", f"{name}/value"],
                MICROSOFT,
                **options,
            )
            self._flat_again(node.outputs[0])
            self._replace(node, made)
        if unfused:
            why = f"the rotation is not of the usual form, or heads are no multiple of {ROTARY_HEAD} features wide"
            reason = f"layers {', '.join(unfused)}: {why}, and it stays outside attention"
            self.decisions.append(decision("onnx", "rotary-unfused", "onnx/model.onnx", reason))

    def _mask(self, first: ir.Node, mask: ir.Value, ids: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """From [B, T] of ones and zeros: T - 1 for every row, T, and [B, 1, S, T] with 0 or a large negative number."""
        zero, one = self._constant("zero", [0], np.int64), self._constant("one", [1], np.int64)
        (columns,) = self._node(first, "Shape", [mask], ["mask/columns"], start=1, end=2)
        (rows,) = self._node(first, "Shape", [mask], ["mask/rows"], start=0, end=1)
        (new,) = self._node(first, "Shape", [ids], ["mask/new"], start=1, end=2)
        (total64,) = self._node(first, "Squeeze", [columns, zero], ["mask/total64"])
        (total,) = self._node(first, "Cast", [total64], ["mask/total"], to=int(ir.DataType.INT32))
        (last,) = self._node(first, "Sub", [columns, one], ["mask/last"])
        (last32,) = self._node(first, "Cast", [last], ["mask/last32"], to=int(ir.DataType.INT32))
        (lengths,) = self._node(first, "Expand", [last32, rows], ["mask/lengths"])
        (hidden,) = self._node(first, "Sub", [one, mask], ["mask/hidden"])
        (floats,) = self._node(first, "Cast", [hidden], ["mask/floats"], to=int(ir.DataType.FLOAT))
        (scaled,) = self._node(
            first, "Mul", [floats, self._constant("mask/value", [_MASKED], np.float32)], ["mask/scaled"]
        )
        axes = self._constant("mask/axes", [1, 2], np.int64)
        (wide,) = self._node(first, "Unsqueeze", [scaled, axes], ["mask/wide"])
        (shape,) = self._node(first, "Concat", [one, one, new, one], ["mask/shape"], axis=0)
        (bias,) = self._node(first, "Expand", [wide, shape], ["mask/bias"])
        return lengths, total, bias

    def _flat(self, node: ir.Node, value: ir.Value, name: str) -> ir.Value:
        """[B, H, S, D] as [B, S, H·D]: what was reshaped and transposed to heads, or transposed back."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose":
            before = producer.inputs[0]
            reshape = before.producer() if before is not None else None
            if reshape is not None and reshape.op_type == "Reshape":
                source = reshape.inputs[0]
                if source is not None and source.shape is not None and len(source.shape) == 3:
                    return source
            if before is not None:
                (flat,) = self._node(node, "Reshape", [before, self._constant("flat", [0, 0, -1], np.int64)], [name])
                return flat
        (turned,) = self._node(node, "Transpose", [value], [f"{name}/turned"], perm=[0, 2, 1, 3])
        (flat,) = self._node(node, "Reshape", [turned, self._constant("flat", [0, 0, -1], np.int64)], [name])
        return flat

    def _flat_again(self, output: ir.Value) -> None:
        """Let what splits an output [B, S, H·D] into heads and joins them again read the output itself."""
        for split in output.consumers():
            if split.op_type != "Reshape":
                continue
            for join in split.outputs[0].consumers():
                shape = join.outputs[0].shape
                same = shape is not None and output.shape is not None and list(shape) == list(output.shape)
                if join.op_type == "Reshape" and same:
                    ir.convenience.replace_all_uses_with(join.outputs[0], output)

    def _packed(self, node: ir.Node, flat: Sequence[ir.Value], name: str) -> list[ir.Value | None] | None:
        """One tensor of q, k and v instead of three, where they come from products of one input."""
        products = [_product(value) for value in flat]
        if not self.merge or any(product is None for product in products):
            return None
        found = [product for product in products if product is not None]
        linears = [product[0] for product in found]
        names = [linear.attributes["name"].as_string() for linear in linears]
        one_input = all(linear.inputs[0] is linears[0].inputs[0] for linear in linears)
        used_once = all(len(value.uses()) == 1 for value in flat)
        if not (one_input and used_once and self._mergeable(names)):
            return None
        biases = [product[1] for product in found]
        if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
            return None
        merged = self._merged(node, linears[0].inputs[0], names, f"{name}/qkv")
        if biases[0] is not None:
            parts = [bias.name or "" for bias in biases if bias is not None]
            (merged,) = self._node(node, "Add", [merged, self._joined(parts)], [f"{name}/qkv/biased"])
        return [merged, None, None]

    def _encoder_attention(self) -> None:
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        mask = nodes[0].inputs[3]
        assert mask is not None
        first = next(iter(self.graph))
        (keys,) = self._node(first, "Cast", [mask], ["mask/keys"], to=int(ir.DataType.INT32))
        for index, node in enumerate(nodes):
            query, key, value = node.inputs[:3]
            name, heads = f"attention.{index}", node.attributes["heads"].as_int()
            window, softcap = node.attributes["window"].as_int(), node.attributes["softcap"].as_float()
            if window > 0 or softcap > 0:
                raise InputError(
                    "attention-unsupported",
                    where=name,
                    value="a window or a soft cap in an encoder",
                    rule="MultiHeadAttention has none of them",
                    remedy=CHECKPOINT,
                )
            key, value = (self._repeated(node, f"{name}/{what}", x) for what, x in (("keys", key), ("values", value)))
            assert query is not None and key is not None and value is not None and query.shape is not None
            flat = [self._flat(node, x, f"{name}/{what}") for x, what in ((query, "q"), (key, "k"), (value, "v"))]
            flat[2].shape = flat[2].shape or ir.Shape([query.shape[0], query.shape[2], heads * self._size(query)])
            causal = {"unidirectional": 1} if node.attributes["causal"].as_int() else {}
            (output,) = self._node(
                node,
                "MultiHeadAttention",
                [*flat, None, keys],
                [f"{name}/output"],
                MICROSOFT,
                num_heads=heads,
                scale=node.attributes["scale"].as_float(),
                **causal,
            )
            self._flat_again(node.outputs[0])
            self._replace(node, [output])

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> None:
        shared: dict[ir.Value, list[ir.Node]] = {}
        for node in self._placeholders("Linear"):
            assert node.inputs[0] is not None
            shared.setdefault(node.inputs[0], []).append(node)
        for nodes in shared.values():
            # not the one they were found by, if a product was replaced since then: one linear may follow another
            source = nodes[0].inputs[0]
            names = [node.attributes["name"].as_string() for node in nodes]
            together = len(nodes) > 1 and self.merge and self._mergeable(names)
            for some in [nodes] if together else [[node] for node in nodes]:
                self._multiplied(some, source)

    def _multiplied(self, nodes: Sequence[ir.Node], source: ir.Value | None) -> None:
        """Replace linears of one input by one product, and what adds their biases where the product can add them."""
        names = [node.attributes["name"].as_string() for node in nodes]
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
        """What adds a linear's bias, if its product can do that itself and nothing else reads it."""
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
            (output,) = self._node(before, "FusedMatMul", inputs, [f"{name}/output"], MICROSOFT, transB=1)
            return output
        return self._merged(before, source, [name], name, bias)

    def _merged(
        self,
        before: ir.Node,
        source: ir.Value | None,
        names: Sequence[str],
        name: str,
        bias: ir.Value | None = None,
    ) -> ir.Value:
        """The product with the weights of one or more linears below each other; `bias` as `_adds_bias` allows it."""
        linears = [self.weights.linears[each] for each in names]
        rows, columns = sum(linear.rows for linear in linears), linears[0].columns
        scheme = linears[0].scheme
        if scheme is None:
            (output,) = self._node(before, "MatMul", [source, self._turned(name, names)], [f"{name}/output"])
            return output
        if linears[0].input is not None:
            assert source is not None
            return self._integers.product(before, source, names, name, bias)
        packed, stored = self._packed_weights(names, name, scheme)
        first = self.weights.ends.rows if self.weights.ends is not None and names[0] == self.weights.ends.head else None
        if first is not None:
            return self._two_products(before, source, name, packed, stored, first)
        return self._nbits(before, source, name, stored, rows, columns, packed.bits, packed.block)

    def _nbits(
        self,
        before: ir.Node,
        source: ir.Value | None,
        name: str,
        stored: Sequence[ir.Value],
        rows: int,
        columns: int,
        bits: int,
        block: int,
    ) -> ir.Value:
        """The product with codes, scales, and zero points if there are any."""
        (output,) = self._node(
            before,
            "MatMulNBits",
            [source, *stored],
            [f"{name}/output"],
            MICROSOFT,
            K=columns,
            N=rows,
            bits=bits,
            block_size=block,
            accuracy_level=self.accuracy_level,
        )
        return output

    def _two_products(
        self,
        before: ir.Node,
        source: ir.Value | None,
        name: str,
        packed: PackedWeights,
        stored: Sequence[ir.Value],
        first: QuantTensor,
    ) -> ir.Value:
        """The first rows of a weight from codes of more bits, the others from its own, side by side.

        All rows of its own codes are stored, since a table of embeddings may be read from them; a session cuts those
        off that the product does without when it is made.
        """
        rows, columns = len(first.codes), packed.columns
        left = self.weights.linears[packed.names[0]].rows - rows
        ends = [self._constant(f"rows/{what}", [at], np.int64) for what, at in (("start", rows), ("end", 2**62))]
        axis = self._constant("rows/axis", [0], np.int64)
        cut = [
            self._node(before, "Slice", [value, *ends, axis], [f"{name}/{number}/rest"])[0]
            for number, value in enumerate(stored)
        ]
        bits, block = load_format(first.scheme.format).bits, first.scheme.group or 0
        finer = self._symmetric(first, f"{name}.first", blocks=True)
        parts = [
            self._nbits(before, source, f"{name}/first", finer, rows, columns, bits, block),
            self._nbits(before, source, f"{name}/rest", cut, left, columns, packed.bits, packed.block),
        ]
        return self._node(before, "Concat", parts, [f"{name}/output"], axis=-1)[0]

    def _packed_weights(
        self, names: Sequence[str], name: str, scheme: WeightScheme
    ) -> tuple[PackedWeights, list[ir.Value]]:
        """How the weights of linears below each other are packed; codes, scales, and zero points if there are any."""
        linears = [self.weights.linears[each] for each in names]
        rows, columns = sum(linear.rows for linear in linears), linears[0].columns
        bits = load_format(scheme.format).bits
        block = block_size(columns, scheme, names[0])
        count = -(-columns // block)
        packed = PackedWeights(self.weights, tuple(names), bits, block, columns)
        values = [
            self._new(f"{name}.codes", (rows, count, block * bits // 8), np.uint8, packed.codes),
            self._new(f"{name}.scales", (rows, count), np.float32, packed.scales),
        ]
        if not scheme.symmetric:
            shape = (rows, -(-count * bits // 8))
            values.append(self._new(f"{name}.zeros", shape, np.uint8, packed.zeros))
        return packed, values

    def _joined(self, parameters: Sequence[str]) -> ir.Value:
        size = sum(self.weights.shapes[name][0] for name in parameters)
        return self._new(
            "+".join(parameters),
            (size,),
            np.float32,
            lambda: np.concatenate([self.weights.tensor(name) for name in parameters]),
        )


class PromptDialect(OrtDialect):
    """The same for many rows: products of weights in fewer bits multiply in integers (`integers.py`).

    The weights say so (`prefill.many_rows`).
    """

    def __post_init__(self) -> None:
        self._integers = Bytes(self._node, self._new, self._constant, self.weights, "int8")


def _product(value: ir.Value) -> tuple[ir.Node, ir.Value | None] | None:
    """The Linear that makes a value, and the bias that is added, if any."""
    node, bias = value.producer(), None
    if node is not None and node.op_type == "Add":
        left, right = node.inputs
        if left is not None and right is not None and right.is_initializer():
            node, bias = left.producer(), right
    if node is None or node.domain != DOMAIN or node.op_type != "Linear":
        return None
    return node, bias
