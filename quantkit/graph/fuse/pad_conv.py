"""Zeros around a convolution's input are the convolution's own padding.

    Conv(Pad(x, q), pads p) = Conv(x, pads p + q)

TensorFlow's SAME is written like this wherever it is uneven. A Pad between a quantizer and a convolution would keep the
convolution out of the integer kernels.
Guard: constant zeros around height and width (or however many dimensions follow the channels), none taken away, and no
automatic padding that depends on the size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import constant, name_of, scalar


class PadConv:
    """See the module."""

    name = "pad_conv"

    def run(self, model: ir.Model) -> list[Fused]:
        """Let convolutions read past a Pad, in place; it stays for who else reads it."""
        found = []
        for conv in nodes(model, "Conv"):
            x = conv.inputs[0]
            pad = x.producer() if x is not None else None
            if pad is None or pad.op_type != "Pad" or pad.graph is not conv.graph:
                continue
            more = _zeros(pad)
            automatic = conv.attributes.get_string("auto_pad", "NOTSET")
            if not isinstance(more, str) and automatic not in ("NOTSET", "VALID"):
                more = f"{name_of(conv)} pads by itself ({automatic})"
            reason = more if isinstance(more, str) else ""
            if not isinstance(more, str):
                own = conv.attributes.get_ints("pads") or (0,) * len(more)
                conv.attributes.pop("auto_pad", None)
                conv.attributes["pads"] = ir.AttrInt64s("pads", [p + q for p, q in zip(own, more, strict=True)])
                conv.replace_input_with(0, pad.inputs[0])
            found.append(Fused(name_of(pad), self.name, not reason, reason))
        common.RemoveUnusedNodesPass()(model)
        return found


def _zeros(pad: ir.Node) -> list[int] | str:
    """How many zeros before and behind each dimension after the channels, as Conv has it; a reason where it is not so.

    Of [N, C, H, W]: (0, 0, 1, 2, 0, 0, 3, 4) -> [1, 2, 3, 4].
    """
    if pad.attributes.get_string("mode", "constant") != "constant":
        return "it pads with something else than a constant"
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    if pad.attributes.get_float("value", 0.0) or (value is not None and scalar(value) != 0):
        return "it does not pad with zeros"
    given = constant(pad.inputs[1]) if len(pad.inputs) > 1 else pad.attributes.get_ints("pads")
    if given is None:
        return "its widths are not constants"
    widths = np.asarray(given, np.int64).reshape(2, -1)
    axes = pad.inputs[3] if len(pad.inputs) > 3 else None
    if axes is not None:
        over, x = constant(axes), pad.inputs[0]
        if over is None or x is None or x.shape is None:
            return "its axes are not known"
        every = np.zeros((2, len(x.shape)), np.int64)
        every[:, over] = widths
        widths = every
    if widths[:, :2].any() or (widths < 0).any():
        return "it pads batch or channels, or takes away"
    return [int(width) for width in widths[:, 2:].reshape(-1)]
