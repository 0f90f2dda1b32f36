"""onnxscript's rewrite rules, with a word about every place that looked right and was left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRule, RewriteRuleClassBase, RewriteRuleSet

from quantkit.graph.values import name_of, other_readers


class Rule(RewriteRuleClassBase):  # type: ignore[misc]
    """`pattern` and `rewrite` are onnxscript's; `refuses` says why a place that has the pattern's form is left.

    The form is matched wherever it is, also where something else reads a value inside of it, so that this can be said.
    """

    def __init__(self, fusion: str) -> None:
        super().__init__(fusion, remove_nodes=False)
        self.places: dict[str, Fused] = {}

    def refuses(self, *context: Any, **bound: Any) -> str | None:
        """Of the context and the pattern's variables: "" to rewrite, a reason not to, None if this is no such place."""
        raise NotImplementedError

    def check(self, context: MatchContext, **bound: ir.Value) -> MatchResult:
        """What onnxscript asks."""
        reason: str | None = self.refuses(context, **bound)
        inside = [each for node in context.nodes for each in node.outputs if each not in context.output_values]
        if reason == "":
            reason = next(filter(None, (other_readers(each, context.nodes) for each in inside)), "")
        if reason is not None:
            name = name_of(context.root)
            self.places[name] = Fused(name, str(self.name), not reason, reason)
        return MatchResult() if reason == "" else MatchResult().fail(reason or "")


def apply(model: ir.Model, rules: Sequence[Rule]) -> list[Fused]:
    """Apply rules over the model, operands of Add and Mul in either order."""
    plain = [RewriteRule(rule.pattern, rule.rewrite, rule.check, name=rule.name, remove_nodes=False) for rule in rules]
    RewriteRuleSet(plain, commute=True).apply_to_model(model)
    places: dict[str, Fused] = {}
    for rule in rules:
        for name, place in rule.places.items():
            if name not in places or place.done:
                places[name] = place
    return list(places.values())


def opset(model: ir.Model) -> int:
    """Version of ONNX's own operators."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


def keep_name(of: ir.Value) -> str | None:
    """The name for the node that takes the place of the one that computes `of`."""
    node: Any = of.producer()
    return None if node is None else node.name


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
