"""Rewrite a traced graph, for all dialects: add and remove nodes, and read weights only when they are written.

`trace/transformer.py` is a module of its own because it imports transformers, which a float ONNX graph does not need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from quantkit.bundle import Decision, decision, stopping_when_full
from quantkit.exporters import unattended
from quantkit.exporters.onnx.nbits import Array, LinearSpec, PackedWeights, WeightsByName
from quantkit.exporters.trace import CHECKPOINT
from quantkit.formats.base.activation import InputCodes
from quantkit.graph.values import free, initializer

# of the placeholder nodes
DOMAIN = "quantkit"


@dataclass(frozen=True)
class Traced:
    """A graph without weights."""

    model: ir.Model  # graph; its weights are inputs that `parameters` maps to the skeleton
    parameters: Mapping[str, str]  # parameter or buffer of the skeleton by value of the graph
    decoder: bool  # True for a graph with a cache
    layers: int  # number of layers with a cache
    left: str = ""  # reason that an encoder's head is left out; "" without a head or with it

    def decisions(self, exporter: str) -> list[Decision]:
        """Record the head, if it was left out."""
        advice = "a checkpoint has it (`export: [checkpoint: {}]`)"
        return [decision(exporter, "head-left-out", "head", f"{self.left}; {advice}")] if self.left else []


def name_of(placeholder: ir.Node) -> str:
    """Return the name of the module that a placeholder stands for."""
    return placeholder.attributes["name"].as_string()


def is_producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    """Return the producer of a value, if it is of a kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind else None


@dataclass
class Rewriting:
    """Rewrites one traced graph in place."""

    traced: Traced
    weights: WeightsByName
    decisions: list[Decision] = field(default_factory=list, kw_only=True)
    _names: dict[str, ir.Value] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> ir.Graph:
        """Graph to rewrite."""
        return self.traced.model.graph

    @property
    def floats(self) -> np.dtype[Any]:
        """NumPy type of the computation."""
        return np.dtype(np.float32)

    def _parameters(self) -> None:
        """Add parameters used unchanged: embeddings, biases, norms with a bias, buffers."""
        used: dict[str, ir.Value] = {}
        for node in self.graph:
            for value in node.inputs:
                if value is not None and (name := self.traced.parameters.get(value.name or "")):
                    used.setdefault(name, value)
                    if value is not used[name]:
                        ir.convenience.replace_all_uses_with(value, used[name])
        for name, value in used.items():
            value.name = name
            dtype = value.dtype.numpy() if value.dtype is not None else np.float32
            self._bind(value, self.weights.shapes[name], dtype, lambda name=name: self.weights.tensor(name))  # type: ignore[misc]

    def _bind(self, value: ir.Value, shape: Sequence[int], dtype: Any, read: Callable[[], Array]) -> None:
        kind = ir.DataType.from_numpy(np.dtype(dtype))
        lazy = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(read(), dtype=dtype), name=value.name),
            dtype=kind,
            shape=ir.Shape(shape),
            name=value.name,
        )
        value.shape, value.type, value.const_value = ir.Shape(shape), ir.TensorType(kind), lazy
        self._names[value.name or ""] = value
        if not value.is_initializer():
            value.name = free(value.name or "", self.graph.initializers)
        self.graph.register_initializer(value)

    def _new(self, name: str, shape: Sequence[int], dtype: Any, read: Callable[[], Array]) -> ir.Value:
        """Add an initializer, read when it is written, or return the existing one of this name."""
        if name not in self._names:
            self._bind(ir.Value(name=name), shape, dtype, read)
        return self._names[name]

    def _gamma(self, norm: ir.Node) -> ir.Value:
        """Return an RMSNorm's factor: its weight, plus the offset of some classes."""
        name, offset = f"{name_of(norm)}.weight", np.float32(norm.attributes["offset"].as_float())
        return self._new(name, self.weights.shapes[name], self.floats, lambda: self.weights.tensor(name) + offset)

    def _tied(self, linear: LinearSpec) -> ir.Value:
        """Return the embedding [N, K] of a tied head."""
        name, shape = linear.shared or "", (linear.rows, linear.columns)
        return self._new(name, shape, self.floats, lambda: self.weights.tensor(name))

    def _turned(self, name: str, linears: Sequence[str]) -> ir.Value:
        """Return unquantized weights of stacked linears for multiplication: [K, N]."""
        specs = [self.weights.linears[linear] for linear in linears]

        def read() -> Array:
            parts = [self.weights.tensor(f"{linear}.weight") for linear in linears]
            return (parts[0] if len(parts) == 1 else np.concatenate(parts)).T

        return self._new(f"{name}.weight", (specs[0].columns, sum(spec.rows for spec in specs)), self.floats, read)

    def _packed_tensors(self, packed: PackedWeights, name: str) -> list[ir.Value]:
        """Return the inputs of a MatMulNBits after the first."""
        return [self._new(f"{name}.{part}", *tensor) for part, tensor in packed.tensors().items()]

    def _constant(self, name: str, values: Any, dtype: Any) -> ir.Value:
        array = np.asarray(values, dtype=dtype)
        return self._new(name, array.shape, dtype, lambda: array)

    def _node(
        self,
        before: ir.Node,
        kind: str,
        inputs: Iterable[ir.Value | None],
        outputs: Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Insert a node before another one, and return its outputs."""
        values = [ir.Value(name=name) for name in outputs]
        node = ir.Node(domain, kind, list(inputs), ir.convenience.convert_attributes(attributes), outputs=values)
        self.graph.insert_before(before, node)
        return values

    def _input(self, name: str) -> ir.Value:
        return next(value for value in self.graph.inputs if value.name == name)

    def _repeated(self, node: ir.Node, name: str, keys: ir.Value | None) -> ir.Value | None:
        """Repeat keys or values [B, G, T, D] to the query heads of attention `node`, [B, H, T, D]."""
        heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
        if heads == kv_heads:
            return keys
        second = self._constant("attention/second", [2], np.int64)
        times = self._constant(f"attention/times/{heads // kv_heads}", [1, 1, heads // kv_heads, 1, 1], np.int64)
        size = self._size(node.inputs[0])
        flat = self._constant(f"attention/flat/{heads}/{size}", [0, heads, -1, size], np.int64)
        (wide,) = self._node(node, "Unsqueeze", [keys, second], [f"{name}/wide"])
        (several,) = self._node(node, "Expand", [wide, times], [f"{name}/several"])
        return self._node(node, "Reshape", [several, flat], [name])[0]

    def _size(self, query: ir.Value | None) -> int:
        assert query is not None and query.shape is not None
        size = query.shape[3]
        assert isinstance(size, int)
        return size

    def _replace(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        """Replace a node's outputs by `values`, and remove it."""
        for old, new in zip(node.outputs, values, strict=True):
            name, is_output = old.name, old.is_graph_output()
            new.shape, new.type = new.shape or old.shape, new.type or old.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            if is_output:
                old.name, new.name = None, name
        self.graph.remove(node, safe=True)

    def _placeholders(self, kind: str) -> list[ir.Node]:
        return [node for node in self.graph if node.domain == DOMAIN and node.op_type == kind]

    def _finish(self, opsets: Mapping[str, int], ir_version: int) -> ir.Model:
        """Return the graph without unread nodes; inputs stay, since a mask is part of the interface."""
        from onnx_ir.passes import common

        model = self.traced.model
        common.RemoveUnusedNodesPass()(model)
        self.graph.opset_imports.pop(DOMAIN, None)
        left = [node.op_type for node in self.graph if node.domain == DOMAIN]
        assert not left, left[0]
        self.graph.opset_imports.update(opsets)
        model.producer_name, model.producer_version, model.ir_version = "quantkit", None, ir_version
        return model


def keep_few(model: ir.Model, *, optional: bool) -> None:
    """Add an input `logits_to_keep`, as in transformers: the number of last positions with logits; 0 for all.

    Prefill needs only the logits of a prompt's last token, and the head is a large part of a small model.

    Args:
        model: graph of a decoder, changed in place; unchanged if no product computes its logits.
        optional: True gives the input the default 0. TensorRT does not support inputs with a default.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")
    head, after = logits.producer(), [logits]
    heads: list[ir.Node] = []
    # from the logits back through soft caps and scalings to the product, or to two joined products
    while head is not None and head.op_type not in ("MatMul", "FusedMatMul", "MatMulNBits"):
        if head.op_type == "Concat" and len({product.inputs[0] for product in _products(head)}) == 1:
            heads = _products(head)
            after += [product.outputs[0] for product in heads]
            head = heads[0]
            break
        inner = [x for x in head.inputs if x is not None and not x.is_initializer() and x.producer() is not None]
        after += inner
        head = inner[0].producer() if len(inner) == 1 else None
    if head is None:
        return
    keep = ir.Value(name="logits_to_keep", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(keep)
    if optional:
        keep.const_value = ir.tensor(np.zeros(1, np.int64), name="logits_to_keep")
        graph.register_initializer(keep)
    end = initializer(graph, np.array([2**62], np.int64), name="keep/end")
    axis = initializer(graph, np.array([1], np.int64), name="keep/axis")
    start, kept = ir.Value(name="keep/start"), ir.Value(name="keep/hidden")
    negative = ir.Node("", "Neg", [keep], outputs=[start])
    slices = ir.Node("", "Slice", [head.inputs[0], start, end, axis], outputs=[kept])
    graph.insert_before(head, [negative, slices])
    for product in heads or [head]:
        product.replace_input_with(0, kept)
    for value in after:
        if value.shape is not None:
            value.shape = ir.Shape([value.shape[0], "kept_length", *list(value.shape)[2:]])


def _products(joined: ir.Node) -> list[ir.Node]:
    """List the products joined by a Concat; other nodes are left out."""
    return [product for value in joined.inputs if (product := is_producer(value, "MatMulNBits")) is not None]


_NUMBERED = re.compile(r"node_\w+_\d+")


def save(model: ir.Model, path: Path, data: str) -> None:
    """Write a graph, its tensors from 1 KiB on into `data` beside it, one in memory at a time. Raises Stopped."""
    for number, node in enumerate(model.graph):
        # numbered by onnx-ir as they were made, so that a copied trace would give another file than the first
        if _NUMBERED.fullmatch(node.name or ""):
            node.name = f"node_{node.op_type}_{number}"
    with stopping_when_full(path.parent):
        ir.save(model, path, external_data=data, size_threshold_bytes=1024, max_workers=1)


# --- norms, attention, cache and products in ONNX's own operators -----------------------------------------------------
# For runtimes without fused operators of another domain. The cache is one of
#
#     in_place    [batch, heads, capacity, size]; TensorScatter writes new tokens at `write_indices` [batch]
#     grown       [batch, heads, tokens so far, size]; Concat
#
# Positions are an input, so rows may be padded on the left; the mask [batch, columns of the cache] is 1 for tokens. A
# dialect defines the storage of keys and values (`_remember`), attention (`_attended`), and quantized products
# (`_weight`, `_product`).

Cache = Literal["in_place", "grown"]
CACHES = ("past_key_values.", "present.")
# bias for the scores of masked tokens; finite, because all tokens of a padding row are masked
_HIDDEN, _HIDDEN_HALF = -1e9, -60000.0


@dataclass
class PlainOperators(Rewriting):
    """Rewrites one graph."""

    opsets: ClassVar[Mapping[str, int]]
    ir_version: ClassVar[int]

    cache: Cache = field(default="in_place", kw_only=True)
    capacity: int = field(default=2048, kw_only=True)  # tokens that a cache `in_place` holds
    _masks: dict[tuple[int, bool], ir.Value] = field(default_factory=dict, init=False)

    def apply(self) -> ir.Model:
        """Rewrite everything; no placeholder is left."""
        self._parameters()
        self._attention()
        self._norms()
        self._products()
        return self._finish(self.opsets, self.ir_version)

    def _norms(self) -> None:
        for node in self._placeholders("RMSNorm"):
            inputs, output = [node.inputs[0], self._gamma(node)], f"{name_of(node)}/output"
            how: dict[str, Any] = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
            self._replace(node, self._node(node, "RMSNormalization", inputs, [output], **how))

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> None:
        """Write MatMul, after a pair for a quantized input; linears with one input share its pair."""
        pairs: dict[tuple[ir.Value, InputCodes], ir.Value] = {}
        for node in self._placeholders("Linear"):
            name, source = name_of(node), node.inputs[0]
            linear = self.weights.linears[name]
            assert source is not None
            if linear.input is not None:
                key = (source, linear.input)
                if key not in pairs:
                    pairs[key] = self._pair(node, source, f"{name}/input", linear.input)
                source = pairs[key]
            self._replace(node, [self._product(node, source, name, linear)])

    def _product(self, node: ir.Node, source: ir.Value, name: str, linear: LinearSpec) -> ir.Value:
        return self._node(node, "MatMul", [source, self._weight(node, name, linear)], [f"{name}/output"])[0]

    def _weight(self, before: ir.Node, name: str, linear: LinearSpec) -> ir.Value:
        """Return [K, N] for multiplication; here for a linear that is not quantized."""
        if linear.shared is None:
            return self._turned(name, [name])
        return self._node(before, "Transpose", [self._tied(linear)], [f"{name}.turned"], perm=[1, 0])[0]

    def _pair(self, before: ir.Node, source: ir.Value, name: str, how: InputCodes) -> ir.Value:
        """Add QuantizeLinear and DequantizeLinear with a fixed scale, after moved channels."""
        assert how.scale is not None
        if how.moved:
            shift, reach = (np.asarray(part, np.float32) for part in how.moved)
            if shift.any():
                by = self._constant(f"{name}.shift", shift, self.floats)
                (source,) = self._node(before, "Sub", [source, by], [f"{name}.shifted"])
            even = self._constant(f"{name}.channels", 1 / reach, self.floats)
            (source,) = self._node(before, "Mul", [source, even], [f"{name}.even"])
        grid = [self._constant(f"{name}.scale", how.scale, self.floats), self._zero(how)]
        (codes,) = self._node(before, "QuantizeLinear", [source, *grid], [f"{name}.codes"])
        return self._node(before, "DequantizeLinear", [codes, *grid], [f"{name}.values"])[0]

    def _zero(self, how: InputCodes) -> ir.Value:
        """Return the zero point of an input, in the type of its codes."""
        raise NotImplementedError

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> None:
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        first = next(iter(self.graph))
        if self.traced.decoder:
            self._cached()
        for index, node in enumerate(nodes):
            self._attend(first, index, node)

    def _cached(self) -> None:
        """Add the interface of a cache written in place."""
        if self.cache != "in_place":
            return
        for value in (*self.graph.inputs, *self.graph.outputs):
            if value.name is not None and value.name.startswith(CACHES):
                assert value.shape is not None
                value.shape = ir.Shape([value.shape[0], value.shape[1], self.capacity, value.shape[3]])
        mask, ids = self._input("attention_mask"), self._input("input_ids")
        assert mask.shape is not None and ids.shape is not None
        mask.shape = ir.Shape([mask.shape[0], self.capacity])
        where = ir.Value(name="write_indices", shape=ir.Shape([ids.shape[0]]), type=ir.TensorType(ir.DataType.INT64))
        inputs = self.graph.inputs
        inputs.insert([value.name for value in inputs].index("position_ids") + 1, where)

    def _attend(self, first: ir.Node, index: int, node: ir.Node) -> None:
        name = f"attention.{index}"
        query, key, value, mask, *past = node.inputs
        window = node.attributes["window"].as_int()
        if window > 0 and not self.traced.decoder:
            raise unattended(name, "a window in an encoder", "encoders need full attention", CHECKPOINT)
        bias = self._mask(first, mask, window, self.traced.decoder or bool(node.attributes["causal"].as_int()))
        present: list[ir.Value] = []
        if past:
            key, kept = self._remember(node, index, 0, key, past[0])
            value, also = self._remember(node, index, 1, value, past[1])
            present = [kept, also]
        scale, softcap = node.attributes["scale"].as_float(), node.attributes["softcap"].as_float()
        if softcap > 0:
            heads = self._spelled_out(node, name, [query, key, value, bias], softcap)
        else:
            heads = self._attended(node, name, [query, key, value, bias], scale)
        (turned,) = self._node(node, "Transpose", [heads], [f"{name}/turned"], perm=[0, 2, 1, 3])
        flat = self._constant("flat", [0, 0, -1], np.int64)
        (output,) = self._node(node, "Reshape", [turned, flat], [f"{name}/output"])
        self._replace(node, [output, *present])

    def _attended(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], scale: float) -> ir.Value:
        """Compute [B, H, S, D] from queries, keys, values and the bias of scores."""
        return self._node(node, "Attention", inputs, [f"{name}/heads"], scale=scale)[0]

    def _spelled_out(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], softcap: float) -> ir.Value:
        """Compute softmax(cap(q kᵀ · scale) + bias) v by basic operators, [B, H, S, D]; scores in float32."""

        def at(kind: str, inputs: list[ir.Value | None], output: str, **attributes: Any) -> ir.Value:
            return self._node(node, kind, inputs, [f"{name}/{output}"], **attributes)[0]

        query, key, value, bias = inputs
        wide = int(ir.DataType.FLOAT)
        heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
        # [B, G, H / G, S, D] by [B, G, 1, D, T]: queries of a group read one key
        size = self._size(query)
        grouped = [0, kv_heads, heads // kv_heads, -1, size]
        query = at(
            "Reshape", [query, self._constant(f"attention/split/{heads}/{kv_heads}/{size}", grouped, np.int64)], "query"
        )
        second = self._constant("attention/second", [2], np.int64)
        key = at("Unsqueeze", [key, second], "keys")
        value = at("Unsqueeze", [value, second], "values")
        turned = at("Transpose", [key], "keys/turned", perm=[0, 1, 2, 4, 3])
        factor = self._constant(f"{name}.scale", node.attributes["scale"].as_float(), self.floats)
        query = at("Mul", [query, factor], "query/scaled")
        scores = at("Cast", [at("MatMul", [query, turned], "products")], "scores", to=wide)
        if softcap > 0:
            cap = self._constant(f"{name}.softcap", softcap, np.float32)
            scores = at("Tanh", [at("Div", [scores, cap], "scores/share")], "scores/bounded")
            scores = at("Mul", [scores, cap], "scores/capped")
        added = at("Unsqueeze", [bias, self._constant("attention/first", [1], np.int64)], "bias")
        scores = at("Add", [scores, at("Cast", [added], "bias/wide", to=wide)], "scores/masked")
        shares = at("Softmax", [scores], "shares", axis=-1)
        shares = at("Cast", [shares], "shares/rounded", to=int(ir.DataType.from_numpy(self.floats)))
        (mixed,) = self._node(node, "MatMul", [shares, value], [f"{name}/mixed"])
        together = self._constant(f"attention/together/{heads}/{size}", [0, heads, -1, size], np.int64)
        return at("Reshape", [mixed, together], "heads")

    def _remember(
        self, node: ir.Node, layer: int, which: int, new: ir.Value | None, past: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Return keys or values of all tokens for multiplication, and the cache with the new ones."""
        name = f"attention.{layer}/{'value' if which else 'key'}"
        if self.cache == "in_place":
            where = self._input("write_indices")
            (kept,) = self._node(node, "TensorScatter", [past, new, where], [f"{name}/kept"], axis=2)
        else:
            (kept,) = self._node(node, "Concat", [past, new], [f"{name}/kept"], axis=2)
        return kept, kept

    def _mask(self, first: ir.Node, mask: ir.Value | None, window: int, causal: bool) -> ir.Value:
        """Return [B, 1, S, T], 0 for visible tokens and a large negative number for others; made once."""
        if (window, causal) in self._masks:
            return self._masks[window, causal]
        assert mask is not None
        stem = f"mask/{window}{'' if causal == self.traced.decoder else '/causal'}"

        def at(kind: str, inputs: list[ir.Value], output: str, **attributes: Any) -> ir.Value:
            return self._node(first, kind, inputs, [f"{stem}/{output}"], **attributes)[0]

        wide = self._constant("mask/axes", [1, 2], np.int64)
        seen = at("Unsqueeze", [at("Cast", [mask], "real", to=int(ir.DataType.BOOL)), wide], "tokens")
        if causal:
            columns, rows = self._columns(at, mask)
            seen = at("And", [seen, at("LessOrEqual", [columns, rows], "causal")], "seen")
            if window > 0:
                least = at("Sub", [rows, self._constant(f"{stem}/size", window, np.int64)], "least")
                seen = at("And", [seen, at("Greater", [columns, least], "near")], "nearby")
        low = _HIDDEN_HALF if self.floats == np.float16 else _HIDDEN
        zero, hidden = (
            self._constant(f"mask/{word}", number, self.floats) for word, number in (("zero", 0.0), ("low", low))
        )
        bias = at("Where", [seen, zero, hidden], "bias")
        if not causal:
            # [B, 1, 1, T]: every token sees the same
            new = at("Shape", [mask], "new", start=1, end=2)
            one = self._constant("one", [1], np.int64)
            bias = at("Expand", [bias, at("Concat", [one, one, new, one], "shape", axis=0)], "expanded")
        self._masks[window, causal] = bias
        return bias

    def _columns(self, at: Callable[..., ir.Value], mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return positions of the cache's columns, [1, 1, 1, T], and of the new tokens, [B or 1, 1, S, 1]."""
        zero, one = self._constant("mask/first", 0, np.int64), self._constant("mask/step", 1, np.int64)
        length = at("Shape", [self._input("input_ids")], "length", start=1, end=2)
        scalar = self._constant("mask/scalar", [0], np.int64)
        new = at("Squeeze", [length, scalar], "count")
        steps = at("Range", [zero, new, one], "steps")
        rows = at("Unsqueeze", [steps, self._constant("mask/down", [0, 1, 3], np.int64)], "downwards")
        if self.cache == "in_place":
            columns = self._constant("mask/columns", np.arange(self.capacity).reshape(1, 1, 1, -1), np.int64)
            behind = self._constant("mask/behind", [1, 2, 3], np.int64)
            start = at("Unsqueeze", [self._input("write_indices"), behind], "start")
        else:
            last = at("Squeeze", [at("Shape", [mask], "total", start=1, end=2), scalar], "last")
            along = at("Range", [zero, last, one], "along")
            columns = at("Unsqueeze", [along, self._constant("mask/across", [0, 1, 2], np.int64)], "columns")
            start = at("Sub", [last, new], "start")
        return columns, at("Add", [rows, start], "rows")
