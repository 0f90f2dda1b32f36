"""What ONNX Runtime really runs in integers: read off the graph that it has optimized.

A quantized product is written as float operators between QuantizeLinear and DequantizeLinear, and it is up to the
runtime to find the integer kernel that they stand for. Where it does not, the model still gives the right numbers,
slower than before. So the graph is read after optimization (`SessionOptions.optimized_model_filepath`):

    share = MACs of the sites that an integer kernel multiplies / MACs of all sites

A site is found by the tensor that holds its codes, which the runtime moves but keeps, or by the value that it makes.
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
# between stored codes and the product that reads them
_BETWEEN = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"})


@dataclass(frozen=True)
class QuantizedSite:
    """A product that was quantized.

    Args:
        name: for people: the layer's.
        weight: the initializer that holds its codes.
        macs: multiply-accumulates of one item, whatever an item is, as long as all sites mean the same.
        output: the float value that the product makes.
    """

    name: str
    weight: str
    macs: float
    output: str = ""


@dataclass(frozen=True)
class IntegerKernels:
    """What a runtime made of the sites.

    Args:
        share: of the sites' multiply-accumulates, those in integer kernels; 1 where there are none.
        floating: site -> what runs in the place of an integer kernel.
        kernels: integer kernel -> how many sites it runs.
    """

    share: float
    floating: Mapping[str, str]
    kernels: Mapping[str, int]


def found(model: ir.Model, sites: Sequence[QuantizedSite]) -> IntegerKernels:
    """Tell which sites run in integer kernels."""
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
            floating[site.name] = nodes[0].op_type if nodes else "no operator that reads its weight"
    total = sum(site.macs for site in sites)
    return IntegerKernels(inside / total if total else 1.0, floating, dict(kernels))


def _constants(value: ir.Value | None) -> Iterator[str]:
    """Return the initializer that a value holds, as it is or unpacked."""
    while value is not None:
        if value.is_initializer():
            yield value.name or ""
            return
        node = value.producer()
        if node is None or node.op_type not in _BETWEEN:
            return
        value = node.inputs[0] if node.inputs else None


def _reading(readers: Mapping[str, Iterable[ir.Node]], weight: str) -> list[ir.Node]:
    """The nodes that read a tensor; one that the runtime has converted bears the name with something after it."""
    return [
        node for name, nodes in readers.items() if name == weight or name.startswith(f"{weight}_") for node in nodes
    ]
