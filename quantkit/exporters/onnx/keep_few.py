"""Logits of a few positions only: an input of a decoder's graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def keep_few(model: ir.Model, *, optional: bool) -> None:
    """Add an input `logits_to_keep`, as transformers has it: logits of the last so many positions; 0 is all.

    A prompt's logits are wanted for its last token only, and the head is a large part of a small model.

    Args:
        model: of a decoder, changed in place; left as it is where no product makes its logits.
        optional: whether it may be left out, and is 0 then. TensorRT has no inputs with a value of their own.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")
    head, after = logits.producer(), [logits]
    # past soft caps and scalings, back to the product
    while head is not None and head.op_type not in ("MatMul", "FusedMatMul", "MatMulNBits"):
        inner = [x for x in head.inputs if x is not None and not x.is_initializer() and x.producer() is not None]
        after += inner
        head = inner[0].producer() if len(inner) == 1 else None
    if head is None:
        return
    keep = ir.Value(name="logits_to_keep", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(keep)
    if optional:
        keep.const_value = ir.tensor(np.zeros(1, np.int64), name="logits_to_keep")
        graph.register_initializer(keep)
    constants = {"keep/end": np.array([2**62], np.int64), "keep/axis": np.array([1], np.int64)}
    values = []
    for name, array in constants.items():
        value = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        value.const_value = ir.tensor(array, name=name)
        graph.register_initializer(value)
        values.append(value)
    start, kept = ir.Value(name="keep/start"), ir.Value(name="keep/hidden")
    negative = ir.Node("", "Neg", [keep], outputs=[start])
    slices = ir.Node("", "Slice", [head.inputs[0], start, *values], outputs=[kept])
    graph.insert_before(head, [negative, slices])
    head.replace_input_with(0, kept)
    for value in after:
        if value.shape is not None:
            value.shape = ir.Shape([value.shape[0], "kept_length", *list(value.shape)[2:]])
