"""What a fusion is, and what it says about each place it looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir


@dataclass(frozen=True)
class Fused:
    """One place.

    Args:
        node: its name in the graph, that of its output where it has none.
        fusion: name of the fusion.
        done: whether it was fused.
        reason: why not.
    """

    node: str
    fusion: str
    done: bool
    reason: str = ""


class Fusion(Protocol):
    """One rewrite that leaves the outputs as they are."""

    name: str

    def run(self, model: ir.Model) -> list[Fused]:
        """Change the model in place; say where, and where not and why."""
        ...


def nodes(model: ir.Model, *operators: str) -> Iterator[ir.Node]:
    """Nodes of ONNX's own operators, those of subgraphs (If, Loop) included, in order.

    A list is taken first, so that nodes may be removed on the way; one that is gone is left out.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.graph is not None and node.domain in ("", "ai.onnx") and node.op_type in operators:
            yield node
