"""Pairs before the inputs of products in a network for TensorRT: which there are, and the network without some.

A product whose pair is taken out multiplies 16-bit inputs with weights that stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.bundle import stopping_when_full
from quantkit.graph.values import drop_unread

if TYPE_CHECKING:
    import onnx_ir as ir

_PRODUCT = "/output"
# of a cache, which is stored so whatever multiplies it
_CACHE = "/read"
_BLOCK = re.compile(r"\.\d+\.")


def groups(network: Path) -> dict[str, tuple[str, ...]]:
    """Group -> linears that read one of its pairs, over all blocks: `q_proj k_proj v_proj`, `o_proj`, ...

    Of a graph, whose nodes have any names, the products of one shape are a group: `Conv 96x16x1x1`; they take one time.
    """
    import onnx_ir as ir

    found: dict[str, list[str]] = {}
    for node in ir.load(network).graph:
        if _pair(node) is None:
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        kinds = dict.fromkeys(_kind(reader) for reader in readers)
        found.setdefault(" ".join(kinds), []).extend(_name(reader) for reader in readers)
    return {name: tuple(linears) for name, linears in found.items()}


def without(network: Path, to: Path, linears: Collection[str]) -> int:
    """Write the network without the pairs that these linears read.

    Args:
        network: `network.onnx`.
        to: in the same folder, or one with the same data file: weights are not written again.
        linears: all readers of a pair, or none of them.

    Returns:
        how many pairs were taken out.
    """
    import onnx_ir as ir

    model = ir.load(network)
    gone = 0
    for node in list(model.graph):
        codes, values = _pair(node), node.outputs[0]
        if codes is None or not {_name(use.node) for use in values.uses()} <= set(linears):
            continue
        assert codes.inputs[0] is not None, values.name
        ir.convenience.replace_all_uses_with(values, codes.inputs[0])
        model.graph.remove(node, safe=True)
        if not codes.outputs[0].uses():
            model.graph.remove(codes, safe=True)
        gone += 1
    drop_unread(model.graph)
    with stopping_when_full(to.parent):
        # what lies in the data file is referred to as it was
        ir.save(model, to)
    return gone


def _pair(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear of a pair before products, by its DequantizeLinear; None of any other node."""
    if node.op_type != "DequantizeLinear" or str(node.outputs[0].name).endswith(_CACHE) or node.inputs[0] is None:
        return None
    codes = node.inputs[0].producer()
    return codes if codes is not None and codes.op_type == "QuantizeLinear" else None


def _name(reader: ir.Node) -> str:
    """What a recipe calls it: a linear, or a node of a graph."""
    made = str(reader.outputs[0].name)
    return made.removesuffix(_PRODUCT) if made.endswith(_PRODUCT) else str(reader.name)


def _kind(reader: ir.Node) -> str:
    if str(reader.outputs[0].name).endswith(_PRODUCT):
        return _BLOCK.split(_name(reader))[-1].rpartition(".")[2]
    weight = reader.inputs[1].producer() if len(reader.inputs) > 1 and reader.inputs[1] is not None else None
    stored = weight.inputs[0] if weight is not None and weight.op_type == "DequantizeLinear" else None
    if stored is None or not stored.is_initializer() or stored.shape is None:
        return reader.op_type
    return f"{reader.op_type} {'x'.join(map(str, stored.shape))}"
