"""onnxscript's rewrite rules, with a word about every place that looked right and was left; and what proves a fusion:
the outputs of a graph in ONNX Runtime as it stands, and how far two sets of them are apart."""

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
        """Return what onnxscript asks."""
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
    """Return the name for the node that takes the place of the one that computes `of`."""
    node: Any = of.producer()
    return None if node is None else node.name


@dataclass(frozen=True)
class Fused:
    """One place, by the name of its node, or of its output where it has none: whether it was fused, or why not."""

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


Feeds = Sequence[Mapping[str, NDArray[Any]]]
# of float32 sums in another order; a wrong factor, axis or bias is orders of magnitude beyond
LIMIT = 1e-4
# what is never let pass, however much rounding matters to a graph
_MOST = 1e-3
_ROUNDINGS = 4
_TINY = float(np.finfo(np.float32).tiny)


def outputs(model: ir.Model, feeds: Feeds, inner: Sequence[str] = ()) -> list[list[Any]]:
    """Run a graph with the runtime's own optimisations off.

    Returns, of each feed, what the graph is compared with itself by (`graph.outputs.steady`), then the `inner` tensors.

    Raises:
        InputError: `onnx-unrunnable`.
    """
    names = [*steady(model), *inner]
    runner = Runner(model, names, threads=1, optimised=False)
    return [[found[name] for name in names] for found in map(runner, feeds)]


def limit(model: ir.Model, feeds: Feeds, expected: list[list[Any]]) -> float:
    """How far outputs may move: `LIMIT`, or four times what the last bit of the inputs moves them, if that is more.

    The second is so where outputs are all but zero on these feeds, as those of a detector that finds nothing.
    """
    nudged = [
        {name: np.nextafter(x, np.inf, dtype=x.dtype) if x.dtype.kind == "f" else x for name, x in feed.items()}
        for feed in feeds
    ]
    moved = difference(expected, outputs(model, nudged))
    return min(max(LIMIT, _ROUNDINGS * moved), _MOST) if np.isfinite(moved) else LIMIT


def difference(expected: Any, found: Any) -> float:
    """Largest difference of any output, relative to that output's largest magnitude over all feeds.

    Whole numbers and truth values have to be equal, and so do infinities and NaN in their places: else infinity.
    """
    per_output = zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True)
    return max((_apart(before, after) for before, after in per_output), default=0.0)


def _apart(expected: Sequence[Any], found: Sequence[Any]) -> float:
    largest, scale = 0.0, _TINY
    for before, after in zip(expected, found, strict=True):
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
