"""Base of the rewrite rules, which also report the places that they refused; and the proof of a fusion.

The proof compares the outputs of two graphs in ONNX Runtime, both run without optimization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRule, RewriteRuleClassBase, RewriteRuleSet

from quantkit.graph.outputs import steady
from quantkit.graph.run import Runner
from quantkit.graph.values import name_of, other_readers


class Rule(RewriteRuleClassBase):  # type: ignore[misc]
    """Rewrite rule of onnxscript that reports why it refused a place.

    `pattern` and `rewrite` are onnxscript's. A place matches even if another node reads one of its inner values, so
    that the
    refusal can be reported.
    """

    def __init__(self, fusion: str) -> None:
        super().__init__(fusion, remove_nodes=False)
        self.places: dict[str, Fused] = {}

    def refuses(self, *context: Any, **bound: Any) -> str | None:
        """Return "" to rewrite, a reason to refuse, or None if the place is not one for this rule.

        Args:
            context: onnxscript's match context.
            bound: the pattern's variables.
        """
        raise NotImplementedError

    def check(self, context: MatchContext, **bound: ir.Value) -> MatchResult:
        """Record the place, and accept or refuse the match."""
        reason: str | None = self.refuses(context, **bound)
        inside = [value for node in context.nodes for value in node.outputs if value not in context.output_values]
        if reason == "":
            reason = next(filter(None, (other_readers(value, context.nodes) for value in inside)), "")
        if reason is not None:
            name = name_of(context.root)
            self.places[name] = Fused(name, str(self.name), not reason, reason)
        return MatchResult() if reason == "" else MatchResult().fail(reason or "")


def apply(model: ir.Model, rules: Sequence[Rule]) -> list[Fused]:
    """Apply rules to the whole model; operands of Add and Mul match in either order."""
    plain = [RewriteRule(rule.pattern, rule.rewrite, rule.check, name=rule.name, remove_nodes=False) for rule in rules]
    RewriteRuleSet(plain, commute=True).apply_to_model(model)
    places: dict[str, Fused] = {}
    for rule in rules:
        for name, place in rule.places.items():
            if name not in places or place.done:
                places[name] = place
    return list(places.values())


def opset(model: ir.Model) -> int:
    """Return the version of the standard ONNX operators."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


def keep_name(of: ir.Value) -> str | None:
    """Return the name of the node that computes a value, for the node that replaces it."""
    node: Any = of.producer()
    return None if node is None else node.name


@dataclass(frozen=True)
class Fused:
    """One place, fused or refused.

    Args:
        node: name of the node, or of its first output if it has no name.
        fusion: name of the fusion.
        done: True if it was fused.
        reason: reason for the refusal.
    """

    node: str
    fusion: str
    done: bool
    reason: str = ""


class Fusion(Protocol):
    """One rewrite that does not change the outputs."""

    name: str

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite the model in place; list every place, with the reason where nothing was done."""
        ...


def nodes(model: ir.Model, *operators: str) -> Iterator[ir.Node]:
    """Yield nodes with one of these standard ONNX operators, in order, including those of subgraphs (If, Loop).

    Nodes may be removed while iterating; a removed node is skipped.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.graph is not None and node.domain in ("", "ai.onnx") and node.op_type in operators:
            yield node


Feeds = Sequence[Mapping[str, NDArray[Any]]]
# float32 sums in another order stay below this; a wrong factor, axis or bias is orders of magnitude above
LIMIT = 1e-4
# upper bound of the limit, even for graphs that amplify rounding
_MOST = 1e-3
_ROUNDINGS = 4
_TINY = float(np.finfo(np.float32).tiny)


def outputs(model: ir.Model, feeds: Feeds, inner: Sequence[str] = ()) -> list[list[Any]]:
    """Run a graph without the runtime's own optimizations.

    Args:
        model: the graph.
        feeds: inputs.
        inner: names of inner tensors to return too.

    Returns:
        For each feed, the values that are safe to compare (`graph.outputs.steady`), then the `inner` tensors.

    Raises:
        InputError: `onnx-unrunnable`.
    """
    names = [*steady(model), *inner]
    runner = Runner(model, names, threads=1, optimised=False)
    return [[values[name] for name in names] for values in map(runner, feeds)]


def limit(model: ir.Model, feeds: Feeds, expected: list[list[Any]]) -> float:
    """Return the allowed relative difference of outputs: `LIMIT`, or four times the effect of one bit in the inputs, if
    larger.

    The second applies where outputs are almost zero, as for a detector that detects nothing on these feeds.
    """
    nudged = [
        {name: np.nextafter(x, np.inf, dtype=x.dtype) if x.dtype.kind == "f" else x for name, x in feed.items()}
        for feed in feeds
    ]
    moved = difference(expected, outputs(model, nudged))
    return min(max(LIMIT, _ROUNDINGS * moved), _MOST) if np.isfinite(moved) else LIMIT


def difference(expected: Any, actual: Any) -> float:
    """Return the largest difference of any output, relative to its largest magnitude over all feeds.

    Integers, booleans, infinities and NaN must match exactly, else the difference is infinite.
    """
    per_output = zip(zip(*expected, strict=True), zip(*actual, strict=True), strict=True)
    return max((_apart(before, after) for before, after in per_output), default=0.0)


def _apart(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    largest, scale = 0.0, _TINY
    for before, after in zip(expected, actual, strict=True):
        if not isinstance(before, np.ndarray) or before.dtype.kind != "f":
            if not _same(before, after):
                return float("inf")
            continue
        if before.shape != after.shape or before.dtype != after.dtype:
            return float("inf")
        finite = np.isfinite(before)
        if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
            return float("inf")
        one, other = before[finite].astype(np.float64), after[finite].astype(np.float64)
        if not np.isfinite(other).all():
            return float("inf")
        largest = max(largest, float(np.abs(one - other).max(initial=0.0)))
        scale = max(scale, float(np.abs(one).max(initial=0.0)))
    return largest / scale


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray):
        return isinstance(after, np.ndarray) and before.dtype == after.dtype and np.array_equal(before, after)
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)
