"""Mixed precision of a graph: as many products kept in floats as the gates need (`passes/mixed.py`).

    each product alone -> rank -> 0, 1, 2, 4, ... kept, until the gates are met -> halved between the last two

What is taken meets the gates, and one fewer does not; fewer still are not all tried.

Alone, a product has its codes of the whole graph, and the bias that it would have had without the others. Points are
solved again: each weight and each bias makes up for what the products before it have lost, and nothing is lost in one
that is kept. All of it is measured on the `tune` split, which calibrates nothing and scores nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import Decision
from quantkit.measurement.accuracy.harm import Alone, MixedPoint, MixedSearch
from quantkit.measurement.rows import Row
from quantkit.model.sizes.assigned import MIXED
from quantkit.passes import NOTE, decision
from quantkit.passes.mixed import Mixed
from quantkit.pipeline.gates import judge, measured
from quantkit.pipeline.graphs.answers import agreement, answers, classes_of, kinds_of
from quantkit.pipeline.graphs.quantized import QuantizedGraph, Solved, stem
from quantkit.pipeline.progress import Progress
from quantkit.report.kit import words

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.graph.pairs.qdq import Codes

Array = NDArray[Any]
NAME = Mixed.name
# points beside the first that are scored where no gate asks for any, so that there is a curve
_CURVE = (1, 2, 4)


@dataclass(frozen=True)
class Mixture:
    """What was found.

    Args:
        solved: the products that are quantized; the others stay in floats.
        mixed: the search, for the page.
        decisions: why each is kept.
    """

    solved: Solved
    mixed: MixedSearch
    decisions: list[Decision]


@dataclass(frozen=True)
class _Harm:
    """How a row is told as harm: lower is better, 0 is none."""

    what: str
    of: Callable[[float], float]


# of the gates that a choice can rest on
_HARMS = {
    "agreement_min": _Harm("disagreement, share of the samples", lambda value: 1 - value),
    "top1_drop_max": _Harm("top-1 lost, points", lambda value: -100 * value),
    "kl_max": _Harm("KL, nats a sample", lambda value: value),
    "cosine_min": _Harm("1 − cosine", lambda value: 1 - value),
}
_DEFAULT = {True: "kl_max", False: "cosine_min"}


def mix(quantized: QuantizedGraph, held: InputSet, settings: Any, progress: Progress) -> Mixture:
    """Search.

    Args:
        quantized: with codes for every product. What the search has measured and solved stands in its steps.
        held: the samples to measure on.
    """
    return _Search(quantized, held, settings, progress).run()


class _Search:
    def __init__(self, quantized: QuantizedGraph, held: InputSet, settings: Any, progress: Progress) -> None:
        self.quantized, self.progress = quantized, progress
        self.recipe = quantized.prepared.request.recipe
        self.expected = answers(quantized.prepared.graph.model, held)
        self.kinds = kinds_of(quantized.prepared.graph.model)
        self.classes = bool(classes_of(self.expected, held, self.kinds))
        self.first = held.first_of(settings.alone)
        self.samples, self.distinct = held, len(held)
        if self.classes:
            self.samples = held.views(settings.views, self.recipe.seed)
            self.expected = answers(quantized.prepared.graph.model, self.samples)
        self.steps: dict[int, MixedPoint] = {}
        # of all quantized, and of the point that would be taken if the search ended now
        self.solved: dict[int, Solved] = {0: quantized.found}
        self.met: dict[int, bool] = {}
        self.gate = ""

    def run(self) -> Mixture:
        layers, order = self._alone()
        self._point(order, 0)
        if self.met[0]:
            return self._mixture(layers, order, 0)
        last = len(order) - 1  # with all of them kept, nothing is quantized
        if not self.gate:
            for count in _CURVE:
                self._point(order, min(count, last))
            return self._mixture(layers, order, 0)
        low, high = 0, min(1, last)
        self._point(order, high)
        while not self.met[high] and high < last:
            low, high = high, min(2 * high, last)
            self._point(order, high)
        if not self.met[high]:
            return self._mixture(layers, order, None)
        while high - low > 1:
            middle = (low + high) // 2
            self._point(order, middle)
            low, high = (low, middle) if self.met[middle] else (middle, high)
        return self._mixture(layers, order, high)

    def _alone(self) -> tuple[list[Alone], list[str]]:
        """The harm of each product, the largest first; their names, the largest harm for what it saves first."""
        prepared, quantized = self.quantized.prepared, self.quantized
        expected = answers(prepared.graph.model, self.first)
        macs = prepared.cost.macs
        saved = {name: quantized.high_bytes(name) - quantized.low_bytes(name) for name in quantized.codes}
        every = sum(saved.values()), sum(macs[name] for name in saved) or 1
        ranked = []
        for done, (name, codes) in enumerate(quantized.codes.items()):

            def measured(name: str = name, codes: Codes = codes) -> dict[str, Any]:
                alone = replace(codes, bias=codes.bias if codes.alone is None else codes.alone)
                given = answers(quantized.assembled({name: alone}), self.first)
                rows = agreement(expected, given, self.first, self.kinds, subject="", baseline="")
                return {"product": name, "harm": self._plain(rows)}

            harm = quantized.steps.once(f"alone-{done:04}", measured)["harm"]
            share = saved[name] / every[0] + macs[name] / every[1]
            ranked.append((harm / share, Alone(name=name, harm=harm, bytes=saved[name])))
            self.progress.at(NAME, 0.6 * (done + 1) / len(saved), f"{name} alone")
        layers = sorted((each for _, each in ranked), key=lambda each: -each.harm)
        return layers, [each.name for _, each in sorted(ranked, key=lambda pair: -pair[0])]

    def _plain(self, rows: Sequence[Row]) -> float:
        """The harm that layers are ranked by: it is never the same for two of them by chance, as shares are."""
        row = measured(_DEFAULT[self.classes], rows)
        harm = _HARMS[_DEFAULT[self.classes]]
        return 0.0 if row is None or row.value is None else harm.of(row.value)

    def _point(self, order: Sequence[str], count: int) -> None:
        """Compile and score the graph with so many kept."""
        if count in self.met:
            return
        kept, steps = order[:count], self.quantized.steps

        def measured() -> dict[str, Any]:
            if count not in self.solved:
                self.solved[count] = self.quantized.solved(kept)
            step, met = self._scored(kept, self.solved[count].codes)
            return {"step": step.model_dump(mode="json"), "met": met, "gate": self.gate}

        found = steps.once(f"point-{count:04}", measured)
        self.steps[count], self.met[count] = MixedPoint.model_validate(found["step"]), found["met"]
        self.gate = found["gate"]
        best = self._best()
        for each in self.met:
            if each not in (0, best):
                self.solved.pop(each, None)
                steps.drop(f"dropped-{each:04}", stem(order[:each]))
        self.progress.at(NAME, min(0.99, 0.6 + 0.04 * len(self.steps)), f"{words.plural(count, 'layer')} kept high")

    def _best(self) -> int:
        """The point that is taken if no other is measured: the first that meets the gate, else the nearest to it."""
        if not self.gate:
            return 0
        met = [count for count in self.met if self.met[count]]
        return min(met) if met else min(self.steps, key=lambda each: (self.steps[each].harm, each))

    def _scored(self, kept: Sequence[str], codes: Mapping[str, Codes]) -> tuple[MixedPoint, bool]:
        given = answers(self.quantized.assembled(codes), self.samples)
        rows = agreement(self.expected, given, self.samples, self.kinds, subject="", baseline="")
        checks, _ = judge(self.recipe.gates, rows)
        gates = [check.name.removeprefix("gate.") for check in checks]
        gate = self.gate = next((name for name in _HARMS if name in gates), "")
        gate = gate or _DEFAULT[self.classes]
        row = measured(gate, rows)
        harm, ci95 = _told(gate, row) if row is not None else (0.0, None)
        size = sum(
            self.quantized.high_bytes(name) if name in kept else self.quantized.low_bytes(name)
            for name in self.quantized.codes
        )
        step = MixedPoint(kept=list(kept), bytes=size, harm=harm, ci95=ci95)
        return step, bool(checks) and all(check.ok for check in checks)

    def _mixture(self, layers: list[Alone], order: Sequence[str], count: int | None) -> Mixture:
        steps = sorted(self.steps)
        gate = self.gate or _DEFAULT[self.classes]
        limit = getattr(self.recipe.gates, gate) if self.gate else None
        # what meets no gate is compiled as near to it as the curve comes, and the gates then judge it
        best = self._best()
        kept = order[:best]
        # a point that was measured before an interruption is read from its steps, where all of it is
        solved = self.solved[best] if best in self.solved else self.quantized.solved(kept)
        mixed = MixedSearch(
            what=_HARMS[gate].what,
            alone=_HARMS[_DEFAULT[self.classes]].what,
            scored=self._on_what(),
            layers=layers,
            steps=[self.steps[each] for each in steps],
            chosen=None if count is None else steps.index(count),
            limit=None if limit is None else limit if gate.endswith("_max") else _HARMS[gate].of(limit),
        )
        return Mixture(solved, mixed, self._decisions(mixed, layers, kept, best, count is not None))

    def _on_what(self) -> str:
        samples, each = self.samples, len(self.samples) // self.distinct
        by = f", {each} views of each" if each > 1 else ""
        alike = samples.clusters
        groups = self.distinct if alike is None else int(np.unique(alike).size)
        drawn = f", drawn from {groups}" if groups < self.distinct else ""
        return f"{words.plural(self.distinct, 'sample')} of {samples.name} ({samples.split}){drawn}{by}"

    def _decisions(
        self, mixed: MixedSearch, layers: Sequence[Alone], kept: Sequence[str], count: int, met: bool
    ) -> list[Decision]:
        low, by_name = self.quantized.weights.format, {each.name: each for each in layers}
        found = [
            decision(
                NAME,
                MIXED,
                name,
                f"alone it harms most for what it saves: {mixed.alone} {words.figure(by_name[name].harm, 3)}",
                low,
                "float32",
            )
            for name in kept
        ]
        step = self.steps[count]
        if not self.gate:
            reason = "the recipe has no gate that could be measured before the end, so nothing is kept high"
            return [*found, decision(NAME, NOTE, self.quantized.prepared.graph.name, reason)]
        if not met:
            reason = (
                f"no number of layers kept high meets it on {mixed.scored}; with {count}, {mixed.what} is "
                f"{words.figure(step.harm, 3)}"
            )
            where = f"gates.{self.gate}"
            return [*found, decision(NAME, "gate-out-of-reach", where, reason, mixed.limit, step.harm)]
        return found


def _told(gate: str, row: Row) -> tuple[float, tuple[float, float] | None]:
    """A row as harm, with its interval."""
    harm, value, ends = _HARMS[gate].of, row.value, row.ci95
    if gate == "top1_drop_max" and row.baseline is not None:
        value, ends = row.baseline.difference, row.baseline.difference_ci95
    if value is None:
        return 0.0, None
    return harm(value), None if ends is None else (min(map(harm, ends)), max(map(harm, ends)))
