"""Mixed precision of a graph: as many products kept in floats as the gates need (`passes/mixed.py`).

    harm of each product alone -> rank -> keep 0, 1, 2, 4, ... until the gates pass -> bisect between the last two

The chosen number meets the gates, and one fewer does not. Smaller numbers between are not all tried.

To measure a product alone, the others stay in floats; the product takes its codes from the graph with all products
quantized, and its bias as if there were no others. Each further point is solved again, because each weight and bias
compensates the error of the products before it, and a kept product has none. All points are measured on the `tune`
split, which neither calibrates nor scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.bundle import Decision
from quantkit.measurement.accuracy.harm import Alone, MixedPoint, MixedSearch
from quantkit.measurement.rows import Row
from quantkit.passes import NOTE, decision
from quantkit.passes.mixed import Mixed
from quantkit.pipeline.gates import judge, measured
from quantkit.pipeline.graphs.answers import agreement, answers, classes_of, kinds_of
from quantkit.pipeline.graphs.quantized import QuantizedGraph, Solved, stem
from quantkit.pipeline.progress import Progress
from quantkit.planning.assigned import MIXED
from quantkit.report.kit import words

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.graph.pairs.qdq import Codes

NAME = Mixed.name
# points beside the first that are scored where no gate asks for any, so that there is a curve
_CURVE = (1, 2, 4)
# of the gates that a choice can rest on: what a row tells, and how it is told as harm (lower is better, 0 is none)
_HARMS: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "agreement_min": ("disagreement, share of the samples", lambda value: 1 - value),
    "top1_drop_max": ("top-1 lost, points", lambda value: -100 * value),
    "kl_max": ("KL, nats a sample", lambda value: value),
    "cosine_min": ("1 − cosine", lambda value: 1 - value),
}
_DEFAULT = {True: "kl_max", False: "cosine_min"}


@dataclass(frozen=True)
class Mixture:
    """Quantized products, the search for the page, and the reasons for the products that stay in floats."""

    solved: Solved
    mixed: MixedSearch
    decisions: list[Decision]


def mix(quantized: QuantizedGraph, held: InputSet, settings: Any, progress: Progress) -> Mixture:
    """Search for the mixture.

    Args:
        quantized: with codes for every product. What the search has measured and solved stands in its steps.
        held: the samples to measure on.
    """
    search = _Search(quantized, held, settings, progress)
    point, last = search.point, len(search.order) - 1  # with all of them kept, nothing is quantized
    if point(0):
        return search.mixture(0)
    if not search.gate:
        for count in _CURVE:
            point(min(count, last))
        return search.mixture(0)
    low, high = 0, min(1, last)
    while not point(high):
        if high == last:
            return search.mixture(None)
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if point(middle) else (middle, high)
    return search.mixture(high)


class _Search:
    def __init__(self, quantized: QuantizedGraph, held: InputSet, settings: Any, progress: Progress) -> None:
        self.quantized, self.progress = quantized, progress
        self.recipe, self.model = quantized.prepared.request.recipe, quantized.prepared.graph.model
        self.expected, self.kinds = answers(self.model, held), kinds_of(self.model)
        self.classes = bool(classes_of(self.expected, held, self.kinds))
        self.samples, self.distinct = held, len(held)
        if self.classes:
            self.samples = held.views(settings.views, self.recipe.seed)
            self.expected = answers(self.model, self.samples)
        self.steps: dict[int, MixedPoint] = {}
        # of all quantized, and of the point that would be taken if the search ended now
        self.solved: dict[int, Solved] = {0: quantized.found}
        self.met: dict[int, bool] = {}
        self.gate = ""
        self.layers, self.order = self._alone(held.first_of(settings.alone))

    def _alone(self, samples: InputSet) -> tuple[list[Alone], list[str]]:
        """Measure the harm of each product, the largest first; with names, the largest harm for what it saves first."""
        quantized, macs = self.quantized, self.quantized.prepared.cost.macs
        expected, gate = answers(self.model, samples), _DEFAULT[self.classes]
        saved = {name: quantized.high_bytes(name) - quantized.low_bytes(name) for name in quantized.codes}
        every = sum(saved.values()), sum(macs[name] for name in saved) or 1
        ranked = []
        for done, (name, codes) in enumerate(quantized.codes.items()):

            def harm_alone(name: str = name, codes: Codes = codes) -> dict[str, Any]:
                alone = replace(codes, bias=codes.bias if codes.alone is None else codes.alone)
                answered = answers(quantized.assembled({name: alone}), samples)
                row = measured(gate, agreement(expected, answered, samples, self.kinds, subject="", baseline=""))
                # never the same for two of them by chance, as shares are
                harm = 0.0 if row is None or row.value is None else _HARMS[gate][1](row.value)
                return {"product": name, "harm": harm}

            harm = quantized.steps.once(f"alone-{done:04}", harm_alone)["harm"]
            share = saved[name] / every[0] + macs[name] / every[1]
            ranked.append((harm / share, Alone(name=name, harm=harm, bytes=saved[name])))
            self.progress.at(NAME, 0.6 * (done + 1) / len(saved), f"{name} alone")
        layers = sorted((alone for _, alone in ranked), key=lambda alone: -alone.harm)
        return layers, [alone.name for _, alone in sorted(ranked, key=lambda pair: -pair[0])]

    def point(self, count: int) -> bool:
        """Compile and score the graph with so many products kept; tell whether it meets the gates."""
        if count in self.met:
            return self.met[count]
        kept, steps = self.order[:count], self.quantized.steps

        def scored() -> dict[str, Any]:
            if count not in self.solved:
                self.solved[count] = self.quantized.solved(kept)
            step, met = self._scored(kept, self.solved[count].codes)
            return {"step": step.model_dump(mode="json"), "met": met, "gate": self.gate}

        record = steps.once(f"point-{count:04}", scored)
        self.steps[count], self.met[count] = MixedPoint.model_validate(record["step"]), record["met"]
        self.gate = record["gate"]
        best = self._best()
        for other in self.met:
            if other not in (0, best):
                self.solved.pop(other, None)
                steps.drop(f"dropped-{other:04}", stem(self.order[:other]))
        self.progress.at(NAME, min(0.99, 0.6 + 0.04 * len(self.steps)), f"{words.plural(count, 'layer')} kept high")
        return self.met[count]

    def _best(self) -> int:
        """Return the point to take without further measurements: the first within the gate, else the nearest."""
        if not self.gate:
            return 0
        met = [count for count in self.met if self.met[count]]
        return min(met) if met else min(self.steps, key=lambda count: (self.steps[count].harm, count))

    def _scored(self, kept: Sequence[str], codes: Mapping[str, Codes]) -> tuple[MixedPoint, bool]:
        answered = answers(self.quantized.assembled(codes), self.samples)
        rows = agreement(self.expected, answered, self.samples, self.kinds, subject="", baseline="")
        checks, _ = judge(self.recipe.gates, rows)
        gates = [check.name.removeprefix("gate.") for check in checks]
        self.gate = next((name for name in _HARMS if name in gates), "")
        gate = self.gate or _DEFAULT[self.classes]
        row = measured(gate, rows)
        harm, ci95 = _told(gate, row) if row is not None else (0.0, None)
        low, high = self.quantized.low_bytes, self.quantized.high_bytes
        size = sum(high(name) if name in kept else low(name) for name in self.quantized.codes)
        step = MixedPoint(kept=list(kept), bytes=size, harm=harm, ci95=ci95)
        return step, bool(checks) and all(check.ok for check in checks)

    def mixture(self, count: int | None) -> Mixture:
        """Return the mixture at the chosen point, None if none meets the gates."""
        steps = sorted(self.steps)
        gate = self.gate or _DEFAULT[self.classes]
        limit = getattr(self.recipe.gates, gate) if self.gate else None
        # what meets no gate is compiled as near to it as the curve comes, and the gates then judge it
        best = self._best()
        kept = self.order[:best]
        # a point that was measured before an interruption is read from its steps, where all of it is
        solved = self.solved[best] if best in self.solved else self.quantized.solved(kept)
        mixed = MixedSearch(
            what=_HARMS[gate][0],
            alone=_HARMS[_DEFAULT[self.classes]][0],
            scored=self._on_what(),
            layers=self.layers,
            steps=[self.steps[step] for step in steps],
            chosen=None if count is None else steps.index(count),
            limit=None if limit is None else limit if gate.endswith("_max") else _HARMS[gate][1](limit),
        )
        harms = {alone.name: words.figure(alone.harm, 3) for alone in self.layers}
        why = f"alone it harms most for what it saves: {mixed.alone}"
        low = self.quantized.weights.format
        decisions = [decision(NAME, MIXED, name, f"{why} {harms[name]}", low, "float32") for name in kept]
        if not self.gate:
            reason = "the recipe has no gate that could be measured before the end, so nothing is kept high"
            decisions.append(decision(NAME, NOTE, self.quantized.prepared.graph.name, reason))
        elif count is None:
            harm = self.steps[best].harm
            reason = f"no number of layers kept high meets it on {mixed.scored}; "
            reason += f"with {best}, {mixed.what} is {words.figure(harm, 3)}"
            where = f"gates.{self.gate}"
            decisions.append(decision(NAME, "gate-out-of-reach", where, reason, mixed.limit, harm))
        return Mixture(solved, mixed, decisions)

    def _on_what(self) -> str:
        samples, views = self.samples, len(self.samples) // self.distinct
        by = f", {views} views of each" if views > 1 else ""
        groups = self.distinct if samples.clusters is None else int(np.unique(samples.clusters).size)
        drawn = f", drawn from {groups}" if groups < self.distinct else ""
        return f"{words.plural(self.distinct, 'sample')} of {samples.name} ({samples.split}){drawn}{by}"


def _told(gate: str, row: Row) -> tuple[float, tuple[float, float] | None]:
    """Return a row's harm with its interval."""
    harm, value, ends = _HARMS[gate][1], row.value, row.ci95
    if gate == "top1_drop_max" and row.baseline is not None:
        value, ends = row.baseline.difference, row.baseline.difference_ci95
    if value is None:
        return 0.0, None
    return harm(value), None if ends is None else (min(map(harm, ends)), max(map(harm, ends)))
