"""What whole steps take, learned from those of other models: a few numbers for each device and runtime.

    seconds = fixed + Σ (reading × a + computing × b)      over each format's weights, and attention

    reading, computing   seconds at the ceilings of the machine: bytes / β, operations / π
    a, b ≥ 1             how many times as long the runtime takes, for each format its own
    fixed ≥ 0            seconds of each step besides

So a head that stays in floats is as fast as floats are, whatever the linears are stored in. The numbers are those that
miss the measured times least, as shares of them.

The interval is that of 90 % for one more model: each model is forecast from the others, and what those forecasts are
off by, as a ratio, is taken to be normal: Student's t, a degree of freedom for each model but one. Few models make it
wide. It grows with each factor of two beyond the rows and the sizes that were measured, up to three of them, where
forecasts end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.planning.bound.efficiency import Sample

# what -> seconds of (reading, computing) at the ceilings
Shares = Mapping[str, tuple[float, float]]

ATTENTION = "attention"
_FLOATS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Term = tuple[str, str]
_FIXED: Term = ("step", "fixed")
_SWEEPS = 500
# factors of two beyond what was measured
_FAR = 3.0
# what one model alone says of others: a factor of two either way, since nothing was seen of how much models differ
_ALONE = 2.0
# Student's t, 95 % one-sided, for 1 to 10 degrees of freedom
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class StepQuery:
    """A step to forecast.

    Args:
        what: most of its weights, `named`.
        rows: sequences times new tokens.
        bound: seconds, of the step as one piece.
        shares: of it.
    """

    what: str
    phase: str
    rows: int
    bound: float
    shares: Shares


@dataclass(frozen=True)
class StepForecast:
    """What a step will take.

    Args:
        seconds: most likely.
        low: end of the 90 % interval.
    """

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Learned:
    """What one device taught of one runtime.

    Args:
        samples: that it stands on, all of one device.
        terms: (what, `read` or `compute`) -> how many times as long as at the ceiling; and the fixed seconds.
        misses: phase -> for each model, ln(forecast from the others / measured) of its steps.
        read: bytes a second that readings are set against, if not what each run measured.
    """

    samples: Sequence[Sample]
    terms: Mapping[Term, float]
    misses: Mapping[str, Sequence[Sequence[float]]]
    read: float | None

    @property
    def models(self) -> int:
        """How many models were measured."""
        return len({each.model for each in self.samples})

    def expect(self, asked: StepQuery) -> StepForecast | None:
        """The forecast of a step; None where nothing near was measured."""
        beyond = self._beyond(asked)
        seconds = _seconds(self.terms, _terms(asked.shares))
        if beyond > _FAR or seconds is None:
            return None
        width = self.factor(asked.phase) ** (1 + beyond)
        return StepForecast(seconds, seconds / width, seconds * width)

    def factor(self, phase: str) -> float:
        """What the time of a step like those measured lies within, up or down."""
        models = self.misses.get(phase, ())
        if len(models) < 2:
            return _ALONE
        # rows of one model miss alike, so that models count, not rows
        variance = np.mean([np.mean(np.square(each)) for each in models])
        return math.exp(_T[min(len(models) - 1, len(_T)) - 1] * math.sqrt(float(variance)))

    def _beyond(self, asked: StepQuery) -> float:
        near = [each for each in self.samples if each.phase == asked.phase and _of(each) == asked.what]
        if not near or asked.bound <= 0:
            return math.inf
        return _outside(asked.rows, [each.rows for each in near]) + _outside(asked.bound, [each.bound for each in near])


def named(form: str, compute: str) -> str:
    """What has numbers of its own: a format with what it is multiplied in; of floats the format."""
    return form if form in _FLOATS.values() or not compute else f"{form} in {compute}"


def floats(compute: str) -> str:
    """The format of weights that are floats, where that is computed in: `fp32` -> `float32`."""
    return _FLOATS.get(compute, "float32")


def together(parts: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """(what, seconds of reading, of computing), added up; without what takes none."""
    found: dict[str, tuple[float, float]] = {}
    for what, reading, computing in parts:
        before = found.get(what, (0.0, 0.0))
        found[what] = (before[0] + reading, before[1] + computing)
    return {what: both for what, both in found.items() if any(both)}


def learn(
    samples: Sequence[Sample], *, runtime: str, kind: str, what: str, device: str | None, read: float | None
) -> Learned | None:
    """The numbers of the device in question, else of the one that most is known of; two never mix.

    Args:
        what: `named`; a device without it teaches nothing.
        device: its id, if it is this machine.
        read: bytes a second that the target promises; runs that measured less are taken for what they reached of that.

    Returns:
        None where nothing was measured.
    """
    fitting = [each for each in samples if each.shares and (each.runtime, each.kind) == (runtime, kind)]
    knowing = [each.device for each in fitting if _of(each) == what]
    if not knowing:
        return None
    chosen = device if device in knowing else max(sorted(set(knowing)), key=knowing.count)
    found = [each for each in fitting if each.device == chosen]
    models = sorted({each.model for each in found})
    misses: dict[str, list[list[float]]] = {}
    for model in models if len(models) > 1 else ():
        others = _fit([each for each in found if each.model != model], read)
        for phase in sorted({each.phase for each in found}):
            own = [each for each in found if each.model == model and each.phase == phase]
            off = [_miss(others, each, read) for each in own]
            if known := [each for each in off if each is not None]:
                misses.setdefault(phase, []).append(known)
    return Learned(found, _fit(found, read), misses, read)


def _of(sample: Sample) -> str:
    return named(sample.format, sample.compute)


def _outside(value: float, measured: Sequence[float]) -> float:
    return max(math.log2(min(measured) / value), math.log2(value / max(measured)), 0.0)


def _terms(shares: Shares, reached: float = 1.0) -> dict[Term, float]:
    found = {_FIXED: 1.0}
    for what, (reading, computing) in shares.items():
        found[what, "read"], found[what, "compute"] = reached * reading, computing
    return {term: value for term, value in found.items() if value}


def _turned(sample: Sample, read: float | None) -> dict[Term, float]:
    reached = min(sample.read / read, 1.0) if sample.read is not None and read is not None else 1.0
    return _terms(sample.shares, reached)


def _seconds(known: Mapping[Term, float], terms: Mapping[Term, float]) -> float | None:
    if not terms.keys() <= known.keys():
        return None
    return sum(known[term] * value for term, value in terms.items())


def _miss(known: Mapping[Term, float], sample: Sample, read: float | None) -> float | None:
    found = _seconds(known, _turned(sample, read))
    return None if found is None else math.log(found / sample.seconds)


def _fit(samples: Sequence[Sample], read: float | None) -> dict[Term, float]:
    """Least squares of shares of the measured times, within bounds: coordinate by coordinate, since they are few."""
    rows = [_turned(each, read) for each in samples]
    terms = sorted(set().union(*rows))
    matrix = np.array(
        [[row.get(term, 0.0) / each.seconds for term in terms] for row, each in zip(rows, samples, strict=True)]
    )
    gram, right = matrix.T @ matrix, matrix.sum(axis=0)
    least = [0.0 if term == _FIXED else 1.0 for term in terms]
    found = np.array(least)
    for _ in range(_SWEEPS):
        for i, lowest in enumerate(least):
            found[i] = max(lowest, found[i] + (right[i] - gram[i] @ found) / gram[i, i])
    return dict(zip(terms, found.tolist(), strict=True))
