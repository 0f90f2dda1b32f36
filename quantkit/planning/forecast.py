"""Times of steps: the target's bound, and a forecast from measured efficiencies.

Measured whole steps come first: they include attention, the head and the host. Without any, the efficiencies of single
products are used, each for its share of the bound, and the plan says so, since they exclude the host. Without either
there is no forecast, and only the bound is given. Both are in `efficiency.py`.
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

# largest share of the bound without an efficiency for which the others stand in
_UNKNOWN = 0.1


@dataclass(frozen=True)
class TimedStep:
    """Seconds of a step.

    Args:
        bound: bounds of its operations.
        least: lower bound; None if the target lacks figures.
        forecast: forecast; None without samples.
        interval: ends of its 90 % interval.
        because: basis of the forecast, or the reason why there is none.
        here: True if it was learned on the device in question.
    """

    bound: Bound
    least: float | None
    forecast: float | None
    interval: tuple[float, float] | None
    because: str
    here: bool = False

    @property
    def seconds(self) -> float | None:
        """Forecast, or the bound if there is none."""
        return self.forecast if self.forecast is not None else self.least


@dataclass(frozen=True)
class Served:
    """A model, stored in one way, on one target.

    Args:
        architecture: shapes of the model.
        products: its linears as the runtime reads them.
        cache: form of keys and values.
        format: format of most of its weights, as measurements name it.
        compute: type of their multiplications.
        attention: type of attention's multiplications.
        devices: number of devices that share the work.
        samples: measurements to learn from.
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
        """Compute the bound of a step's operations."""
        shared, attention = self.devices, self.attention
        return roofline.bound(
            self.architecture, self._alike, self.cache, self.target, step, devices=shared, attention=attention
        )

    def timed(self, step: ModelStep) -> TimedStep:
        """Compute the time of a step; results are cached."""
        if step not in self._known:
            self._known[step] = self._timed(step)
        return self._known[step]

    @cached_property
    def _alike(self) -> Mapping[RooflineProduct, int]:
        return roofline.alike(self.products)

    @cached_property
    def missing(self) -> list[str]:
        """Missing figures of the target, without which there is no bound."""
        known = self.target.memory.read_bandwidth.number is not None
        return self.bound(ModelStep(1)).missing if known else ["memory.read_bandwidth"]

    def _timed(self, step: ModelStep) -> TimedStep:
        bound = self.bound(step)
        least = bound.seconds
        if least is None:
            return TimedStep(bound, None, None, None, f"{self.target.name} has no figure for {', '.join(self.missing)}")
        if self.devices > 1:
            return TimedStep(bound, least, None, None, "communication between devices was not measured")
        if (learned := self._learned) is not None:
            what, together = efficiency.named(self.format, self.compute), bound.together(self.target)
            shares = bound.shares(self.target) | efficiency.called(bound.calls)
            expected = learned.expect(what, step.phase, step.rows, together, shares)
            if expected is not None:
                # a forecast from ceilings may be below the sum of the operations' bounds
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
            because = f"no measurement of {self.format} in {self.runtime} is near this"
            return TimedStep(bound, least, None, None, because)
        known = least / (least - unknown)
        count, shapes = _plural(first.n, "single product"), _plural(first.subjects, "shape")
        because = f"{count} of {shapes} measured on {_where(first.device, first.here)}"
        because += "; attention and the host are not included"
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
    alone = "; the spread between models is unknown: a factor of two is assumed" if learned.models == 1 else ""
    where = _where(learned.samples[0].name, here)
    return f"{_plural(len(learned.samples), 'step')} of {_plural(learned.models, 'model')} measured on {where}{alone}"


def _where(device: str, here: bool) -> str:
    return "this machine" if here else f"{device}, another device"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")
