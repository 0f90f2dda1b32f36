"""Pairs before the inputs of products in a network for TensorRT: which there are, and the network without some.

A product whose pair is taken out multiplies 16-bit inputs with weights that stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from quantkit.bundle import stopping_when_full

_END = "/input.values"
_BLOCK = re.compile(r"\.\d+\.")


def groups(network: Path) -> dict[str, tuple[str, ...]]:
    """Group -> linears that read one of its pairs, over all blocks: `q_proj k_proj v_proj`, `o_proj`, ...

    Args:
        network: `network.onnx`; weights are not read.
    """
    import onnx_ir as ir

    found: dict[str, list[str]] = {}
    for node in ir.load(network).graph:
        if not str(node.outputs[0].name).endswith(_END):
            continue
        readers = [str(use.node.outputs[0].name).removesuffix("/output") for use in node.outputs[0].uses()]
        kinds = dict.fromkeys(_BLOCK.split(name)[-1].rpartition(".")[2] for name in readers)
        found.setdefault(" ".join(kinds), []).extend(readers)
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
        values = node.outputs[0]
        readers = {str(use.node.outputs[0].name).removesuffix("/output") for use in values.uses()}
        if not str(values.name).endswith(_END) or not readers <= set(linears):
            continue
        codes = node.inputs[0].producer() if node.inputs[0] is not None else None
        assert codes is not None and codes.inputs[0] is not None, values.name
        ir.convenience.replace_all_uses_with(values, codes.inputs[0])
        model.graph.remove([node, codes], safe=True)
        gone += 1
    unread = [name for name, value in model.graph.initializers.items() if not value.uses()]
    for name in unread:
        model.graph.initializers.pop(name)
    with stopping_when_full(to.parent):
        # what lies in the data file is referred to as it was
        ir.save(model, to)
    return gone
