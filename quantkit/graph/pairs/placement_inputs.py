"""Where Q/DQ pairs go for TensorRT: before products, and on one input of a sum behind a convolution.

TensorRT moves pairs itself (a pooling or a concatenation passes them on) and fuses what stands between a
DequantizeLinear and the next QuantizeLinear into the product, so that a convolution, its activation and the next
convolution's pair are one kernel from int8 to int8. Outputs have no pair of their own: the one who reads them says
whether they are quantized. Of a sum behind a convolution the other input is quantized, which makes it part of that
convolution. (NVIDIA TensorRT documentation, "Q/DQ Layer-Placement Recommendations".)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantkit.graph.pairs.placement import Placement
from quantkit.graph.sites import Site
from quantkit.graph.values import constant

if TYPE_CHECKING:
    import onnx_ir as ir


def before(model: ir.Model, sites: Sequence[Site]) -> Placement:
    """Where pairs go for these products of a graph."""
    found = dict.fromkeys(site.input for site in sites)
    summed = {site.output for site in sites if site.is_conv}
    for node in model.graph:
        if node.op_type != "Add" or any(value is None or constant(value) is not None for value in node.inputs):
            continue
        first, second = (value for value in node.inputs if value is not None)
        if first is second:
            continue
        if _only(second, summed):
            found[str(first.name)] = None
        elif _only(first, summed):
            found[str(second.name)] = None
    order = [str(value.name) for value in model.graph.inputs]
    order += [str(value.name) for node in model.graph for value in node.outputs]
    return Placement(tuple(name for name in order if name in found), {}, {})


def _only(value: ir.Value, made: set[str]) -> bool:
    """Whether a convolution makes it for this sum alone."""
    return value.name in made and len(value.uses()) == 1 and not value.is_graph_output()
