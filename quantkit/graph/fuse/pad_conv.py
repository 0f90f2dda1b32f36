"""Folding of zero padding into a convolution, and of a mean into a global pooling.

    Conv(Pad(x, q), pads p) = Conv(x, pads p + q)

TensorFlow exports SAME this way where it is uneven. A Pad between a quantizer and a convolution would keep the
convolution out of the integer kernels.
Guard: constant zeros around the dimensions after the channels, no negative padding, no automatic padding.

    ReduceMean(x [N, C, H, W], axes [2, 3]) = GlobalAveragePool(x), then a Squeeze of H and W unless they are kept

ONNX Runtime has an integer kernel for a quantized pooling, but none for a quantized mean.
Guard: the axes are constants and all dimensions after the channels, of which there are two or more.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import constant, initializer, name_of, scalar


class PadConv:
    """Folds zero padding into convolutions, as described in the module."""

    name = "pad_conv"

    def run(self, model: ir.Model) -> list[Fused]:
        """Let convolutions read past a Pad, in place; the Pad stays if other nodes read it."""
        listed = []
        for conv in nodes(model, "Conv"):
            x = conv.inputs[0]
            pad = x.producer() if x is not None else None
            if pad is None or pad.op_type != "Pad" or pad.graph is not conv.graph:
                continue
            more, reason = _zeros(pad)
            automatic = conv.attributes.get_string("auto_pad", "NOTSET")
            if not reason and automatic not in ("NOTSET", "VALID"):
                reason = f"{name_of(conv)} pads by itself ({automatic})"
            if not reason:
                own = conv.attributes.get_ints("pads") or (0,) * len(more)
                conv.attributes.pop("auto_pad", None)
                conv.attributes["pads"] = ir.AttrInt64s("pads", [p + q for p, q in zip(own, more, strict=True)])
                conv.replace_input_with(0, pad.inputs[0])
            listed.append(Fused(name_of(pad), self.name, not reason, reason))
        common.RemoveUnusedNodesPass()(model)
        return listed


def _zeros(pad: ir.Node) -> tuple[list[int], str]:
    """Return the zeros before and behind each dimension after the channels, or a reason to refuse."""
    if pad.attributes.get_string("mode", "constant") != "constant":
        return [], "its padding is not constant"
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    if pad.attributes.get_float("value", 0.0) or (value is not None and scalar(value) != 0):
        return [], "it does not pad with zeros"
    lengths = constant(pad.inputs[1]) if len(pad.inputs) > 1 else pad.attributes.get_ints("pads")
    if lengths is None:
        return [], "its widths are not constants"
    widths = np.asarray(lengths, np.int64).reshape(2, -1)
    axes = pad.inputs[3] if len(pad.inputs) > 3 else None
    if axes is not None:
        over, x = constant(axes), pad.inputs[0]
        if over is None or x is None or x.shape is None:
            return [], "its axes are not known"
        every = np.zeros((2, len(x.shape)), np.int64)
        every[:, over] = widths
        widths = every
    if widths[:, :2].any() or (widths < 0).any():
        return [], "it pads the batch or the channels, or its padding is negative"
    return [int(width) for width in widths[:, 2:].reshape(-1)], ""


# first opset with the axes of a Squeeze as an input
_OPSET = 13


class MeanPool:
    """Replaces a mean over all positions by a global pooling, as described in the module."""

    name = "mean_pool"

    def run(self, model: ir.Model) -> list[Fused]:
        """Replace in place; other means are not listed."""
        listed = []
        for node in nodes(model, "ReduceMean"):
            x = node.inputs[0]
            rank = len(x.shape) if x is not None and x.shape is not None else 0
            axes = constant(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get_ints("axes")
            if axes is None or rank < 4 or sorted(int(axis) % rank for axis in axes) != list(range(2, rank)):
                continue
            _replace(node, rank, _rule.opset(model))
            listed.append(Fused(name_of(node), self.name, True))
        return listed


def _replace(node: ir.Node, rank: int, opset: int) -> None:
    graph, old = node.graph, node.outputs[0]
    assert graph is not None
    pool = ir.node("GlobalAveragePool", node.inputs[:1], name=node.name)
    replacement = [pool]
    if not node.attributes.get_int("keepdims", 1):
        pool.outputs[0].name = f"{old.name}.kept"
        pool.outputs[0].type = old.type
        axes = np.arange(2, rank)
        if opset < _OPSET:
            replacement.append(ir.node("Squeeze", [pool.outputs[0]], attributes={"axes": axes.tolist()}))
        else:
            where = initializer(graph, axes, name=f"{old.name}.axes")
            replacement.append(ir.node("Squeeze", [pool.outputs[0], where]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], replacement, [old], [replacement[-1].outputs[0]])
