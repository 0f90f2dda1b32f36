"""Recipes in the order in which to try them: from a plan, and from losses that were measured on one small model.

    first      those that fit, on the fewest devices, computed natively in what they store
    then       those with a known loss that is at most `small`, by the time of a step, or by bytes if no time is known;
               within a tenth of the first, by the loss; within its interval, a server before torch
    then       those whose loss is not known, by bits; at last those that lose more

A loss counts where the recipe has as many bits a weight as where it was measured: mixtures of types depend on shapes.
A bound is set against bounds and a forecast against forecasts, as `outlook.recommend` does. Nothing is opened or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import Field

from quantkit.content import Closed, read_yaml
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe, Recommendation

# KL in nats a token, up to and with
_CLASSES = {"none": 0.0, "tiny": 0.02, "small": 0.1, "moderate": 0.25, "large": math.inf}
_FLOAT = "float"
_TIED = 1.1
# a recipe of so much fewer bits than where its loss was measured is another one
_FEWER = 0.95


class Loss(Closed):
    """KL of a recipe from the original, nats a token.

    Args:
        half: half of the 95 % interval.
        bits: of a quantized weight on average, where it was measured.
        record: file in `benchmarks/results/`.
    """

    kl: float
    half: float = 0.0
    bits: float = 0.0
    record: str = ""

    @property
    def name(self) -> str:
        """Class of the loss: `none`, `tiny`, `small`, `moderate`, `large`."""
        return next(name for name, most in _CLASSES.items() if self.kl <= most)


class Losses(Closed):
    """Losses that ship, by recipe, and the model that they were measured on."""

    schema_: Literal[1] = Field(alias="schema")
    model: str
    recipes: Mapping[str, Loss]

    @classmethod
    @cache
    def shipped(cls) -> Losses:
        """Read the shipped file."""
        return cls.model_validate(read_yaml(Path(__file__).with_name("losses.yaml")))


@dataclass(frozen=True)
class Ranked:
    """Place of a recipe.

    Args:
        row: times and memory at the batch that was asked about.
        loss: measured on another model; None where it was not.
        seconds: of a step: a forecast where all recipes have one, else a bound; None where not all have one.
        because: reasons for the place.
    """

    candidate: PlannedRecipe
    row: PlannedBatch
    loss: Loss | None
    seconds: float | None
    because: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Tell whether weights and cache fit into the devices, as far as that is known."""
        return self.row.fits is not False

    @property
    def native(self) -> bool:
        """Tell whether the runtime computes in all that the recipe stores; else it is smaller, not faster."""
        return all(cell.state == "native" for cell in self.candidate.cells)


def rank(outlook: Outlook, losses: Losses | None = None) -> tuple[Outlook, list[Ranked]]:
    """Rank the recipes of a plan that run, at the first batch of its workload.

    Args:
        losses: of recipes on a decoder; None takes those that ship.

    Returns: the plan, recommending the first; and all that run, in their order.
    """
    decodes, batch = outlook.architecture.kind == "decoder", outlook.workload.batches[0]
    losses = Losses.shipped() if losses is None else losses
    runs = [one for one in outlook.candidates if one.problem is None]
    rows = [next(row for row in one.rows if row.batch == batch) for one in runs]
    forecasts = all(row.step.forecast is not None for row in rows)
    times = [row.step.forecast if forecasts else row.step.least for row in rows]
    known = None not in times
    ranked = [
        Ranked(one, row, _loss(one, losses) if decodes else None, time if known else None)
        for one, row, time in zip(runs, rows, times, strict=True)
    ]
    ranked.sort(key=_order)
    ranked = [one for _, alike in groupby(ranked, _group) for one in _settled(list(alike))]
    floats = next((one for one in ranked if one.candidate.recipe == _FLOAT), None)
    ranked = [replace(one, because=_reasons(one, floats)) for one in ranked]
    best = next((one for one in ranked[:1] if one.fits), None)
    because = ["none of them fits"] if best is None else list(best.because)
    because += [] if decodes else ["no loss is known of models that do not decode: more bits come first"]
    because += [] if known else ["no time is known, as the target lacks figures: fewer bytes come first"]
    because += [] if forecasts or not known else ["times are bounds, without unpacking; `quantkit tax` measures it"]
    if best is not None and best is floats:
        because.append("no recipe is expected to be faster at a small loss")
    return replace(outlook, recommendation=Recommendation(best.candidate.label if best else None, because)), ranked


def _loss(one: PlannedRecipe, losses: Losses) -> Loss | None:
    if one.recipe == _FLOAT:
        return Loss(kl=0.0)
    loss = losses.recipes.get(one.recipe)
    return loss if loss is not None and (one.bits or 0.0) >= _FEWER * loss.bits else None


def _effort(one: Ranked) -> float:
    return one.candidate.bytes if one.seconds is None else one.seconds


def _group(one: Ranked) -> tuple[float, ...]:
    devices = one.candidate.memory.devices if one.candidate.memory is not None else 1
    # the float model comes last where the loss of no recipe is known
    known = 3 if one.candidate.recipe == _FLOAT else 1
    if one.loss is not None:
        known = 0 if one.loss.kl <= _CLASSES["small"] else 2
    return (not one.fits, devices, not one.native, known)


def _order(one: Ranked) -> tuple[float, ...]:
    group, loss = _group(one), one.loss
    more = -round(one.candidate.bits or 0.0) if loss is None else loss.kl if group[-1] else 0.0
    return (*group, more, _effort(one))


def _settled(alike: list[Ranked]) -> Iterator[Ranked]:
    """Order recipes of small losses that take about as long by their losses; any others stay as they are."""
    while alike:
        tied = [one for one in alike if one.loss is not None and _effort(one) <= _TIED * _effort(alike[0])]
        if _group(alike[0])[-1] or not tied:
            yield from alike
            return
        least = min((one.loss for one in tied if one.loss is not None), key=lambda loss: loss.kl)
        best = [one for one in tied if one.loss is not None and one.loss.kl <= least.kl + least.half]
        chosen = min(best, key=lambda one: (one.candidate.runtime == "torch", _effort(one)))
        alike.remove(chosen)
        yield chosen


def _reasons(one: Ranked, floats: Ranked | None) -> list[str]:
    reasons = [] if one.fits else ["it does not fit"]
    if floats is not None and one is not floats:
        ratio = floats.candidate.bytes / one.candidate.bytes
        reasons.append(f"its weights take {ratio:.3g} times fewer bytes than the float model's")
        if one.seconds and floats.seconds:
            reasons.append(f"a step takes {one.seconds / floats.seconds:.2g} times as long")
    reasons += [] if one.native else ["it is computed in floats there: smaller, not faster"]
    if one.loss is not None and one.loss.record:
        reasons.append(f"its KL was {one.loss.kl:.3f} ± {one.loss.half:.3f} nats a token where it was measured")
    return reasons
