"""What every dialect needs to rewrite a traced graph: values read when they are written, nodes put in and taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.bundle import Decision
from quantkit.exporters.onnx.nbits import Array, LinearSpec, WeightsByName
from quantkit.exporters.trace.traced import DOMAIN, Traced


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
        self.graph.register_initializer(value)
        self._names[value.name or ""] = value

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
