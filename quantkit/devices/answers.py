"""Validate a device's answers as untrusted data.

All numbers are finite and every list has a limit. A line (`LINE`) is the most that one cell may take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from quantkit import machine
from quantkit.content import PRINTED, Bounded
from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import Ceiling, joined
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.clocks import Between, Clocks, settings_of
from quantkit.measurement.timing.rounds import TimedRound
from quantkit.measurement.timing.schedule import Shape, Timing, Visit

# bytes of one line, and of all lines of one work
LINE, ANSWER = 1 << 20, 1 << 28
# shapes timed in rounds: a round is one line
SHAPES = 500
# prefixes of the cells of products and of rounds
LINEAR, ROUND = "linear-", "round-"
# most positions in a line (ten numbers each, up to 25 bytes), and most numbers of samples
POSITIONS, NUMBERS = 1024, 40_000
Finite = Annotated[float, Field(allow_inf_nan=False)]
# seconds; a shorter step has no finite rate
Taken = Annotated[float, Field(gt=1e-12, lt=1e6)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(max_length=200, pattern=PRINTED)]
Flag = Annotated[str, Field(pattern=r"^[a-z-]{0,64}$")]
Setting = Annotated[str, Field(max_length=2000, pattern=PRINTED)] | bool | int | Finite | None
Settings = Annotated[dict[Name, Setting], Field(max_length=50)]
Words = Annotated[str, Field(max_length=2000)]
Answer = TypeVar("Answer", bound=BaseModel)
Rows = Sequence[dict[str, Any]]


class _Answer(Bounded):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Failed(_Answer):
    """The error that ended the work: its five fields and its exit code."""

    code: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    where: Words = ""
    value: Words = ""
    rule: Words = ""
    remedy: Words = ""
    exit: Literal[1, 2, 3, 75] = 2


class FoundCell(_Answer):
    """Rows of one cell; each reader validates them as the type that it asked for."""

    cell: Annotated[str, Field(max_length=200)]
    rows: tuple[dict[str, Any], ...] = Field(max_length=10_000)


class DeviceFacts(_Answer):
    """A device's description of itself.

    Args:
        id: identifier, equal on machines of the same kind.
        name: name of the processor.
        isa: best instruction set for quantized kernels.
        cores: cores that a process may use.
        memory: bytes that a process may use.
        cache: bytes of the last-level cache.
        emulated: True if the processor is emulated.
        gpu: name of its first NVIDIA GPU; empty without one, or if unknown.
    """

    id: Name
    name: Name
    machine: Name
    isa: Name
    cores: Annotated[int, Field(gt=0, le=1 << 16)]
    memory: Annotated[int, Field(gt=0, le=1 << 60)]
    cache: Bytes | None = None
    versions: dict[Name, Name] = Field(max_length=100)
    emulated: bool = False
    gpu: Name = ""
    driver: Name = ""

    def device(self, on: str, *, gpu: bool = False) -> dict[str, Any]:
        """Return the `device` of its rows, with its local name. Raises InputError `answer-invalid` if a GPU is missing.

        Args:
            gpu: True if its GPU ran them.
        """
        if gpu and not self.gpu:
            raise invalid(on, "no GPU")
        what = machine.gpu(self.gpu) if gpu else {"id": self.id, "kind": "cpu", "name": self.name}
        return {**what, "on": on, "machine": self.machine, "isa": self.isa}

    @property
    def flags(self) -> list[str]:
        """Flags of everything timed there."""
        return ["emulated"] if self.emulated else []

    def demand_times(self, on: str) -> None:
        """Refuse an emulator where times would decide. Raises InputError `emulated`."""
        if self.emulated:
            value, rule = f"{self.name} is emulated", "an emulator's times apply to no machine"
            raise InputError("emulated", on, value, rule, "another device")


class SideCosts(_Answer):
    """Bytes and operations of the steps of both sides, and their settings.

    Args:
        resident_bytes: GPU memory of the judged side, where known.
        linears: batch -> seconds; see `latency.LoadedSides`.
    """

    ours: StepCost
    theirs: StepCost
    settings: Settings
    resident_bytes: Bytes | None = None
    linears: dict[int, Taken | None] | None = Field(default=None, max_length=SHAPES)


class CeilingSamples(_Answer):
    """Measured ceilings of the device."""

    ceilings: tuple[Ceiling, ...] = Field(max_length=20)


class Times(_Answer):
    """A `Timing` with the clocks and temperatures around it; the start of each step is not sent.

    Args:
        seconds: side -> [blocks, 2, burst] seconds of one step.
        rounds: blocks of each round.
    """

    seconds: dict[Name, list[list[list[Taken]]]] = Field(default_factory=dict, max_length=2)
    rounds: tuple[Positive, ...] = Field(default=(), max_length=10_000)
    visit: Visit | None = None
    skipped: Flag = ""
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    @classmethod
    def of(cls, timing: Timing, before: Clocks = Clocks(), after: Clocks = Clocks()) -> Times:  # noqa: B008 (frozen)
        """Convert a timing for sending."""
        # seven digits: more than any clock has, in half the bytes
        seconds = {
            side: [[[float(f"{taken:.6e}") for taken in visit] for visit in block] for block in times.tolist()]
            for side, times in timing.seconds.items()
        }
        told: dict[str, Any] = {"rounds": timing.rounds, "visit": timing.visit, "skipped": timing.skipped}
        return cls(seconds=seconds, **told, before=before, after=after)

    def timing(self, sides: set[str], where: str, shape: Shape | None = None, *, counted: bool = True) -> Timing:
        """Convert to a `Timing` of the expected sides. Raises InputError `answer-invalid` if the times do not fit
        together.

        Args:
            counted: see `Between.of`.
        """
        try:
            seconds = {side: np.array(blocks, np.float64) for side, blocks in self.seconds.items()}
        except ValueError:  # ragged
            raise invalid(where, "times that do not fit together") from None
        sizes = {times.shape for times in seconds.values()}
        whole = (
            set(seconds) == sides
            and len(sizes) == 1
            and all(len(size) == 3 and size[:2] == (sum(self.rounds), 2) and size[2] > 0 for size in sizes)
        )
        if bool(self.skipped) == bool(seconds) or not (whole or self.skipped):
            raise invalid(where, "times that do not fit together")
        slowed = Between.of(self.before, self.after, counted=counted).throttled
        return Timing(
            seconds,
            rounds=self.rounds,
            visit=self.visit,
            shape=shape,
            skipped=self.skipped,
            settings=settings_of(self.before, self.after),
            flags=("throttled",) if slowed else (),
        )


class RoundTimes(_Answer):
    """One round of two models: see `measurement.timing.rounds`.

    Args:
        parts: times of each shape of the job.
        took: seconds of the round, both loads included.
    """

    parts: tuple[Times, ...] = Field(max_length=SHAPES)
    took: Taken
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    def round(self, sides: set[str], where: str) -> TimedRound:
        """Convert to a `TimedRound` of the expected sides. Raises InputError `answer-invalid` if the times do not
        fit together."""
        return TimedRound([part.timing(sides, where) for part in self.parts], self.took)


class ProductTimes(_Answer):
    """One variant of a linear at one batch: see `measurement.operators.products.TimedVariant`.

    Args:
        linear: index of the linear in the job.
        M: rows of the activation.
        prepared: True if it could be prepared to run.
        products: products in one step.
        resident_bytes: bytes of the weight in memory.
        times: times of one product, of the variant and of the baseline; the clocks cover the whole linear.
        hot, quantizing: seconds with the weight in the cache, and of quantizing x alone.
    """

    linear: Natural
    M: Positive
    variant: Name
    prepared: bool = False
    products: Positive = 1
    resident_bytes: Bytes | None = None
    settings: Settings = Field(default_factory=dict)
    times: Times = Times()
    hot: Taken | None = None
    quantizing: Taken | None = None


class SideMemory(_Answer):
    """Memory of a process that has loaded a model and made a step: see `timing.speed.footprint`."""

    before: Bytes
    resident: Bytes
    peak: Bytes
    new_tokens: Bytes
    context: Bytes


class Footprints(_Answer):
    """Memory of both sides."""

    ours: SideMemory
    theirs: SideMemory


class ScoredStretch(_Answer):
    """Consecutive positions of one sequence: the fields of `positions.Items`, one list each."""

    way: Literal["", "prompts", "steps"]
    sequence: Natural
    numbers: dict[Name, Annotated[list[Finite], Field(max_length=POSITIONS)]] = Field(max_length=20)


class SampleOutputs(_Answer):
    """Outputs of consecutive samples, as many numbers as one line holds.

    Args:
        first: index of the first sample.
        shapes: name -> shape [n, ...] of the whole array.
        at: numbers of these samples sent in earlier lines.
        numbers: numbers of all arrays, one after another.
    """

    first: Natural
    shapes: dict[Name, Annotated[tuple[Natural, ...], Field(max_length=16)]] = Field(max_length=64)
    at: Natural = 0
    numbers: list[Finite] = Field(max_length=NUMBERS)

    def arrays(self, numbers: Any) -> dict[str, Any]:
        """Shape all numbers of these samples: name -> [n, ...]. Raises ValueError if they do not fit."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()]).tolist()
        if not ends or ends[-1] != len(numbers):
            raise ValueError("numbers that do not fit their shapes")
        parts = np.split(numbers, ends[:-1])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


class SessionSettings(_Answer):
    """Settings of a session on the device, for its rows; versions of a runtime's own Python."""

    settings: Settings
    versions: dict[Name, Name] = Field(default_factory=dict, max_length=50)


_Latencies = Annotated[list[Finite], Field(max_length=NUMBERS)]


class LoadedPart(_Answer):
    """Consecutive requests of a visit at one rate; or a whole visit, without a rate.

    Args:
        began: start of the visit at this rate, in seconds since 1970.
    """

    side: Name
    turn: Natural
    rate: Finite | None = None
    ttfts: _Latencies = Field(default=[])
    itls: Annotated[list[_Latencies], Field(max_length=NUMBERS)] = Field(default=[])
    latencies: _Latencies = Field(default=[])
    output_lens: Annotated[list[Natural], Field(max_length=NUMBERS)] = Field(default=[])
    start_times: _Latencies = Field(default=[])
    failed: Annotated[list[bool], Field(max_length=NUMBERS)] = Field(default=[])
    in_flight: Finite | None = None
    duration: Taken | None = None
    began: Finite | None = None
    seconds: Finite | None = None
    kv_blocks: Bytes | None = None
    block_size: Positive | None = None
    peak_bytes: Bytes | None = None


class MadeTokens(_Answer):
    """Generated tokens, with seconds."""

    ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]
    seconds: Annotated[float, Field(ge=0, lt=1e9)]
    first_token_s: Annotated[float, Field(ge=0, lt=1e9)]
    notes: tuple[Annotated[str, Field(max_length=500, pattern=PRINTED)], ...] = ()


class CheckResult(_Answer):
    """Result of one check of `verify`."""

    name: Name
    ok: bool
    where: Words = ""


class Cells(Mapping[str, Rows]):
    """Cells of one work, name -> rows, in order of arrival.

    They are kept as text and parsed one cell at a time: as objects, `ANSWER` bytes of text would take twenty times the
    memory.

    Args:
        on: local name of the device.
    """

    def __init__(self, on: str) -> None:
        self.on = on
        self._texts: dict[str, bytes] = {}

    def add(self, cell: str, rows: Rows) -> None:
        """Add a cell."""
        self._texts[cell] = json.dumps(rows, separators=(",", ":")).encode()

    def __getitem__(self, cell: str) -> Rows:
        return list(json.loads(self._texts[cell]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def all(self, kind: type[Answer], prefix: str) -> Iterator[tuple[str, Answer]]:
        """Read every row of the cells with this prefix, each with its cell. Raises InputError `answer-invalid`."""
        for cell in self._texts:
            for row in self[cell] if cell.startswith(prefix) else ():
                yield cell, read(kind, row, self.on)

    def one(self, kind: type[Answer], cell: str) -> Answer:
        """Read the only row of a cell. Raises InputError `answer-invalid`."""
        rows = self.get(cell, ())
        return read(kind, rows[0] if len(rows) == 1 else None, self.on)

    @property
    def about(self) -> DeviceFacts:
        """Facts of the device. Raises InputError `answer-invalid`."""
        return self.one(DeviceFacts, "about")


def ceilings_of(answers: Cells) -> list[Ceiling]:
    """Join the ceilings measured before and, if present, after. Raises InputError `answer-invalid`."""
    before = answers.one(CeilingSamples, "ceilings").ceilings
    if "ceilings-after" not in answers:
        return list(before)
    after = answers.one(CeilingSamples, "ceilings-after").ceilings
    if [ceiling.name for ceiling in before] != [ceiling.name for ceiling in after]:
        raise invalid(answers.on, "other ceilings than before")
    return list(joined(before, after))


def dumped(answer: BaseModel) -> dict[str, Any]:
    """Convert an answer to a row of a line."""
    data: dict[str, Any] = TypeAdapter(type(answer)).dump_python(answer, mode="json")
    return data


def read(kind: type[Answer], row: Any, where: str) -> Answer:
    """Validate a row of a line as `kind`. Raises InputError `answer-invalid`."""
    try:
        return kind.model_validate(row)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise invalid(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@contextmanager
def believed(where: str) -> Iterator[None]:
    """Turn errors in computing rows from a device's figures into InputError `answer-invalid`.

    Each figure alone is valid, but together they may not be.
    """
    try:
        yield
    except ValidationError as problem:
        first = problem.errors()[0]
        raise invalid(where, f"{problem.title}, {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ArithmeticError as problem:
        raise invalid(where, f"figures that do not fit together: {problem}") from None


def invalid(where: str, value: str) -> InputError:
    """Return the error for an unexpected answer."""
    rule, remedy = "a device answers in this version's form", "run it again; if it persists, check the programs there"
    return InputError("answer-invalid", where, value[:200], rule, remedy)
