"""Export of a torch module as a float ONNX graph, with a free batch.

Known shapes and casts that the exporter leaves are folded; convolutions and their norms stay separate, since every
fusion must be proved and recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

OPSET = 21
BATCH = "batch"
# metadata key of torch with the source lines of a node
_TRACE = "pkg.torch.onnx.stack_trace"


def write_onnx(
    module: nn.Module,
    examples: Sequence[Tensor] | Mapping[str, Tensor],
    path: Path,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> None:
    """Write the module in evaluation mode, as one file, in operator set 21; raises the errors of torch's exporter.

    Args:
        examples: its arguments, by position or by name: [n, ...] each, n at least 2; all sizes but n are fixed in the
            graph.
        inputs: names of the graph's inputs; None for those of the arguments.
        outputs: names of the graph's outputs; None for the keys of its result, else `output`, or `output_0`, ...
    """
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    named = dict(examples) if isinstance(examples, Mapping) else {}
    positional = () if isinstance(examples, Mapping) else tuple(examples)
    free = {0: torch.export.Dim(BATCH)}
    training = module.training
    module.eval()
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                positional,
                kwargs=named,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(inputs or named or _parameters(module, len(positional))),
                output_names=list(outputs or _returned(module(*positional, **named))),
                dynamic_shapes=dict.fromkeys(named, free) if named else (free,) * len(positional),
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
    for node in graph.graph.all_nodes():  # the file's hash is the model's identity: drop folders and source lines
        node.metadata_props.pop(_TRACE, None)
    onnx_ir.save(graph, path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's warnings about missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _parameters(module: nn.Module, count: int) -> list[str]:
    """Return the names of the first arguments of `forward`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return names[:count] if len(names) >= count else [f"input_{number}" for number in range(count)]


def _returned(result: Any) -> list[str]:
    """Return names for a module's outputs."""
    from torch.utils import _pytree

    if isinstance(result, Mapping):
        return [str(name) for name in result]
    count = len(_pytree.tree_leaves(result))
    return ["output"] if count == 1 else [f"output_{number}" for number in range(count)]
