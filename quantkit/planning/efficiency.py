"""Efficiency of runtimes: share of the bound that they reach, learned from measured products and steps.

A `tax.total` row has the bound of a step or of one product, and the time beyond it:

    efficiency = bound / (bound + tax)

For single products, samples of the same runtime and format count if they are near in rows (a factor of two) and in size
(bounds within a factor of eight, since a small product's time is mostly not its bound). Their median is the forecast's,
their spread its interval. Rows of the same device come first; those of another device of the same kind serve with a
remark. Without near samples there is no efficiency.

The bound of a row uses the ceilings measured in its run, a plan's bound uses the figures of its target, which may come
from a datasheet. So a sample carries its ceilings, and its efficiency is converted to the target's.

Whole steps teach a few numbers for each device and runtime:

    seconds = fixed + calls × c + Σ (reading × a + computing × b)      over each format's weights, and attention
    reading, computing   seconds at the ceilings of the machine: bytes / β, operations / π
    a, b ≥ 1             slowdown of the runtime against the ceiling, for each format its own
    fixed ≥ 0            other seconds of each step
    c ≥ 0                host's seconds for each call of an operation, where samples state calls: vLLM runs Python there

So a head in floats is as fast as floats are, in whatever format the linears are stored. The numbers minimize the
relative errors against the measured times.

The interval is that of 90 % for one more model: each model is forecast from the others, and the log ratios of those
forecasts to the measured times are taken as normal: Student's t with one degree of freedom less than models. Few models
make it wide. It grows with each factor of two beyond the measured rows and sizes, up to three of them, where forecasts
end.
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
# format -> seconds of (reading, computing) at the ceilings
Shares = Mapping[str, tuple[float, float]]
# (format, `read` or `compute`), and the fixed seconds of a step
Term = tuple[str, str]

SHIPPED = Path(__file__).with_name("efficiencies.jsonl")
ATTENTION, CALLS = "attention", "calls"
# seconds of a call in `shares`, so that its factor is in microseconds
_CALL = 1e-6
# in powers of two: rows, and seconds of the bound
_NEAR, _SIZED = 1.0, 3.0
_MANY = 20
# default baseline of rows, by kind of device
_BASELINE = {"cpu": "float32", "gpu": "bfloat16"}
_FLOATS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FIXED: Term = ("step", "fixed")
_SWEEPS = 500
# most factors of two beyond the measured range
_FAR = 3.0
# interval from one model alone: a factor of two either way, since the spread between models is unknown
_ALONE = 2.0
# Student's t, 95 % one-sided, for 1 to 10 degrees of freedom
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Args:
        device: id of the device.
        name: name of the device, for people.
        kind: `cpu` or `gpu`.
        runtime: name of the runtime.
        format: format of the weights.
        compute: type of the multiplications, from the runtime's settings: `int8`; "" if unknown.
        phase: `decode`, `prefill`, or `op` for a single product.
        rows: M: sequences times new tokens.
        bound: seconds, on the ceilings of the run.
        efficiency: bound / time.
        read: bytes a second measured in the run; None if unknown.
        subject: hash of the measured thing; measurements of one subject count as one witness.
        model: hash of the source model.
        shares: seconds at the ceilings of a whole step.
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
        """Measured time."""
        return self.bound / self.efficiency

    @property
    def what(self) -> str:
        """Format and compute type of its weights, by `named`."""
        return named(self.format, self.compute)


@dataclass(frozen=True)
class Efficiency:
    """Expected share of a product's bound.

    Args:
        value: median.
        low: smallest sample (of 20 or more, without one in twenty).
        high: largest sample, likewise.
        n: number of samples.
        subjects: models or shapes among the samples.
        device: name of the device.
        here: True if it is the device in question.
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
    """Return the efficiency of near samples, or None.

    Args:
        compute: type of the multiplications; samples without one count too.
        bound: seconds.
        device: id of the device, if it is this machine.
        read: bytes a second behind the bound, if memory limits it.
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
    """Yield a sample for each measurement row (of `measurements.jsonl`) with an efficiency.

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
    """Return the device of a row; for a remote one with its name, so that it is not taken for this one."""
    device = row.get("device") or {}
    own = str(device.get("id", ""))
    return f"{device['on']}: {own}" if device.get("on") else own


def _reached(sample: Sample, read: float | None) -> float:
    """Return the share of a promised bandwidth that the run reached, at most 1."""
    return min(sample.read / read, 1.0) if sample.read is not None and read is not None else 1.0


# --- where samples are kept ------------------------------------------------------------------------------------------


def shipped() -> list[Sample]:
    """Read the samples of the project's recorded measurements."""
    return _read(SHIPPED) if SHIPPED.is_file() else []


def own() -> list[Sample]:
    """Read the samples of this user's measurements; unreadable files are skipped."""
    kept: list[Sample] = []
    for path in sorted((content.cache_dir() / "measured").glob("*.jsonl")):
        with suppress(InputError):
            kept += _read(path)
    return kept


def keep(rows: Iterable[Mapping[str, Any]]) -> None:
    """Store the samples of measurements (rows as JSON) for later plans.

    A later measurement of the same things replaces an earlier one. A cache that cannot be written stores nothing.
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
    """Read the samples of measurement files or bundles.

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
    """Numbers that one device taught about one runtime.

    Args:
        samples: their samples, all of one device.
        terms: slowdown against the ceiling; and the fixed seconds.
        misses: phase -> for each model, ln(forecast from the others / measured) of its steps.
    """

    samples: Sequence[Sample]
    terms: Mapping[Term, float]
    misses: Mapping[str, Sequence[Sequence[float]]]

    @property
    def models(self) -> int:
        """Number of measured models."""
        return len({sample.model for sample in self.samples})

    def expect(
        self, what: str, phase: str, rows: int, bound: float, shares: Shares
    ) -> tuple[float, float, float] | None:
        """Forecast the seconds of a step, with the ends of the 90 % interval; None without near samples.

        Args:
            what: `named` of most of its weights.
            rows: sequences times new tokens.
            bound: seconds of the step as one piece.
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
        """Return the factor, up or down, of the interval of a step within the measured range."""
        models = self.misses.get(phase, ())
        if len(models) < 2:
            return _ALONE
        # errors of one model's rows are correlated, so models count, not rows
        variance = np.mean([np.mean(np.square(misses)) for misses in models])
        return math.exp(_T[min(len(models) - 1, len(_T)) - 1] * math.sqrt(float(variance)))


def named(form: str, compute: str) -> str:
    """Name a format with its own numbers: the format and its compute type; for floats only the format."""
    return form if form in _FLOATS.values() or not compute else f"{form} in {compute}"


def floats(compute: str) -> str:
    """Name the float format of weights for a compute type: `fp32` -> `float32`."""
    return _FLOATS.get(compute, "float32")


def called(count: float) -> dict[str, tuple[float, float]]:
    """Return the share of a step's calls."""
    return {CALLS: (0.0, count * _CALL)}


def together(parts: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Add up (name, seconds of reading, of computing), and drop entries of zero."""
    sums: dict[str, tuple[float, float]] = {}
    for what, reading, computing in parts:
        before = sums.get(what, (0.0, 0.0))
        sums[what] = (before[0] + reading, before[1] + computing)
    return {what: both for what, both in sums.items() if any(both)}


def learn(
    samples: Sequence[Sample], *, runtime: str, kind: str, what: str, device: str | None, read: float | None
) -> Learned | None:
    """Learn the numbers of the given device, else of the one with the most samples; devices are never mixed.

    Args:
        what: `named`; a device without it teaches nothing.
        device: its id, if it is this machine.
        read: bytes a second promised by the target; a run that measured less counts by the share that it reached.

    Returns:
        None without measurements.
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
    counted = {term: value for term, value in terms.items() if term in known or term[0] != CALLS}
    if not counted.keys() <= known.keys():
        return None
    return sum(known[term] * value for term, value in counted.items())


def _fit(samples: Sequence[Sample], read: float | None) -> dict[Term, float]:
    """Minimize relative errors by least squares within bounds, coordinate by coordinate."""
    rows = [_turned(sample, read) for sample in samples]
    terms = sorted(set().union(*rows))
    matrix = np.array(
        [[row.get(term, 0.0) / sample.seconds for term in terms] for row, sample in zip(rows, samples, strict=True)]
    )
    gram, right = matrix.T @ matrix, matrix.sum(axis=0)
    least = [0.0 if term == _FIXED or term[0] == CALLS else 1.0 for term in terms]
    solved = np.array(least)
    for _ in range(_SWEEPS):
        for i, lowest in enumerate(least):
            solved[i] = max(lowest, solved[i] + (right[i] - gram[i] @ solved) / gram[i, i])
    return dict(zip(terms, solved.tolist(), strict=True))
