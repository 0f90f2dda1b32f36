"""Validates a device's answers, which are a stranger's data.

All numbers are finite and every list has a limit: a line (`LINE`) is as much as one cell can be.
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
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.clocks import Clocks
from quantkit.measurement.timing.rounds import TimedRound
from quantkit.measurement.timing.schedule import Timing, Visit

# bytes of one line, and of all lines of a work
LINE, ANSWER = 1 << 20, 1 << 28
# shapes that are timed in rounds: a round is a line
SHAPES = 500
# how the cells of products begin, and those of rounds
LINEAR, ROUND = "linear-", "round-"
# blocks of one product, at most
_BLOCKS = 10_000
# that a line holds: of a stretch of positions ten for each, of up to 25 bytes; of samples
POSITIONS, NUMBERS = 1024, 40_000
Finite = Annotated[float, Field(allow_inf_nan=False)]
# seconds: of a step that takes less, no rate would be a number
Taken = Annotated[float, Field(gt=1e-12, lt=1e6)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Name = Annotated[str, Field(max_length=200, pattern=PRINTED)]
Flag = Annotated[str, Field(pattern=r"^[a-z-]{0,64}$")]
Setting = Annotated[str, Field(max_length=2000, pattern=PRINTED)] | bool | int | Finite | None
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
    """The rows of one cell, in JSON's types; each reader validates them as what it asked for."""

    cell: Annotated[str, Field(max_length=200)]
    rows: tuple[dict[str, Any], ...] = Field(max_length=10_000)


class DeviceFacts(_Answer):
    """The device, as it knows itself.

    Args:
        id: equal on machines of the same kind.
        name: of the processor.
        machine: `aarch64`.
        isa: the best instruction set for quantized kernels.
        cores: that a process may keep busy.
        memory: bytes that it may use.
        cache: bytes of the last-level cache.
        versions: package -> version.
        emulated: whether its processor is a program.
        gpu: the name of its first NVIDIA GPU; empty where it has none, or cannot tell.
        driver: of that.
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
        """The `device` of its rows.

        Args:
            on: what it is called here.
            gpu: of those that its GPU ran.

        Raises:
            InputError: `answer-invalid`, it has none.
        """
        if gpu and not self.gpu:
            raise invalid(on, "no GPU")
        what = machine.gpu(self.gpu) if gpu else {"id": self.id, "kind": "cpu", "name": self.name}
        return {**what, "on": on, "machine": self.machine, "isa": self.isa}

    @property
    def flags(self) -> list[str]:
        """Of all that is timed there."""
        return ["emulated"] if self.emulated else []

    def demand_times(self, on: str) -> None:
        """Refuse a device whose times say nothing, where they would decide. Raises InputError `emulated`.

        Args:
            on: what the device is called.
        """
        if self.emulated:
            rule = "an emulator's times say nothing of any machine"
            raise InputError(
                "emulated", where=on, value=f"{self.name} is a program", rule=rule, remedy="another device"
            )


class SideCosts(_Answer):
    """What the steps of both must move and compute, and how they run.

    Args:
        resident_bytes: what is judged takes of a GPU's memory, where known.
        linears: batch -> see `latency.LoadedSides`.
    """

    ours: StepCost
    theirs: StepCost
    settings: dict[Name, Setting] = Field(max_length=50)
    resident_bytes: Bytes | None = None
    linears: dict[int, Taken | None] | None = Field(default=None, max_length=SHAPES)


class CeilingSamples(_Answer):
    """What the device can do at best, as far as it was measured."""

    ceilings: tuple[Ceiling, ...] = Field(max_length=20)


class ShapeTimes(_Answer):
    """One shape.

    Args:
        seconds: side -> [blocks, 2, burst] of one step.
        rounds: blocks of each.
        skipped: why there are no times.
        before, after: clocks and temperature.
    """

    seconds: dict[Name, list[list[list[Taken]]]] = Field(default_factory=dict, max_length=2)
    rounds: tuple[Annotated[int, Field(gt=0)], ...] = ()
    skipped: Flag = ""
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    def demand_whole(self, sides: set[str], where: str) -> None:
        """Refuse times that do not fit together. Raises InputError `answer-invalid`."""
        if set(self.seconds) != sides or not _fitting([*self.seconds.values()], self.rounds):
            raise invalid(where, "times that do not fit together")


class PartTimes(_Answer):
    """One shape in one round: see `measurement.timing.schedule.Timing`; `seconds` and `skipped` as in `ShapeTimes`."""

    seconds: dict[Name, list[list[list[Taken]]]] = Field(default_factory=dict, max_length=2)
    visit: Visit | None = None
    skipped: Flag = ""


class RoundTimes(_Answer):
    """One round of two models: see `measurement.timing.rounds`.

    Args:
        parts: of each shape of the job.
        took: seconds, with both loads.
        before, after: clocks and temperature.
    """

    parts: tuple[PartTimes, ...] = Field(max_length=SHAPES)
    took: Taken
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    @classmethod
    def of(cls, found: TimedRound, before: Clocks, after: Clocks) -> RoundTimes:
        """As it was taken; when each step began is not in it."""
        parts = []
        for part in found.parts:
            times = {side: each.tolist() for side, each in part.seconds.items()}
            parts.append(PartTimes(seconds=times, visit=part.visit, skipped=part.skipped))
        return cls(parts=tuple(parts), took=found.seconds, before=before, after=after)

    def round(self, sides: set[str], where: str) -> TimedRound:
        """The opposite of `of`. Raises InputError `answer-invalid`, its times do not fit together."""
        parts = []
        for part in self.parts:
            blocks = len(next(iter(part.seconds.values()), ()))
            if not part.skipped and not (
                set(part.seconds) == sides and blocks and _fitting([*part.seconds.values()], (blocks,))
            ):
                raise invalid(where, "times that do not fit together")
            times = {side: np.array(each) for side, each in part.seconds.items()}
            parts.append(Timing(times, rounds=(blocks,), visit=part.visit, skipped=part.skipped))
        return TimedRound(parts, self.took)


class ProductTimes(_Answer):
    """One variant of a linear at one batch: see `measurement.operators.products.TimedVariant`.

    Args:
        linear: its number among those of the job.
        M: rows of the activation.
        prepared: whether it could be made to run.
        products: that one step runs.
        resident_bytes: of the weight as it is run.
        settings: how it ran.
        ours, theirs: [blocks, 2, burst] seconds of one product, of the variant and of the baseline; empty if skipped.
        rounds: blocks of each.
        skipped: the flag why there are no times.
        hot, quantizing: seconds with the weight in the cache, and of quantizing x alone.
        before, after: clocks and temperature, of all of the linear.
    """

    linear: Annotated[int, Field(ge=0)]
    M: Annotated[int, Field(gt=0)]
    variant: Name
    prepared: bool = False
    products: Annotated[int, Field(gt=0)] = 1
    resident_bytes: Bytes | None = None
    settings: dict[Name, Setting] = Field(default_factory=dict, max_length=50)
    ours: list[list[list[Taken]]] = Field(default_factory=list, max_length=_BLOCKS)
    theirs: list[list[list[Taken]]] = Field(default_factory=list, max_length=_BLOCKS)
    rounds: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(), max_length=100)
    skipped: Flag = ""
    hot: Taken | None = None
    quantizing: Taken | None = None
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    def demand_whole(self, where: str) -> None:
        """Refuse times that do not fit together. Raises InputError `answer-invalid`."""
        if self.skipped:
            if self.ours or self.theirs:
                raise invalid(where, "times of what was skipped")
        elif not (self.prepared and _fitting([self.ours, self.theirs], self.rounds) and sum(self.rounds) > 1):
            raise invalid(where, "times that do not fit together")


class Footprints(_Answer):
    """Bytes of a process that has loaded a model and made a step: see `timing.speed.footprint`."""

    ours: dict[Name, Bytes]
    theirs: dict[Name, Bytes]


class ScoredStretch(_Answer):
    """Consecutive positions of one sequence: the numbers of `positions.Items`, a list each."""

    way: Literal["", "prompts", "steps"]
    sequence: Annotated[int, Field(ge=0)]
    found: dict[Name, Annotated[list[Finite], Field(max_length=POSITIONS)]] = Field(max_length=20)


class SampleOutputs(_Answer):
    """What came out for consecutive samples, as much of it as one line holds.

    Args:
        first: sample.
        shapes: name -> of its array [n, ...], all of it.
        at: how many numbers of these samples came before.
        numbers: of all arrays, one after another.
    """

    first: Annotated[int, Field(ge=0)]
    shapes: dict[Name, Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16)]] = Field(max_length=64)
    at: Annotated[int, Field(ge=0)] = 0
    numbers: list[Finite] = Field(max_length=NUMBERS)

    def arrays(self, numbers: Any) -> dict[str, Any]:
        """Name -> array [n, ...], of all numbers of these samples. Raises ValueError where they do not fit."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()]).tolist()
        if not ends or ends[-1] != len(numbers):
            raise ValueError("numbers that do not fit their shapes")
        parts = np.split(numbers, ends[:-1])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


class SessionSettings(_Answer):
    """How a model runs there: of its session's settings."""

    settings: dict[Name, Setting] = Field(max_length=50)


class MadeTokens(_Answer):
    """Tokens that a model went on with, and seconds."""

    ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]
    seconds: Annotated[float, Field(ge=0, lt=1e9)]
    first_token_s: Annotated[float, Field(ge=0, lt=1e9)]
    notes: tuple[Annotated[str, Field(max_length=500, pattern=PRINTED)], ...] = ()


class CheckResult(_Answer):
    """A check of `verify`."""

    name: Name
    ok: bool
    where: Annotated[str, Field(max_length=2000)] = ""


class Cells(Mapping[str, Rows]):
    """The cells of one work, name -> rows, in the order in which they came.

    They are text, made objects of one cell at a time: as objects, what `ANSWER` lets through would take twenty times as
    much memory.

    Args:
        on: what the device is called.
    """

    def __init__(self, on: str) -> None:
        self.on = on
        self._texts: dict[str, bytes] = {}

    def add(self, cell: str, rows: Rows) -> None:
        """Take one more."""
        self._texts[cell] = json.dumps(rows, separators=(",", ":")).encode()

    def __getitem__(self, cell: str) -> Rows:
        return list(json.loads(self._texts[cell]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def one(self, kind: Any, cell: str) -> Any:
        """The only row of a cell, as what it has to be. Raises InputError `answer-invalid`."""
        rows = self.get(cell, ())
        return read(kind, rows[0] if len(rows) == 1 else None, self.on)

    @property
    def about(self) -> DeviceFacts:
        """The device. Raises InputError `answer-invalid`."""
        found: DeviceFacts = self.one(DeviceFacts, "about")
        return found


def _fitting(sides: Sequence[Any], rounds: Sequence[int]) -> bool:
    """Whether times of several sides are of the same blocks, [blocks, 2, burst]."""
    try:
        sizes = {np.array(blocks, np.float64).shape for blocks in sides}
    except ValueError:  # ragged
        return False
    size = next(iter(sizes), ())
    return len(sizes) == 1 and len(size) == 3 and size[:2] == (sum(rounds), 2) and size[2] > 0


def dumped(answer: BaseModel) -> dict[str, Any]:
    """As a row of a line."""
    data: dict[str, Any] = TypeAdapter(type(answer)).dump_python(answer, mode="json")
    return data


def read(kind: type[Answer], row: Any, where: str) -> Answer:
    """A row of a line as what it has to be. Raises InputError `answer-invalid`."""
    try:
        return kind.model_validate(row)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise invalid(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@contextmanager
def believed(where: str) -> Iterator[None]:
    """In the body rows are made of what a device says: each of its figures is one, but together they may give none.

    Raises:
        InputError: `answer-invalid`.
    """
    try:
        yield
    except ValidationError as problem:
        first = problem.errors()[0]
        raise invalid(where, f"{problem.title}, {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ArithmeticError as problem:
        raise invalid(where, f"figures that do not fit together: {problem}") from None


def invalid(where: str, value: str) -> InputError:
    """The error of an answer that is not what was asked for."""
    rule, remedy = "a device answers as this version writes", "run it again; if it stays, look at what runs there"
    return InputError("answer-invalid", where=where, value=value[:200], rule=rule, remedy=remedy)
