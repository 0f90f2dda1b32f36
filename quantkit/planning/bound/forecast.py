"""What steps will take: the bound of the target, and the forecast that measured efficiencies make of it.

What whole steps teach comes first (`steps.py`): they hold attention, the head and the host. Without any, the
efficiencies of single products stand in (`efficiency.py`), each for its share of the bound, and that is said, since
they know of no host. Without either there is no forecast, and the bound stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.bound import efficiency, roofline, steps
from quantkit.planning.bound.efficiency import Efficiency, ProductQuery, Sample
from quantkit.planning.bound.roofline import Bound, Cache, ModelStep, Op, RooflineProduct
from quantkit.target import ComputeType, Target

# a share of the bound that has no efficiency, up to which the others speak for the whole
_UNKNOWN = 0.1


@dataclass(frozen=True)
class TimedStep:
    """A step's time.

    Args:
        least: seconds below which no runtime gets; None where the target lacks figures.
        forecast: seconds; None where nothing was learned.
        because: what the forecast stands on, or why there is none.
        here: whether it was learned on the device in question.
    """

    bound: Bound
    least: float | None
    forecast: float | None
    interval: tuple[float, float] | None
    because: str
    here: bool = False

    @property
    def seconds(self) -> float | None:
        """The forecast; the bound where there is none."""
        return self.forecast if self.forecast is not None else self.least


@dataclass(frozen=True)
class Served:
    """A model, stored in one way, on one target.

    Args:
        products: its linears as the runtime reads them.
        format: of most of its weights, as measurements name it.
        compute: what they are multiplied in.
        devices: that share the work.
        samples: of efficiencies.
        device: id of this machine, if the target is this machine.
    """

    architecture: Architecture
    products: Sequence[RooflineProduct]
    cache: Cache
    target: Target
    runtime: str
    format: str
    compute: ComputeType
    attention: ComputeType
    devices: int = 1
    samples: Sequence[Sample] = ()
    device: str | None = None
    _known: dict[ModelStep, TimedStep] = field(default_factory=dict, init=False, compare=False, repr=False)

    def bound(self, step: ModelStep) -> Bound:
        """The operations of a step."""
        return roofline.bound(
            self.architecture,
            self._alike,
            self.cache,
            self.target,
            step,
            devices=self.devices,
            attention=self.attention,
        )

    def timed(self, step: ModelStep) -> TimedStep:
        """The time of a step; asked twice, reckoned once."""
        if step not in self._known:
            self._known[step] = self._timed(step)
        return self._known[step]

    @cached_property
    def _alike(self) -> Mapping[RooflineProduct, int]:
        return roofline.alike(self.products)

    @cached_property
    def missing(self) -> list[str]:
        """The figures that the target lacks, without which there is no bound."""
        read = self.target.memory.read_bandwidth.number
        found = self.bound(ModelStep(1)).missing
        return [*(["memory.read_bandwidth"] if read is None else []), *(found if read is not None else [])]

    def _timed(self, step: ModelStep) -> TimedStep:
        bound = self.bound(step)
        least = bound.seconds
        if least is None:
            return TimedStep(bound, None, None, None, f"{self.target.name} has no figure for {', '.join(self.missing)}")
        if self.devices > 1:
            return TimedStep(bound, least, None, None, "no measurement knows what several devices tell each other")
        if (learned := self._learned) is not None:
            what, together = steps.named(self.format, self.compute), bound.together(self.target)
            asked = steps.StepQuery(what, step.phase, step.rows, together, bound.shares(self.target))
            if (found := learned.expect(asked)) is not None:
                # measurements are set against ceilings, whose sum may lie below the bound of each operation
                middle, low, high = (max(each, least) for each in (found.seconds, found.low, found.high))
                here = learned.samples[0].device == self.device
                return TimedStep(bound, least, middle, (low, high), _learned(learned, here), here)
        return self._by_products(step, bound, least)

    @cached_property
    def _learned(self) -> steps.Learned | None:
        return steps.learn(
            self.samples,
            runtime=self.runtime,
            kind=self.target.kind,
            what=steps.named(self.format, self.compute),
            device=self.device,
            read=self.target.memory.read_bandwidth.number,
        )

    def _by_products(self, step: ModelStep, bound: Bound, least: float) -> TimedStep:
        seconds = low = high = unknown = 0.0
        first: Efficiency | None = None
        for op in bound.ops:
            part = (op.seconds or 0.0) * op.times
            found = self._of(op, step)
            if found is None:
                unknown += part
                continue
            first = first or found
            seconds, low, high = seconds + part / found.value, low + part / found.high, high + part / found.low
        if first is None or unknown > _UNKNOWN * least:
            return TimedStep(
                bound, least, None, None, f"nothing was measured of {self.format} in {self.runtime} near this"
            )
        known = least / (least - unknown)
        because = f"{_said(first)}; attention and the host are not in it"
        return TimedStep(bound, least, seconds * known, (low * known, high * known), because, first.here)

    def _of(self, op: Op, step: ModelStep) -> Efficiency | None:
        read = self.target.memory.read_bandwidth.number if op.limit == "memory" else None
        seconds = op.seconds or 0.0
        asked = ProductQuery(
            self.runtime, op.format, op.compute, "op", step.rows, seconds, self.target.kind, self.device, read
        )
        return efficiency.look_up(self.samples, asked)


def _learned(found: steps.Learned, here: bool) -> str:
    alone = "; how much models differ is not known: a factor of two is taken" if found.models == 1 else ""
    where = _where(found.samples[0].name, here)
    return f"{_plural(len(found.samples), 'step')} of {_plural(found.models, 'model')} measured on {where}{alone}"


def _said(found: Efficiency) -> str:
    where = _where(found.device, found.here)
    return f"{_plural(found.n, 'single product')} of {_plural(found.subjects, 'shape')} measured on {where}"


def _where(device: str, here: bool) -> str:
    return "this machine" if here else f"{device}, another device"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")
