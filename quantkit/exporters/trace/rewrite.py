"""What every dialect needs to rewrite a traced graph: values read when they are written, nodes put in and taken out.

Apart from `trace/transformer.py`, which imports transformers: a float ONNX graph is rewritten without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.bundle import Decision, decision, stopping_when_full
from quantkit.exporters.onnx.nbits import Array, LinearSpec, WeightsByName
from quantkit.graph.values import free


@dataclass
class Rewriting:
    """The rewriting of one graph.

    Args:
        traced: changed in place.
        weights: what goes into it.
        decisions: taken on the way.
    """

    traced: Traced
    weights: WeightsByName
    decisions: list[Decision] = field(default_factory=list, kw_only=True)
    _names: dict[str, ir.Value] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> ir.Graph:
        """The graph."""
        return self.traced.model.graph

    @property
    def floats(self) -> np.dtype[Any]:
        """numpy's type of what is computed in."""
        return np.dtype(np.float32)

    def _parameters(self) -> None:
        """Parameters that the graph uses as they are: embeddings, biases, norms with a bias, buffers."""
        found: dict[str, ir.Value] = {}
        for node in self.graph:
            for value in node.inputs:
                if value is not None and (name := self.traced.parameters.get(value.name or "")):
                    found.setdefault(name, value)
                    if value is not found[name]:
                        ir.convenience.replace_all_uses_with(value, found[name])
        for name, value in found.items():
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
        """An initializer that is read when it is written; the one there is, if there is one of that name."""
        if name not in self._names:
            self._bind(ir.Value(name=name), shape, dtype, read)
        return self._names[name]

    def _gamma(self, norm: ir.Node) -> ir.Value:
        """What an RMSNorm multiplies by: its weight, and the one that some classes leave out of it."""
        name, offset = f"{norm.attributes['name'].as_string()}.weight", norm.attributes["offset"].as_float()
        return self._new(
            name, self.weights.shapes[name], self.floats, lambda: self.weights.tensor(name) + np.float32(offset)
        )

    def _tied(self, linear: LinearSpec) -> ir.Value:
        """The embedding [N, K] that a head shares its weight with."""
        name, shape = linear.shared or "", (linear.rows, linear.columns)
        return self._new(name, shape, self.floats, lambda: self.weights.tensor(name))

    def _turned(self, name: str, linears: Sequence[str]) -> ir.Value:
        """Weights of linears below each other, not quantized, as they are multiplied: [K, N]."""
        found = [self.weights.linears[linear] for linear in linears]

        def read() -> Array:
            parts = [self.weights.tensor(f"{linear}.weight") for linear in linears]
            return (parts[0] if len(parts) == 1 else np.concatenate(parts)).T

        return self._new(f"{name}.weight", (found[0].columns, sum(each.rows for each in found)), self.floats, read)

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
        """A new node before another one; its outputs."""
        values = [ir.Value(name=name) for name in outputs]
        node = ir.Node(domain, kind, list(inputs), ir.convenience.convert_attributes(attributes), outputs=values)
        self.graph.insert_before(before, node)
        return values

    def _repeated(self, node: ir.Node, name: str, given: ir.Value | None) -> ir.Value | None:
        """[B, G, T, D] as the attention `node` has queries, [B, H, T, D]: each key as often as queries share it."""
        heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
        if heads == kv_heads:
            return given
        second = self._constant("attention/second", [2], np.int64)
        times = self._constant(f"attention/times/{heads // kv_heads}", [1, 1, heads // kv_heads, 1, 1], np.int64)
        size = self._size(node.inputs[0])
        flat = self._constant(f"attention/flat/{heads}/{size}", [0, heads, -1, size], np.int64)
        (wide,) = self._node(node, "Unsqueeze", [given, second], [f"{name}/wide"])
        (several,) = self._node(node, "Expand", [wide, times], [f"{name}/several"])
        return self._node(node, "Reshape", [several, flat], [name])[0]

    def _size(self, query: ir.Value | None) -> int:
        assert query is not None and query.shape is not None
        size = query.shape[3]
        assert isinstance(size, int)
        return size

    def _replace(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        """Let `values` stand for a node's outputs, and remove it."""
        for old, new in zip(node.outputs, values, strict=True):
            name, is_output = old.name, old.is_graph_output()
            new.shape, new.type = new.shape or old.shape, new.type or old.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            if is_output:
                old.name, new.name = None, name
        self.graph.remove(node, safe=True)

    def _placeholders(self, kind: str) -> list[ir.Node]:
        return [node for node in self.graph if node.domain == DOMAIN and node.op_type == kind]

    def _prune(self) -> None:
        from onnx_ir.passes import common

        common.RemoveUnusedNodesPass()(self.traced.model)
        # inputs stay: a mask that nothing reads is still part of the interface

    def _finish(self) -> ir.Model:
        """The graph, without what nothing reads; no placeholder is left."""
        self._prune()
        self.graph.opset_imports.pop(DOMAIN, None)
        left = [node for node in self.graph if node.domain == DOMAIN]
        assert not left, left[0].op_type
        self.traced.model.producer_name = "quantkit"
        self.traced.model.producer_version = None
        return self.traced.model


# of the placeholder nodes
DOMAIN = "quantkit"


@dataclass(frozen=True)
class Traced:
    """A graph without weights.

    Args:
        model: its initializers outside placeholders stand among the graph's inputs' values in `parameters`.
        parameters: value in the graph -> parameter or buffer of the skeleton that it stands for.
        decoder: whether it has a cache.
        layers: how many layers have a cache.
        left: why the head of an encoder is not in it; "" where it is, or there is none.
    """

    model: ir.Model
    parameters: Mapping[str, str]
    decoder: bool
    layers: int
    left: str = ""

    def decisions(self, exporter: str) -> list[Decision]:
        """Record that a head was left out."""
        advice = "a checkpoint has it (`export: [checkpoint: {}]`)"
        return [decision(exporter, "head-left-out", "head", f"{self.left}; {advice}")] if self.left else []


def keep_few(model: ir.Model, *, optional: bool) -> None:
    """Add an input `logits_to_keep`, as transformers has it: logits of the last so many positions; 0 is all.

    A prompt's logits are wanted for its last token only, and the head is a large part of a small model.

    Args:
        model: of a decoder, changed in place; left as it is where no product makes its logits.
        optional: whether it may be left out, and is 0 then. TensorRT has no inputs with a value of their own.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")
    head, after = logits.producer(), [logits]
    heads: list[ir.Node] = []
    # past soft caps and scalings, back to the product, or to two side by side
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
    constants = {"keep/end": np.array([2**62], np.int64), "keep/axis": np.array([1], np.int64)}
    values = []
    for name, array in constants.items():
        value = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        value.const_value = ir.tensor(array, name=name)
        graph.register_initializer(value)
        values.append(value)
    start, kept = ir.Value(name="keep/start"), ir.Value(name="keep/hidden")
    negative = ir.Node("", "Neg", [keep], outputs=[start])
    slices = ir.Node("", "Slice", [head.inputs[0], start, *values], outputs=[kept])
    graph.insert_before(head, [negative, slices])
    for product in heads or [head]:
        product.replace_input_with(0, kept)
    for value in after:
        if value.shape is not None:
            value.shape = ir.Shape([value.shape[0], "kept_length", *list(value.shape)[2:]])


def _products(joined: ir.Node) -> list[ir.Node]:
    """The products that a Concat puts side by side; others are left out."""
    makers = [value.producer() for value in joined.inputs if value is not None]
    return [maker for maker in makers if maker is not None and maker.op_type == "MatMulNBits"]


def save(model: ir.Model, path: Path, data: str) -> None:
    """Write a graph, its tensors from 1 KiB on into `data` beside it, one in memory at a time. Raises Stopped."""
    with stopping_when_full(path.parent):
        ir.save(model, path, external_data=data, size_threshold_bytes=1024, max_workers=1)
