"""Times of steps: the bound of the target, and the forecast that measured efficiencies make of it.

What whole steps teach comes first: they hold attention, the head and the host. Without any, the efficiencies of single
products stand in, each for its share of the bound, and that is said, since they know of no host. Without either there
is no forecast, and the bound stands alone. Both are `efficiency.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quantkit.model.sizes.architecture import Architecture
from quantkit.planning import efficiency, roofline
from quantkit.planning.efficiency import Efficiency, Learned, Sample
from quantkit.planning.roofline import Bound, Cache, ModelStep, Op, RooflineProduct
from quantkit.target import ComputeType, Target

# a share of the bound that has no efficiency, up to which the others speak for the whole
_UNKNOWN = 0.1


@dataclass(frozen=True)
class TimedStep:
    """Seconds of a step.

    Args:
        least: what no runtime beats; None where the target lacks figures.
        forecast: None where nothing was learned.
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
        format: of most of its weights, as measurements name it; `compute` is what they are multiplied in.
        devices: number that shares the work.
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
        """Bound the operations of a step."""
        shared, attention = self.devices, self.attention
        return roofline.bound(
            self.architecture, self._alike, self.cache, self.target, step, devices=shared, attention=attention
        )

    def timed(self, step: ModelStep) -> TimedStep:
        """Time a step; asked twice, reckoned once."""
        if step not in self._known:
            self._known[step] = self._timed(step)
        return self._known[step]

    @cached_property
    def _alike(self) -> Mapping[RooflineProduct, int]:
        return roofline.alike(self.products)

    @cached_property
    def missing(self) -> list[str]:
        """Figures that the target lacks, without which there is no bound."""
        known = self.target.memory.read_bandwidth.number is not None
        return self.bound(ModelStep(1)).missing if known else ["memory.read_bandwidth"]

    def _timed(self, step: ModelStep) -> TimedStep:
        bound = self.bound(step)
        least = bound.seconds
        if least is None:
            return TimedStep(bound, None, None, None, f"{self.target.name} has no figure for {', '.join(self.missing)}")
        if self.devices > 1:
            return TimedStep(bound, least, None, None, "no measurement knows what several devices tell each other")
        if (learned := self._learned) is not None:
            what, together = efficiency.named(self.format, self.compute), bound.together(self.target)
            expected = learned.expect(what, step.phase, step.rows, together, bound.shares(self.target))
            if expected is not None:
                # measurements are set against ceilings, whose sum may lie below the bound of each operation
                seconds, low, high = (max(value, least) for value in expected)
                here = learned.samples[0].device == self.device
                return TimedStep(bound, least, seconds, (low, high), _steps(learned, here), here)
        return self._by_products(step, bound, least)

    @cached_property
    def _learned(self) -> Learned | None:
        return efficiency.learn(
            self.samples,
            runtime=self.runtime,
            kind=self.target.kind,
            what=efficiency.named(self.format, self.compute),
            device=self.device,
            read=self.target.memory.read_bandwidth.number,
        )

    def _by_products(self, step: ModelStep, bound: Bound, least: float) -> TimedStep:
        seconds = low = high = unknown = 0.0
        first: Efficiency | None = None
        for op in bound.ops:
            part = (op.seconds or 0.0) * op.times
            share = self._of(op, step)
            if share is None:
                unknown += part
                continue
            first = first or share
            seconds, low, high = seconds + part / share.value, low + part / share.high, high + part / share.low
        if first is None or unknown > _UNKNOWN * least:
            because = f"nothing was measured of {self.format} in {self.runtime} near this"
            return TimedStep(bound, least, None, None, because)
        known = least / (least - unknown)
        count, shapes = _plural(first.n, "single product"), _plural(first.subjects, "shape")
        because = f"{count} of {shapes} measured on {_where(first.device, first.here)}"
        because += "; attention and the host are not in it"
        return TimedStep(bound, least, seconds * known, (low * known, high * known), because, first.here)

    def _of(self, op: Op, step: ModelStep) -> Efficiency | None:
        return efficiency.look_up(
            self.samples,
            runtime=self.runtime,
            form=op.format,
            compute=op.compute,
            phase="op",
            rows=step.rows,
            bound=op.seconds or 0.0,
            kind=self.target.kind,
            device=self.device,
            read=self.target.memory.read_bandwidth.number if op.limit == "memory" else None,
        )


def _steps(learned: Learned, here: bool) -> str:
    alone = "; how much models differ is not known: a factor of two is taken" if learned.models == 1 else ""
    where = _where(learned.samples[0].name, here)
    return f"{_plural(len(learned.samples), 'step')} of {_plural(learned.models, 'model')} measured on {where}{alone}"


def _where(device: str, here: bool) -> str:
    return "this machine" if here else f"{device}, another device"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")
