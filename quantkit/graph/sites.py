"""What is quantized in a graph: products with a constant weight, and what each of them costs.

    Conv                 W [O, I/g, ...]   as a matrix [O, (I/g) · kernel], its inputs the patches that the kernel sees
    Gemm, MatMul         W [K, N] or [N, K]                      as a matrix [N, K]

Multiply-accumulates are counted for one sample, on the shapes that a run with real inputs has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]
OPERATORS = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True)
class Site:
    """One product.

    Args:
        name: of its node, or of its output where it has none.
        node: in the graph.
        weight: its constant, in the graph's layout.
        rows: axis of the output channels in that.
        group: of a Conv; 1 else.
    """

    name: str
    node: ir.Node
    weight: Array
    rows: int
    group: int = 1

    @property
    def input(self) -> str:
        """Name of the activation that it reads."""
        return str(self.node.inputs[0].name)  # type: ignore[union-attr]

    @property
    def output(self) -> str:
        """Name of what it computes."""
        return str(self.node.outputs[0].name)

    @property
    def is_conv(self) -> bool:
        """Whether it slides."""
        return self.node.op_type == "Conv"

    @property
    def depthwise(self) -> bool:
        """Whether each input channel has a kernel of its own."""
        return self.is_conv and self.group > 1 and self.weight.shape[1] == 1

    def matrix(self) -> Array:
        """The weight as [N, K]; of grouped convolutions, rows of one group share their inputs."""
        return np.ascontiguousarray(np.moveaxis(self.weight, self.rows, 0).reshape(self.weight.shape[self.rows], -1))

    def shaped(self, matrix: Array) -> Array:
        """A matrix [N, K] in the weight's own layout."""
        moved = np.moveaxis(self.weight, self.rows, 0).shape
        return np.ascontiguousarray(np.moveaxis(matrix.reshape(moved), 0, self.rows))

    def macs(self, shape: Sequence[int], samples: int) -> int:
        """Multiply-accumulates a sample, from the shape of its output for so many."""
        return math.prod(shape) * int(self.matrix().shape[1]) // samples


def sites(model: ir.Model) -> list[Site]:
    """The products of the main graph, in order; those inside of If, Loop and Scan stay as they are."""
    from quantkit.graph.values import constant

    found = []
    for node in model.graph:
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS or len(node.inputs) < 2:
            continue
        weight = constant(node.inputs[1])
        if weight is None or weight.dtype != np.float32 or constant(node.inputs[0]) is not None:
            continue
        if node.op_type == "MatMul" and weight.ndim != 2:
            continue
        if node.op_type == "Conv" and weight.ndim not in (3, 4):
            continue
        if node.op_type == "Gemm" and (
            node.attributes.get_int("transA", 0) == 1 or node.attributes.get_float("alpha", 1.0) != 1.0
        ):
            continue
        rows = 0
        if node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)):
            rows = 1
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            bias = constant(node.inputs[2])
            # one that is computed, or differs from row to row, has no place among the sums of integers
            if bias is None or bias.size not in (1, weight.shape[rows]) or bias.shape[-1:] not in ((), (bias.size,)):
                continue
        group = node.attributes.get_int("group", 1) if node.op_type == "Conv" else 1
        found.append(Site(node.name or str(node.outputs[0].name), node, weight, rows, group))
    return found


def patches(site: Site, x: Array, *, most: int | None = None) -> Array:
    """What the rows of a site's matrix are multiplied with.

    Args:
        x: its input: [n, C, H, W] of a two-dimensional Conv, [..., K] else.
        most: rows that are enough: of a two-dimensional Conv every second, third, ... place of both axes is taken.

    Returns:
        [groups, rows, K].
    """
    if not site.is_conv:
        return x.reshape(1, -1, x.shape[-1])
    import torch

    given = _geometry(site.node, x.shape[2:], site.weight.shape[2:])
    if len(site.weight.shape) == 3:
        x, kernel = x[:, :, None], (1, site.weight.shape[2])
    else:
        kernel = site.weight.shape[2:]
    tensor = torch.nn.functional.pad(torch.from_numpy(np.ascontiguousarray(x)), given["pads"])
    strides = given["strides"]
    if most is not None and len(site.weight.shape) == 4:
        places = math.prod(size // step for size, step in zip(tensor.shape[2:], strides, strict=True)) * len(x)
        every = max(1, math.isqrt(places // most))
        # from the middle of the first so many, or borders would weigh too much
        tensor = tensor[:, :, every // 2 * strides[0] :, every // 2 * strides[1] :]
        strides = tuple(every * step for step in strides)
    found = torch.nn.functional.unfold(tensor, kernel, dilation=given["dilations"], stride=strides)
    samples, columns, places = found.shape
    apart = found.reshape(samples, site.group, columns // site.group, places)
    result: Array = apart.permute(1, 0, 3, 2).reshape(site.group, samples * places, -1).numpy()
    return result


def _geometry(node: ir.Node, size: Sequence[int], kernel: Sequence[int]) -> Mapping[str, Any]:
    """Strides, dilations, and pads as torch's `pad` takes them; of one dimension, a first one of size 1 is added."""
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
