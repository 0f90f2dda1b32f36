"""A torch module as a float ONNX graph, its batch free.

What the exporter leaves of shapes and casts that are known is folded; convolutions and their norms stay apart, for what
is fused is to be proved, and said.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

OPSET = 21
BATCH = "batch"


def write_onnx(module: nn.Module, example: Tensor, path: Path, *, inputs: str, outputs: str) -> None:
    """Writes the module in evaluation mode, as one file, in float32, operator set 21.

    Args:
        module: of one tensor to one tensor.
        example: [n, ...], n at least 2; all but n is fixed in the graph.
        path: to write.
        inputs, outputs: names of the graph's input and output.
    """
    import onnx_ir
    import torch
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    training = module.training
    module.eval()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[inputs],
                output_names=[outputs],
                dynamic_shapes=({0: torch.export.Dim(BATCH)},),
                optimize=False,
                verbose=False,
            )
    finally:
        module.train(training)
    assert program is not None
    graph: onnx_ir.Model = program.model
    fold_constants_ir(graph)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.NameFixPass(),
    ):
        step(graph)
    onnx_ir.save(graph, path)
