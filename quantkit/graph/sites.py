"""Products of a graph that can be quantized: those with a constant weight, and their cost.

    Conv                 W [O, I/g, ...]   as a matrix [O, (I/g) · kernel], its inputs the patches under the kernel
    Gemm, MatMul         W [K, N] or [N, K]                      as a matrix [N, K]

Multiply-accumulates are counted for one sample, on the shapes of a run with real inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.graph.values import constant, fixed, free, name_of, values_of

Array = NDArray[Any]
OPERATORS = ("Conv", "Gemm", "MatMul")
# other operators with matrix products
_OTHERS = ("ConvTranspose", "DeformConv", "Einsum", "LSTM", "GRU", "RNN")
_ONNX = ("", "ai.onnx")
# reason for weights with nothing to quantize: the output is constant and has no range
ZEROS = "its weight is all zeros"


@dataclass(frozen=True)
class Site:
    """One product.

    Args:
        name: name of its node, or of its output if the node has none.
        node: the node.
        weight: constant weight in the graph's layout.
        rows: axis of the weight with the output channels.
        group: groups of a Conv, else 1.
        stem: prefix for the names of its new constants: `STEM.codes`, `STEM.scale`, ... It comes from the output, since
            weights may be shared; nothing else in the graph has this prefix.
    """

    name: str
    node: ir.Node
    weight: Array
    rows: int
    group: int = 1
    stem: str = ""

    @property
    def input(self) -> str:
        """Name of its input activation."""
        return str(self.node.inputs[0].name)  # type: ignore[union-attr]

    @property
    def output(self) -> str:
        """Name of its output."""
        return str(self.node.outputs[0].name)

    @property
    def is_conv(self) -> bool:
        """True for a convolution."""
        return self.node.op_type == "Conv"

    @property
    def depthwise(self) -> bool:
        """True if each input channel has a kernel of its own."""
        return self.is_conv and self.group > 1 and self.weight.shape[1] == 1

    def matrix(self) -> Array:
        """Return the weight as [N, K]; in a grouped convolution, rows of one group share their inputs."""
        return np.ascontiguousarray(np.moveaxis(self.weight, self.rows, 0).reshape(self.weight.shape[self.rows], -1))

    def shaped(self, matrix: Array) -> Array:
        """Return a matrix [N, K] in the weight's own layout."""
        moved = np.moveaxis(self.weight, self.rows, 0).shape
        return np.ascontiguousarray(np.moveaxis(matrix.reshape(moved), 0, self.rows))

    def macs(self, shape: Sequence[int], samples: int) -> int:
        """Return the multiply-accumulates per sample, from the shape of the output for a number of samples."""
        return math.prod(shape) * int(self.matrix().shape[1]) // samples


@dataclass(frozen=True)
class FloatWeight:
    """A weight that stays float.

    Args:
        name: name of the product that reads it.
        elements: number of elements.
        reason: reason; "" for a table of embeddings.
    """

    name: str
    elements: int
    reason: str


def sites(model: ir.Model) -> list[Site]:
    """Return the products of the main graph that can be quantized, in order, with unique names."""
    products: list[Site] = []
    values = values_of(model.graph)
    names = {str(value.name) for value in values}
    computed = {value.name for value in values if not value.is_initializer()}
    taken: set[str | None] = set()
    for node in model.graph:
        if not _multiplies(node) or why_float(node):
            continue
        weight = fixed(node.inputs[1])
        assert weight is not None
        group = node.attributes.get_int("group", 1) if node.op_type == "Conv" else 1
        output = str(node.outputs[0].name)
        name = free(output if not node.name or node.name in taken else node.name, taken)
        taken.add(name)
        stem = f"{output}.weight"
        while stem in computed or any(other.startswith((f"{stem}.", f"{stem}/")) for other in names):
            output += "_"
            stem = f"{output}.weight"
        names.add(f"{stem}.")
        products.append(Site(name, node, weight, _rows(node), group, stem))
    return products


def left_in_floats(model: ir.Model) -> list[FloatWeight]:
    """Return the weights of no site, including those of subgraphs."""
    left = []
    for node in model.graph.all_nodes():
        table = node.op_type == "Gather" and node.domain in _ONNX
        reason = why_float(node) if _multiplies(node) else ""
        if not reason and node.graph is not model.graph and _multiplies(node):
            reason = "it is inside of an If, Loop or Scan, where calibration cannot observe it"
        if not (reason or table):
            continue
        for value in node.inputs[:1] if table else node.inputs[:2] if node.op_type in OPERATORS else node.inputs:
            weight = fixed(value)
            if weight is not None and weight.dtype.kind == "f" and sum(size > 1 for size in weight.shape) > 1:
                left.append(FloatWeight(name_of(node), weight.size, reason))
    return left


def _multiplies(node: ir.Node) -> bool:
    """Tell whether an operator multiplies by matrices; an operator outside of ONNX may."""
    return node.domain not in _ONNX or node.op_type in (*OPERATORS, *_OTHERS)


def why_float(node: ir.Node) -> str:
    """Return the reason why a product cannot be quantized; "" if it can."""
    if node.domain not in _ONNX or node.op_type not in OPERATORS:
        return f"{node.op_type} has no integer form"
    weight = fixed(node.inputs[1]) if len(node.inputs) > 1 else None
    if fixed(node.inputs[0]) is not None:
        return "its weight is the left operand, which has no scale per channel"
    if weight is None:
        return "it has no constant weight"
    if weight.dtype != np.float32:
        return f"its weight is {weight.dtype}"
    if not weight.any():
        return ZEROS
    if node.op_type == "MatMul" and weight.ndim != 2:
        return "its weight is a stack of matrices, which would share their scales"
    if node.op_type == "Conv" and weight.ndim not in (3, 4):
        return f"a convolution over {weight.ndim - 2} axes"
    if node.op_type == "Gemm" and (
        node.attributes.get_int("transA", 0) == 1 or node.attributes.get_float("alpha", 1.0) != 1.0
    ):
        return "its input is transposed, or scaled"
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        values, rows = constant(bias), weight.shape[_rows(node)]
        # only a constant bias with one number per channel can be added to sums of integers
        if values is None or values.size not in (1, rows) or values.shape[-1:] not in ((), (values.size,)):
            return "its bias is computed, or does not have one number per channel"
    return ""


def _rows(node: ir.Node) -> int:
    """Return the axis of a weight with the output channels."""
    turned = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return 0 if node.op_type == "Conv" or turned else 1


def patches(site: Site, x: Array, *, most: int | None = None) -> Array:
    """Return the inputs of a site's matrix product, [groups, rows, K].

    Args:
        site: the product.
        x: its input: [n, C, H, W] for a two-dimensional Conv, [..., K] for a matrix product.
        most: number of rows that is enough; a two-dimensional Conv then takes every n-th place along both axes.
    """
    if not site.is_conv:
        return x.reshape(1, -1, x.shape[-1])
    import torch

    geometry = _geometry(site.node, x.shape[2:], site.weight.shape[2:])
    if len(site.weight.shape) == 3:
        x, kernel = x[:, :, None], (1, site.weight.shape[2])
    else:
        kernel = site.weight.shape[2:]
    tensor = torch.nn.functional.pad(torch.from_numpy(np.ascontiguousarray(x)), geometry["pads"])
    strides = geometry["strides"]
    if most is not None and len(site.weight.shape) == 4:
        places = math.prod(size // step for size, step in zip(tensor.shape[2:], strides, strict=True)) * len(x)
        every = max(1, math.isqrt(places // most))
        # from the middle of the first so many, or borders would weigh too much
        tensor = tensor[:, :, every // 2 * strides[0] :, every // 2 * strides[1] :]
        strides = tuple(every * step for step in strides)
    unfolded = torch.nn.functional.unfold(tensor, kernel, dilation=geometry["dilations"], stride=strides)
    samples, columns, places = unfolded.shape
    apart = unfolded.reshape(samples, site.group, columns // site.group, places)
    result: Array = apart.permute(1, 0, 3, 2).reshape(site.group, samples * places, -1).numpy()
    return result


def _geometry(node: ir.Node, size: Sequence[int], kernel: Sequence[int]) -> Mapping[str, Any]:
    """Return strides, dilations, and pads as torch's `pad` takes them; one dimension gets a leading one of size 1."""
    dims = len(kernel)
    strides = list(node.attributes.get_ints("strides", [1] * dims))
    dilations = list(node.attributes.get_ints("dilations", [1] * dims))
    pads = list(node.attributes.get_ints("pads", [0] * 2 * dims))
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for length, step, width, apart in zip(size, strides, kernel, dilations, strict=True):
            whole = max((-(-length // step) - 1) * step + (width - 1) * apart + 1 - length, 0)
            small, large = whole // 2, whole - whole // 2
            begin.append(small if auto == "SAME_UPPER" else large)
            end.append(large if auto == "SAME_UPPER" else small)
        pads = begin + end
    if dims == 1:
        strides, dilations, pads = [1, *strides], [1, *dilations], [0, pads[0], 0, pads[1]]
        dims = 2
    flat = [side for axis in reversed(range(dims)) for side in (pads[axis], pads[axis + dims])]
    return {"strides": tuple(strides), "dilations": tuple(dilations), "pads": flat}
