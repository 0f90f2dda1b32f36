"""Share of a quantized graph that ONNX Runtime runs in integer kernels, read from the optimized graph.

A quantized product is written as a float operator between DequantizeLinear and QuantizeLinear, and the runtime replaces
the pattern by an integer kernel. If it finds none, the results stay right, but the model is slower than before. So the
graph is read after optimization (`SessionOptions.optimized_model_filepath`):

    share = MACs of the sites in integer kernels / MACs of all sites

A site is identified by the tensor of its codes, which the runtime moves but keeps, or by the name of its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

# ONNX Runtime's docs/ContribOperators.md, and the integer operators of ONNX itself
KERNELS = frozenset(
    {
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "QLinearMatMul",
        "QGemm",
        "ConvInteger",
        "QLinearConv",
    }
)
# operators that may stand between stored codes and their product
_BETWEEN = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"})


@dataclass(frozen=True)
class QuantizedSite:
    """A quantized product.

    Args:
        name: name of the layer, for people.
        weight: name of the initializer with its codes.
        macs: multiply-accumulates per item, for the same item at all sites.
        output: name of the product's float output.
    """

    name: str
    weight: str
    macs: float
    output: str = ""


@dataclass(frozen=True)
class IntegerKernels:
    """Integer kernels that a runtime chose for the sites.

    Args:
        share: share of the sites' multiply-accumulates in integer kernels; 1 without sites.
        floating: site -> operator that runs instead of an integer kernel.
        kernels: integer kernel -> number of sites.
    """

    share: float
    floating: Mapping[str, str]
    kernels: Mapping[str, int]


def found(model: ir.Model, sites: Sequence[QuantizedSite]) -> IntegerKernels:
    """Match the sites with the integer kernels of an optimized graph."""
    graph = model.graph
    readers: dict[str, list[ir.Node]] = {}
    makers: dict[str, ir.Node] = {}
    for node in graph:
        if node.op_type in _BETWEEN:
            continue
        for value in node.inputs:
            for name in _constants(value):
                readers.setdefault(name, []).append(node)
        makers.update({value.name: node for value in node.outputs if value.name})
    floating: dict[str, str] = {}
    kernels: Counter[str] = Counter()
    inside = 0.0
    for site in sites:
        nodes = [*([makers[site.output]] if site.output in makers else []), *_reading(readers, site.weight)]
        kernel = next((node.op_type for node in nodes if node.op_type in KERNELS), "")
        if kernel:
            kernels[kernel] += 1
            inside += site.macs
        else:
            floating[site.name] = nodes[0].op_type if nodes else "no operator reads its weight"
    total = sum(site.macs for site in sites)
    return IntegerKernels(inside / total if total else 1.0, floating, dict(kernels))


def _constants(value: ir.Value | None) -> Iterator[str]:
    """Yield the name of the initializer that a value is read from, directly or dequantized."""
    while value is not None:
        if value.is_initializer():
            yield value.name or ""
            return
        node = value.producer()
        if node is None or node.op_type not in _BETWEEN:
            return
        value = node.inputs[0] if node.inputs else None


def _reading(readers: Mapping[str, Iterable[ir.Node]], weight: str) -> list[ir.Node]:
    """Return the readers of a tensor; the runtime adds a suffix to the name of a converted one."""
    return [
        node for name, nodes in readers.items() if name == weight or name.startswith(f"{weight}_") for node in nodes
    ]
