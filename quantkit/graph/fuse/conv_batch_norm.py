"""Folding of channel-wise scales and shifts into the product in front of them.

With y = W ∗ x + b a convolution (or a Gemm), and s and t one number per output channel:

    s ⊙ (W ∗ x + b) + t = (s ⊙ W) ∗ x + (s ⊙ b + t)

    BatchNormalization   s = γ / √(σ² + ε),  t = β − s ⊙ μ      (Ioffe and Szegedy 2015, arXiv 1502.03167, eq. for
    Mul, Div, Add, Sub   by a constant of one number a channel   inference; Jacob et al. 2018, arXiv 1712.05877, § 3.2)

Exact in real numbers for any padding, since padded zeros are on the input side of W. Computed in float64. A node that
only uses y among other things (the x + 3 of a hard-swish) is not listed. Guard: all parameters are constants and no
graph inputs, no other node reads y, no training mode. A weight that another node shares stays unchanged for that node.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import (
    Array,
    bypass,
    constant,
    name_of,
    other_readers,
    per_channel,
    set_input,
    why_not_constant,
)

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm")
_FOLLOWERS = ("BatchNormalization", "Mul", "Div", "Add", "Sub")


class ConvBatchNorm:
    """Folds batch normalization and channel-wise constants, as described in the module."""

    name = "conv_batch_norm"

    def run(self, model: ir.Model) -> list[Fused]:
        """Fold in place and in order, so that chains fold whole; list only nodes behind a product."""
        listed = []
        for node in nodes(model, *_FOLLOWERS):
            product = _product(node)
            if product is not None:
                reason = other_readers(product.outputs[0], (node,))
                if reason and node.op_type != "BatchNormalization":
                    continue
                reason = reason or _fold(product, node)
            elif node.op_type == "BatchNormalization":
                reason = "no convolution computes its input"
            else:
                continue
            listed.append(Fused(name_of(node), self.name, not reason, reason))
        return listed


def _product(node: ir.Node) -> ir.Node | None:
    """Return the product in front of a follower, or None."""
    sides = node.inputs[:2] if node.op_type in ("Mul", "Add") else node.inputs[:1]
    for place, value in enumerate(sides):
        producer = None if value is None else value.producer()
        if producer is None or producer.graph is not node.graph or producer.op_type not in _PRODUCTS:
            continue
        if node.op_type == "BatchNormalization" or constant(node.inputs[1 - place]) is not None:
            return producer
    return None


def _fold(product: ir.Node, node: ir.Node) -> str:
    """Fold a follower into its product; return the reason if that is refused."""
    weight, bias = product.inputs[1], product.inputs[2] if len(product.inputs) > 2 else None
    for value in (weight, bias):
        if value is not None and constant(value) is None:
            return why_not_constant(value)
    W = constant(weight)
    assert W is not None
    channels = _channels(product, W)
    b = constant(bias)
    b = np.zeros(channels) if b is None else per_channel(b, 2, channels) if product.op_type == "Gemm" else b
    if b is None:
        return f"the bias of {name_of(product)} does not have one number per channel"
    affine = _affine(node, product.outputs[0], 2 if product.op_type == "Gemm" else W.ndim, channels)
    if isinstance(affine, str):
        return affine
    scale, shift = affine
    if product.op_type == "Gemm":
        b = b * product.attributes.get_float("beta", 1.0)
    reason = bypass(node.outputs[0], product.outputs[0])
    if reason:
        return reason
    set_input(product, 1, _scaled(product, W, scale).astype(W.dtype), name=f"{product.outputs[0].name}.weight")
    set_input(
        product, 2, (scale * b.astype(np.float64) + shift).astype(W.dtype), name=f"{product.outputs[0].name}.bias"
    )
    product.attributes.pop("beta", None)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return ""


def _affine(node: ir.Node, y: ir.Value, rank: int, channels: int) -> tuple[Array, Array] | str:
    """Return s and t [C] of a follower, or the reason why it has none."""
    if node.op_type == "BatchNormalization":
        if node.attributes.get_int("training_mode", 0) or any(output.uses() for output in node.outputs[1:]):
            return "in training mode"
        parameters = [constant(value) for value in node.inputs[1:5]]
        if any(values is None for values in parameters):
            return why_not_constant(node.inputs[1 + next(i for i, values in enumerate(parameters) if values is None)])
        gamma, beta, mean, variance = (np.asarray(values, np.float64) for values in parameters)
        scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        return scale, beta - scale * mean
    other = constant(next(value for value in node.inputs if value is not y))
    value = None if other is None else per_channel(np.asarray(other, np.float64), rank, channels)
    if value is None:
        return "its constant does not have one number per channel"
    ones, zeros = np.ones(channels), np.zeros(channels)
    return {"Mul": (value, zeros), "Div": (1 / value, zeros), "Add": (ones, value), "Sub": (ones, -value)}[node.op_type]


def _channels(product: ir.Node, W: Array) -> int:
    """Return the number of output channels: Conv [O, I/g, ...], ConvTranspose [I, O/g, ...], Gemm [K, N] or [N, K]."""
    if product.op_type == "ConvTranspose":
        return int(W.shape[1]) * product.attributes.get_int("group", 1)
    return int(W.shape[_axis(product)])


def _axis(product: ir.Node) -> int:
    return 1 if product.op_type == "Gemm" and not product.attributes.get_int("transB", 0) else 0


def _scaled(product: ir.Node, W: Array, scale: Array) -> Array:
    """Return s ⊙ W in float64."""
    if product.op_type == "ConvTranspose":
        groups = product.attributes.get_int("group", 1)
        apart = W.reshape(groups, W.shape[0] // groups, *W.shape[1:]).astype(np.float64)
        apart *= scale.reshape(groups, 1, W.shape[1], *(1,) * (W.ndim - 2))
        return apart.reshape(W.shape)
    shape = [1] * W.ndim
    shape[_axis(product)] = -1
    return W.astype(np.float64) * scale.reshape(shape)
