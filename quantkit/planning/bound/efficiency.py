"""How much of the bound runtimes reach: samples of measurements, and what single products say by rows and size.

A row `tax.total` says the bound of a step or of one product, and what it took beyond it:

    efficiency = bound / (bound + tax)

What whole steps teach is `steps.py`. Of single products that speak of the same runtime and format, those near are
taken, in rows (within a factor of two) and in size (bounds within a factor of eight, since what a small product takes
is mostly not its bound): their median is the forecast's, their spread its interval. Rows of the same device come first;
those of another device of the same kind serve with a remark. Where nothing is near there is no efficiency.

The bound of a row stands on the ceilings that its run measured, a plan's on the figures of its target, which may be a
datasheet's. So a sample carries its ceilings, and its efficiency is turned to the target's.
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

from quantkit import content, limits
from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError

Phase = Literal["decode", "prefill", "op"]

SHIPPED = Path(__file__).with_name("efficiencies.jsonl")
# in powers of two: rows, and seconds of the bound
_NEAR, _SIZED = 1.0, 3.0
_MANY = 20
# what rows are set against where they do not say
_BASELINE = {"cpu": "float32", "gpu": "bfloat16"}


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Args:
        device: its id, and its name for people.
        kind: `cpu` or `gpu`.
        compute: what was multiplied in, as the runtime's settings say: `int8`; "" where they do not.
        phase: a whole step, or one product.
        rows: M: sequences times new tokens.
        bound: seconds, on the ceilings of the run.
        efficiency: bound / time.
        read: bytes a second that the run measured; None where it is not known.
        subject: what was measured, by its hash; measurements of one subject are one witness.
        model: that it was made from, by its hash.
        shares: of a whole step, what -> seconds of reading and of computing, on the ceilings of the run.
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
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.bound / self.efficiency


@dataclass(frozen=True)
class Efficiency:
    """What to expect of a product.

    Args:
        value: share of the bound.
        low: the least that was seen (of many: all but one in twenty).
        subjects: models or shapes among them.
        device: that they are from.
        here: whether that is the device in question.
    """

    value: float
    low: float
    high: float
    n: int
    subjects: int
    device: str
    here: bool


@dataclass(frozen=True)
class ProductQuery:
    """What an efficiency is asked for.

    Args:
        compute: what is multiplied in; samples that do not say serve as well.
        rows: M.
        bound: seconds.
        device: id of the device, if it is this machine.
        read: bytes a second that its bound rests on, of a step that is bound by memory.
    """

    runtime: str
    format: str
    compute: str
    phase: Phase
    rows: int
    bound: float
    kind: str
    device: str | None = None
    read: float | None = None


def look_up(samples: Sequence[Sample], asked: ProductQuery) -> Efficiency | None:
    """The efficiency of what is near; None where nothing is."""
    if asked.bound <= 0:
        return None
    fitting = [
        each
        for each in samples
        if (each.runtime, each.format, each.phase, each.kind) == (asked.runtime, asked.format, asked.phase, asked.kind)
        and each.compute in ("", asked.compute)
        and abs(math.log2(each.rows / asked.rows)) <= _NEAR
        and abs(math.log2(each.bound / asked.bound)) <= _SIZED
    ]
    own = [each for each in fitting if each.device == asked.device]
    found = own or _of_one_device(fitting)
    if not found:
        return None
    values = sorted(_turned(each, asked) for each in found)
    cut = len(values) // _MANY
    return Efficiency(
        median(values),
        values[cut],
        values[-1 - cut],
        len(values),
        len({each.subject for each in found}),
        found[0].name,
        bool(own),
    )


def samples(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """Those among measurement rows (`measurements.jsonl`, as JSON) that say an efficiency; the others are passed over.

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
        settings, shape = row.get("settings") or {}, row.get("shape") or {}
        single, tokens = op.get("K") is not None, int(shape.get("new_tokens") or 1)
        phase: Phase = "op" if single else "decode" if tokens == 1 and shape.get("context") else "prefill"
        count = int(op.get("M") or 0) if single else int(row.get("batch") or 1) * tokens
        what = f"{op.get('K')}x{op.get('N')}" if single else str(row.get("subject"))
        base = what if single else str((row.get("baseline") or {}).get("subject") or what)
        compute = str(settings.get("compute_type") or "")
        time = _sum(op.get("bound_s"), row.get("value"))
        sides = [(str(op.get("format")), compute, op.get("bound_s"), time, what, op.get("shares"))]
        plain = str(settings.get("baseline_format") or _BASELINE.get(device["kind"], "float32"))
        key = (_machine(row), row["runtime"], phase, count, base, shape.get("context"), settings.get("threads"))
        if key not in seen:
            seen.add(key)
            sides.append((plain, "", op.get("hp_bound_s"), op.get("hp_s"), base, op.get("hp_shares")))
        for form, kind, bound, time, subject, shares in sides:
            if not bound or not time or time <= 0:
                continue
            yield Sample(
                _machine(row),
                device["name"],
                device["kind"],
                row["runtime"],
                form,
                kind,
                phase,
                max(count, 1),
                bound,
                bound / time,
                reads.get((_machine(row), settings.get("threads")), reads.get((_machine(row), None))),
                subject,
                base,
                shares or {},
            )


def _machine(row: Mapping[str, Any]) -> str:
    """Whose a row is: of a device that is reached from here by its name besides, so that it claims to be no other."""
    device = row.get("device") or {}
    own = str(device.get("id", ""))
    return f"{device['on']}: {own}" if device.get("on") else own


def shipped() -> list[Sample]:
    """What was learned from the project's recorded measurements."""
    return _read(SHIPPED) if SHIPPED.is_file() else []


def own() -> list[Sample]:
    """What this user's measurements taught; files that cannot be read are passed over, as a cache is."""
    found: list[Sample] = []
    for path in sorted(_store().glob("*.jsonl")):
        try:
            found += _read(path)
        except InputError:
            continue
    return found


def keep(rows: Iterable[Mapping[str, Any]]) -> None:
    """Remember what measurements (rows as JSON) taught, for plans to come.

    A later measurement of the same things takes the place of an earlier one. A cache that cannot be written remembers
    nothing.
    """
    found = list(samples(rows))
    if not found:
        return
    what = sorted({(each.device, each.runtime, each.format, each.phase, each.subject, each.rows) for each in found})
    path = _store() / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.jsonl"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, dumped(found))


def dumped(found: Iterable[Sample]) -> bytes:
    """Samples as JSON lines."""
    return "".join(f"{json.dumps(asdict(each), allow_nan=False)}\n" for each in found).encode()


def measured(paths: Iterable[Path]) -> list[Sample]:
    """Samples of the measurement files or bundles that a user names.

    Raises:
        InputError: `file-unreadable`, `measurements-invalid`.
    """
    found: list[Sample] = []
    for path in paths:
        file = path / "measurements.jsonl" if path.is_dir() else path
        found += samples(_lines(file))
    return found


def _read(path: Path) -> list[Sample]:
    try:
        return [Sample(**line) for line in _lines(path)]
    except TypeError as error:
        raise InputError("measurements-invalid", where=str(path), value=str(error), remedy="remove it") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = limits.read(path, limits.DATA).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file-unreadable", where=str(path), value=str(error), remedy="check the file") from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            where = f"{path}:{number}"
            raise InputError("measurements-invalid", where=where, value=str(error), rule="JSON lines") from None
        if isinstance(data, dict):
            found.append(data)
    return found


def _of_one_device(fitting: Sequence[Sample]) -> list[Sample]:
    """Those of the device that has most of them: two machines' figures do not mix into one interval."""
    by: dict[str, list[Sample]] = {}
    for each in fitting:
        by.setdefault(each.device, []).append(each)
    return max(by.values(), key=len, default=[])


def _turned(sample: Sample, asked: ProductQuery) -> float:
    """Its efficiency against another figure for the memory; never above what the run itself reached of its own."""
    if sample.read is None or asked.read is None:
        return sample.efficiency
    return sample.efficiency * min(sample.read / asked.read, 1.0)


def _store() -> Path:
    return content.cache_dir() / "measured"


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
