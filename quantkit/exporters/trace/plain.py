"""Norms, attention and cache in ONNX's own operators, for runtimes that have no fused ones of another domain.

The cache is one of

    in_place    [batch, heads, capacity, size]; TensorScatter writes new tokens at `write_indices` [batch]
    grown       [batch, heads, tokens so far, size]; Concat

Positions are an input, so rows may be padded on the left; the mask [batch, columns of the cache] has ones where tokens
are. A dialect says how keys and values are stored (`_remember`), and what multiplies them (`_attended`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporters.trace import CHECKPOINT
from quantkit.exporters.trace.rewrite import Rewriting

Cache = Literal["in_place", "grown"]
# added to the scores of what is not to be seen; finite, since a row of padding sees nothing at all
_HIDDEN, _HIDDEN_HALF = -1e9, -60000.0


@dataclass
class PlainOperators(Rewriting):
    """The rewriting of one graph, but for its products.

    Args:
        cache: see the module.
        capacity: tokens that a cache `in_place` holds.
    """

    cache: Cache = field(default="in_place", kw_only=True)
    capacity: int = field(default=2048, kw_only=True)
    _masks: dict[tuple[int, bool], ir.Value] = field(default_factory=dict, init=False)

    def _norms(self) -> None:
        for node in self._placeholders("RMSNorm"):
            inputs, output = [node.inputs[0], self._gamma(node)], f"{node.attributes['name'].as_string()}/output"
            how: dict[str, Any] = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
            self._replace(node, self._node(node, "RMSNormalization", inputs, [output], **how))

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
        """The interface of a cache that is written in place."""
        if self.cache != "in_place":
            return
        for value in (*self.graph.inputs, *self.graph.outputs):
            if value.name is not None and value.name.startswith(("past_key_values.", "present.")):
                assert value.shape is not None
                value.shape = ir.Shape([value.shape[0], value.shape[1], self.capacity, value.shape[3]])
        mask, ids = self._input("attention_mask"), self._input("input_ids")
        assert mask.shape is not None and ids.shape is not None
        mask.shape = ir.Shape([mask.shape[0], self.capacity])
        where = ir.Value(name="write_indices", shape=ir.Shape([ids.shape[0]]), type=ir.TensorType(ir.DataType.INT64))
        inputs = self.graph.inputs
        inputs.insert([each.name for each in inputs].index("position_ids") + 1, where)

    def _input(self, name: str) -> ir.Value:
        return next(value for value in self.graph.inputs if value.name == name)

    def _attend(self, first: ir.Node, index: int, node: ir.Node) -> None:
        name = f"attention.{index}"
        query, key, value, mask, *past = node.inputs
        window = node.attributes["window"].as_int()
        if window > 0 and not self.traced.decoder:
            raise InputError(
                "attention-unsupported",
                where=name,
                value="a window in an encoder",
                rule="every token of an encoder sees every other",
                remedy=CHECKPOINT,
            )
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
        """[B, H, S, D] of queries, keys, values and what is added to scores."""
        return self._node(node, "Attention", inputs, [f"{name}/heads"], scale=scale)[0]

    def _spelled_out(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], softcap: float) -> ir.Value:
        """softmax(cap(q kᵀ · scale) + bias) v in operators of their own, [B, H, S, D]; scores in float32."""
        query, key, value, bias = inputs
        heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
        # [B, G, H / G, S, D] by [B, G, 1, D, T]: queries of a group read one key
        size = self._size(query)
        split = self._constant(
            f"attention/split/{heads}/{kv_heads}/{size}", [0, kv_heads, heads // kv_heads, -1, size], np.int64
        )
        (query,) = self._node(node, "Reshape", [query, split], [f"{name}/query"])
        second = self._constant("attention/second", [2], np.int64)
        (key,) = self._node(node, "Unsqueeze", [key, second], [f"{name}/keys"])
        (value,) = self._node(node, "Unsqueeze", [value, second], [f"{name}/values"])
        (turned,) = self._node(node, "Transpose", [key], [f"{name}/keys/turned"], perm=[0, 1, 2, 4, 3])
        factor = self._constant(f"{name}.scale", node.attributes["scale"].as_float(), self.floats)
        (query,) = self._node(node, "Mul", [query, factor], [f"{name}/query/scaled"])
        (scores,) = self._node(node, "MatMul", [query, turned], [f"{name}/products"])
        (scores,) = self._node(node, "Cast", [scores], [f"{name}/scores"], to=int(ir.DataType.FLOAT))
        if softcap > 0:
            cap = self._constant(f"{name}.softcap", softcap, np.float32)
            (scores,) = self._node(node, "Div", [scores, cap], [f"{name}/scores/share"])
            (scores,) = self._node(node, "Tanh", [scores], [f"{name}/scores/bounded"])
            (scores,) = self._node(node, "Mul", [scores, cap], [f"{name}/scores/capped"])
        first = self._constant("attention/first", [1], np.int64)
        (wide,) = self._node(node, "Unsqueeze", [bias, first], [f"{name}/bias"])
        (wide,) = self._node(node, "Cast", [wide], [f"{name}/bias/wide"], to=int(ir.DataType.FLOAT))
        (scores,) = self._node(node, "Add", [scores, wide], [f"{name}/scores/masked"])
        (shares,) = self._node(node, "Softmax", [scores], [f"{name}/shares"], axis=-1)
        kind = int(ir.DataType.from_numpy(self.floats))
        (shares,) = self._node(node, "Cast", [shares], [f"{name}/shares/rounded"], to=kind)
        (mixed,) = self._node(node, "MatMul", [shares, value], [f"{name}/mixed"])
        together = self._constant(f"attention/together/{heads}/{size}", [0, heads, -1, size], np.int64)
        (found,) = self._node(node, "Reshape", [mixed, together], [f"{name}/heads"])
        return found

    def _remember(
        self, node: ir.Node, layer: int, which: int, new: ir.Value | None, past: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """(keys or values of all tokens as they are multiplied, the cache with the new ones)."""
        name = f"attention.{layer}/{'value' if which else 'key'}"
        if self.cache == "in_place":
            where = self._input("write_indices")
            (kept,) = self._node(node, "TensorScatter", [past, new, where], [f"{name}/kept"], axis=2)
        else:
            (kept,) = self._node(node, "Concat", [past, new], [f"{name}/kept"], axis=2)
        return kept, kept

    def _mask(self, first: ir.Node, mask: ir.Value | None, window: int, causal: bool) -> ir.Value:
        """[B, 1, S, T], 0 where a token sees another and a large negative number elsewhere; made once."""
        if (window, causal) in self._masks:
            return self._masks[window, causal]
        assert mask is not None
        stem = f"mask/{window}{'' if causal == self.traced.decoder else '/causal'}"
        wide = self._constant("mask/axes", [1, 2], np.int64)
        (real,) = self._node(first, "Cast", [mask], [f"{stem}/real"], to=int(ir.DataType.BOOL))
        (seen,) = self._node(first, "Unsqueeze", [real, wide], [f"{stem}/tokens"])
        if causal:
            columns, rows = self._columns(first, mask, stem)
            (before,) = self._node(first, "LessOrEqual", [columns, rows], [f"{stem}/causal"])
            (seen,) = self._node(first, "And", [seen, before], [f"{stem}/seen"])
            if window > 0:
                (least,) = self._node(
                    first, "Sub", [rows, self._constant(f"{stem}/size", window, np.int64)], [f"{stem}/least"]
                )
                (near,) = self._node(first, "Greater", [columns, least], [f"{stem}/near"])
                (seen,) = self._node(first, "And", [seen, near], [f"{stem}/nearby"])
        low = _HIDDEN_HALF if self.floats == np.float16 else _HIDDEN
        zero, hidden = (
            self._constant(f"mask/{word}", number, self.floats) for word, number in (("zero", 0.0), ("low", low))
        )
        (bias,) = self._node(first, "Where", [seen, zero, hidden], [f"{stem}/bias"])
        if not causal:
            # [B, 1, 1, T]: every token sees the same
            (new,) = self._node(first, "Shape", [mask], [f"{stem}/new"], start=1, end=2)
            one = self._constant("one", [1], np.int64)
            (shape,) = self._node(first, "Concat", [one, one, new, one], [f"{stem}/shape"], axis=0)
            (bias,) = self._node(first, "Expand", [bias, shape], [f"{stem}/expanded"])
        self._masks[window, causal] = bias
        return bias

    def _columns(self, first: ir.Node, mask: ir.Value, stem: str) -> tuple[ir.Value, ir.Value]:
        """(place of each column of the cache, [1, 1, 1, T]; that of each new token, [B or 1, 1, S, 1])."""
        zero, one = self._constant("mask/first", 0, np.int64), self._constant("mask/step", 1, np.int64)
        ids = self._input("input_ids")
        (length,) = self._node(first, "Shape", [ids], [f"{stem}/length"], start=1, end=2)
        scalar = self._constant("mask/scalar", [0], np.int64)
        (new,) = self._node(first, "Squeeze", [length, scalar], [f"{stem}/count"])
        (steps,) = self._node(first, "Range", [zero, new, one], [f"{stem}/steps"])
        down = self._constant("mask/down", [0, 1, 3], np.int64)
        (rows,) = self._node(first, "Unsqueeze", [steps, down], [f"{stem}/downwards"])
        if self.cache == "in_place":
            columns = self._constant("mask/columns", np.arange(self.capacity).reshape(1, 1, 1, -1), np.int64)
            behind = self._constant("mask/behind", [1, 2, 3], np.int64)
            (start,) = self._node(first, "Unsqueeze", [self._input("write_indices"), behind], [f"{stem}/start"])
        else:
            (total,) = self._node(first, "Shape", [mask], [f"{stem}/total"], start=1, end=2)
            (last,) = self._node(first, "Squeeze", [total, scalar], [f"{stem}/last"])
            (along,) = self._node(first, "Range", [zero, last, one], [f"{stem}/along"])
            across = self._constant("mask/across", [0, 1, 2], np.int64)
            (columns,) = self._node(first, "Unsqueeze", [along, across], [f"{stem}/columns"])
            (start,) = self._node(first, "Sub", [last, new], [f"{stem}/start"])
        (rows,) = self._node(first, "Add", [rows, start], [f"{stem}/rows"])
        return columns, rows
