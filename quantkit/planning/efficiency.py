"""How much of the bound runtimes reach: samples of measurements, and what single products and whole steps teach.

A row `tax.total` says the bound of a step or of one product, and what it took beyond it:

    efficiency = bound / (bound + tax)

Single products that speak of the same runtime and format count where they are near in rows (within a factor of two) and
in size (bounds within a factor of eight, since what a small product takes is mostly not its bound): their median is the
forecast's, their spread its interval. Rows of the same device come first; those of another device of the same kind
serve with a remark. Where nothing is near there is no efficiency.

The bound of a row stands on the ceilings that its run measured, a plan's on the figures of its target, which may be a
datasheet's. So a sample carries its ceilings, and its efficiency is turned to the target's.

Whole steps teach a few numbers for each device and runtime:

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

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from quantkit import content, limits
from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError, absent

Phase = Literal["decode", "prefill", "op"]
# what -> seconds of (reading, computing) at the ceilings
Shares = Mapping[str, tuple[float, float]]
# (what, `read` or `compute`), and the fixed seconds of a step
Term = tuple[str, str]

SHIPPED = Path(__file__).with_name("efficiencies.jsonl")
ATTENTION = "attention"
# in powers of two: rows, and seconds of the bound
_NEAR, _SIZED = 1.0, 3.0
_MANY = 20
# what rows are set against where they do not say
_BASELINE = {"cpu": "float32", "gpu": "bfloat16"}
_FLOATS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FIXED: Term = ("step", "fixed")
_SWEEPS = 500
# factors of two beyond what was measured
_FAR = 3.0
# what one model alone says of others: a factor of two either way, since nothing was seen of how much models differ
_ALONE = 2.0
# Student's t, 95 % one-sided, for 1 to 10 degrees of freedom
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Args:
        device: its id; `name` is for people.
        kind: `cpu` or `gpu`.
        compute: what was multiplied in, as the runtime's settings say: `int8`; "" where they do not.
        rows: M: sequences times new tokens.
        bound: seconds, on the ceilings of the run.
        efficiency: bound / time.
        read: bytes a second that the run measured; None where unknown.
        subject: hash of what was measured; measurements of one subject are one witness.
        model: hash of the model that it was made from.
        shares: of a whole step.
    """

    device: str
    name: str
    kind: str
    runtime: str
    format: str
    compute: str
    phase: Phase
    rows: int
    bound: float
    efficiency: float
    read: float | None
    subject: str
    model: str = ""
    shares: Shares = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time that it took."""
        return self.bound / self.efficiency

    @property
    def what(self) -> str:
        """Name of what has numbers of its own in a step."""
        return named(self.format, self.compute)


@dataclass(frozen=True)
class Efficiency:
    """Expected share of a product's bound.

    Args:
        low, high: of all that was seen (of many: all but one in twenty at either end).
        subjects: models or shapes among the `n` samples.
        device: its name; `here` tells whether it is the device in question.
    """

    value: float
    low: float
    high: float
    n: int
    subjects: int
    device: str
    here: bool


def look_up(
    samples: Sequence[Sample],
    *,
    runtime: str,
    form: str,
    compute: str,
    phase: Phase,
    rows: int,
    bound: float,
    kind: str,
    device: str | None = None,
    read: float | None = None,
) -> Efficiency | None:
    """Look up the efficiency of what is near; None where nothing is.

    Args:
        compute: what is multiplied in; samples that do not say serve as well.
        bound: seconds.
        device: id of the device, if it is this machine.
        read: bytes a second that the bound rests on, if memory bounds it.
    """
    if bound <= 0:
        return None
    fitting = [
        sample
        for sample in samples
        if (sample.runtime, sample.format, sample.phase, sample.kind) == (runtime, form, phase, kind)
        and sample.compute in ("", compute)
        and abs(math.log2(sample.rows / rows)) <= _NEAR
        and abs(math.log2(sample.bound / bound)) <= _SIZED
    ]
    by_device: dict[str, list[Sample]] = {}
    for sample in fitting:
        by_device.setdefault(sample.device, []).append(sample)
    # two machines' figures do not mix into one interval
    own = by_device.get(device) if device is not None else None
    chosen = own or max(by_device.values(), key=len, default=[])
    if not chosen:
        return None
    values = sorted(sample.efficiency * _reached(sample, read) for sample in chosen)
    cut = len(values) // _MANY
    subjects = len({sample.subject for sample in chosen})
    return Efficiency(
        *(median(values), values[cut], values[-1 - cut], len(values), subjects, chosen[0].name),
        here=chosen[0].device == device,
    )


def samples(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """Yield a sample for each measurement row (of `measurements.jsonl`) that says an efficiency.

    The baseline of a row is one more sample, once for each baseline and shape.
    """
    rows = list(rows)
    reads = {
        (_machine(row), (row.get("settings") or {}).get("threads")): row.get("value")
        for row in rows
        if row.get("name") == "ceiling.read"
    }
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        op, device = row.get("op") or {}, row.get("device") or {}
        if row.get("name") != "tax.total" or not device or not row.get("runtime"):
            continue
        settings, shape, machine = row.get("settings") or {}, row.get("shape") or {}, _machine(row)
        single, tokens, threads = op.get("K") is not None, int(shape.get("new_tokens") or 1), settings.get("threads")
        phase: Phase = "op" if single else "decode" if tokens == 1 and shape.get("context") else "prefill"
        count = int(op.get("M") or 0) if single else int(row.get("batch") or 1) * tokens
        subject = f"{op.get('K')}x{op.get('N')}" if single else str(row.get("subject"))
        base = subject if single else str((row.get("baseline") or {}).get("subject") or subject)
        bound, tax = op.get("bound_s"), row.get("value")
        took = None if bound is None or tax is None else bound + tax
        compute = str(settings.get("compute_type") or "")
        sides = [(str(op.get("format")), compute, bound, took, subject, op.get("shares"))]
        plain = str(settings.get("baseline_format") or _BASELINE.get(device["kind"], "float32"))
        key = (machine, row["runtime"], phase, count, base, shape.get("context"), threads)
        if key not in seen:
            seen.add(key)
            sides.append((plain, "", op.get("hp_bound_s"), op.get("hp_s"), base, op.get("hp_shares")))
        for form, kind, bound, took, subject, shares in sides:
            if bound and took and took > 0:
                yield Sample(
                    *(machine, device["name"], device["kind"], row["runtime"], form, kind, phase, max(count, 1)),
                    *(bound, bound / took, reads.get((machine, threads), reads.get((machine, None)))),
                    *(subject, base, shares or {}),
                )


def _machine(row: Mapping[str, Any]) -> str:
    """Device of a row; one that is reached from here by its name besides, so that it claims to be no other."""
    device = row.get("device") or {}
    own = str(device.get("id", ""))
    return f"{device['on']}: {own}" if device.get("on") else own


def _reached(sample: Sample, read: float | None) -> float:
    """Share of a promised bandwidth that the run reached, at most 1."""
    return min(sample.read / read, 1.0) if sample.read is not None and read is not None else 1.0


# --- where samples are kept ------------------------------------------------------------------------------------------


def shipped() -> list[Sample]:
    """Read what was learned from the project's recorded measurements."""
    return _read(SHIPPED) if SHIPPED.is_file() else []


def own() -> list[Sample]:
    """Read what this user's measurements taught; files that cannot be read are passed over, as of any cache."""
    kept: list[Sample] = []
    for path in sorted((content.cache_dir() / "measured").glob("*.jsonl")):
        with suppress(InputError):
            kept += _read(path)
    return kept


def keep(rows: Iterable[Mapping[str, Any]]) -> None:
    """Remember what measurements (rows as JSON) taught, for plans to come.

    A later measurement of the same things takes the place of an earlier one. A cache that cannot be written remembers
    nothing.
    """
    taught = list(samples(rows))
    if not taught:
        return
    what = sorted({(one.device, one.runtime, one.format, one.phase, one.subject, one.rows) for one in taught})
    path = content.cache_dir() / "measured" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.jsonl"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, dumped(taught))


def dumped(samples: Iterable[Sample]) -> bytes:
    """Write samples as JSON lines."""
    return "".join(f"{json.dumps(asdict(sample), allow_nan=False)}\n" for sample in samples).encode()


def measured(paths: Iterable[Path]) -> list[Sample]:
    """Read the samples of the measurement files or bundles that a user names.

    Raises:
        InputError: `file-missing`, `file-unreadable`, `measurements-invalid`.
    """
    files = (path / "measurements.jsonl" if path.is_dir() else path for path in paths)
    return [sample for file in files for sample in samples(_lines(file))]


def _read(path: Path) -> list[Sample]:
    try:
        return [Sample(**line) for line in _lines(path)]
    except TypeError as error:
        raise InputError("measurements-invalid", where=str(path), value=str(error), remedy="remove it") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = limits.read(path, limits.DATA).decode("utf-8")
    except FileNotFoundError:
        raise absent(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file-unreadable", where=str(path), value=str(error), remedy="check the file") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            where = f"{path}:{number}"
            raise InputError("measurements-invalid", where=where, value=str(error), rule="JSON lines") from None
        if isinstance(row, dict):
            rows.append(row)
    return rows


# --- whole steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """What one device taught of one runtime.

    Args:
        samples: that it stands on, all of one device.
        terms: how many times as long as at the ceiling; and the fixed seconds.
        misses: phase -> for each model, ln(forecast from the others / measured) of its steps.
    """

    samples: Sequence[Sample]
    terms: Mapping[Term, float]
    misses: Mapping[str, Sequence[Sequence[float]]]

    @property
    def models(self) -> int:
        """Number of models that were measured."""
        return len({sample.model for sample in self.samples})

    def expect(
        self, what: str, phase: str, rows: int, bound: float, shares: Shares
    ) -> tuple[float, float, float] | None:
        """Forecast the seconds of a step, with the ends of the 90 % interval; None where nothing near was measured.

        Args:
            what: `named`: most of its weights.
            rows: sequences times new tokens.
            bound: seconds, of the step as one piece.
        """
        near = [sample for sample in self.samples if sample.phase == phase and sample.what == what]
        if not near or bound <= 0:
            return None
        beyond = _outside(rows, [sample.rows for sample in near]) + _outside(bound, [sample.bound for sample in near])
        seconds = _seconds(self.terms, _terms(shares))
        if beyond > _FAR or seconds is None:
            return None
        width = self.factor(phase) ** (1 + beyond)
        return seconds, seconds / width, seconds * width

    def factor(self, phase: str) -> float:
        """Compute the factor, up or down, within which the time of a step like those measured lies."""
        models = self.misses.get(phase, ())
        if len(models) < 2:
            return _ALONE
        # rows of one model miss alike, so that models count, not rows
        variance = np.mean([np.mean(np.square(misses)) for misses in models])
        return math.exp(_T[min(len(models) - 1, len(_T)) - 1] * math.sqrt(float(variance)))


def named(form: str, compute: str) -> str:
    """Name what has numbers of its own: a format with what it is multiplied in; of floats the format."""
    return form if form in _FLOATS.values() or not compute else f"{form} in {compute}"


def floats(compute: str) -> str:
    """Name the format of weights that are floats, where that is computed in: `fp32` -> `float32`."""
    return _FLOATS.get(compute, "float32")


def together(parts: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Add up (what, seconds of reading, of computing); without what takes none."""
    sums: dict[str, tuple[float, float]] = {}
    for what, reading, computing in parts:
        before = sums.get(what, (0.0, 0.0))
        sums[what] = (before[0] + reading, before[1] + computing)
    return {what: both for what, both in sums.items() if any(both)}


def learn(
    samples: Sequence[Sample], *, runtime: str, kind: str, what: str, device: str | None, read: float | None
) -> Learned | None:
    """Learn the numbers of the device in question, else of the one that most is known of; two never mix.

    Args:
        what: `named`; a device without it teaches nothing.
        device: its id, if it is this machine.
        read: bytes a second that the target promises; runs that measured less are taken for what they reached of that.

    Returns:
        None where nothing was measured.
    """
    fitting = [sample for sample in samples if sample.shares and (sample.runtime, sample.kind) == (runtime, kind)]
    knowing = [sample.device for sample in fitting if sample.what == what]
    if not knowing:
        return None
    best = device if device in knowing else max(sorted(set(knowing)), key=knowing.count)
    chosen = [sample for sample in fitting if sample.device == best]
    models = sorted({sample.model for sample in chosen})
    misses: dict[str, list[list[float]]] = {}
    for model in models if len(models) > 1 else ():
        others = _fit([sample for sample in chosen if sample.model != model], read)
        for phase in sorted({sample.phase for sample in chosen}):
            ours = [sample for sample in chosen if sample.model == model and sample.phase == phase]
            forecasts = [(_seconds(others, _turned(sample, read)), sample.seconds) for sample in ours]
            if known := [math.log(forecast / took) for forecast, took in forecasts if forecast is not None]:
                misses.setdefault(phase, []).append(known)
    return Learned(chosen, _fit(chosen, read), misses)


def _outside(value: float, measured: Sequence[float]) -> float:
    return max(math.log2(min(measured) / value), math.log2(value / max(measured)), 0.0)


def _terms(shares: Shares, reached: float = 1.0) -> dict[Term, float]:
    terms = {_FIXED: 1.0}
    for what, (reading, computing) in shares.items():
        terms[what, "read"], terms[what, "compute"] = reached * reading, computing
    return {term: value for term, value in terms.items() if value}


def _turned(sample: Sample, read: float | None) -> dict[Term, float]:
    return _terms(sample.shares, _reached(sample, read))


def _seconds(known: Mapping[Term, float], terms: Mapping[Term, float]) -> float | None:
    if not terms.keys() <= known.keys():
        return None
    return sum(known[term] * value for term, value in terms.items())


def _fit(samples: Sequence[Sample], read: float | None) -> dict[Term, float]:
    """Least squares of shares of the measured times, within bounds: coordinate by coordinate, since they are few."""
    rows = [_turned(sample, read) for sample in samples]
    terms = sorted(set().union(*rows))
    matrix = np.array(
        [[row.get(term, 0.0) / sample.seconds for term in terms] for row, sample in zip(rows, samples, strict=True)]
    )
    gram, right = matrix.T @ matrix, matrix.sum(axis=0)
    least = [0.0 if term == _FIXED else 1.0 for term in terms]
    solved = np.array(least)
    for _ in range(_SWEEPS):
        for i, lowest in enumerate(least):
            solved[i] = max(lowest, solved[i] + (right[i] - gram[i] @ solved) / gram[i, i])
    return dict(zip(terms, solved.tolist(), strict=True))
