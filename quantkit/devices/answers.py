"""What the cells of a job hold: written there, and validated here before anything is made of it.

All numbers are finite and every list has a limit: a line (`job.LINE`) is as much as one cell can be.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.clocks import Clocks

# that a line holds: of a stretch of positions ten for each, of up to 25 bytes; of samples
POSITIONS, NUMBERS = 1024, 40_000
Finite = Annotated[float, Field(allow_inf_nan=False)]
Taken = Annotated[float, Field(gt=0, lt=1e6)]
Name = Annotated[str, Field(max_length=200)]
Setting = str | bool | int | Finite | None
Answer = TypeVar("Answer", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    """

    id: Name
    name: Name
    machine: Name
    isa: Name
    cores: Annotated[int, Field(gt=0)]
    memory: Annotated[int, Field(gt=0)]
    cache: int | None = None
    versions: dict[Name, Name] = Field(max_length=100)
    emulated: bool = False

    def device(self, on: str) -> dict[str, Any]:
        """The `device` of its rows; `on` is what it is called here."""
        return {"id": self.id, "kind": "cpu", "name": self.name, "on": on, "machine": self.machine, "isa": self.isa}

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
    """What the steps of both must move and compute, and how they run."""

    ours: StepCost
    theirs: StepCost
    settings: dict[Name, Setting] = Field(max_length=50)


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
    skipped: Annotated[str, Field(pattern=r"^[a-z-]{0,64}$")] = ""
    before: Clocks = Clocks()
    after: Clocks = Clocks()

    def demand_whole(self, sides: set[str], where: str) -> None:
        """Refuse times that do not fit together. Raises InputError `answer-invalid`."""
        try:
            sizes = {np.array(blocks, np.float64).shape for blocks in self.seconds.values()}
        except ValueError:  # ragged
            sizes = set()
        size = next(iter(sizes), ())
        whole = set(self.seconds) == sides and len(sizes) == 1
        if not whole or len(size) != 3 or size[:2] != (sum(self.rounds), 2) or not size[2]:
            raise invalid(where, "times that do not fit together")


class Footprints(_Answer):
    """Bytes of a process that has loaded a model and made a step: see `timing.speed.footprint`."""

    ours: dict[Name, Annotated[int, Field(ge=0)]]
    theirs: dict[Name, Annotated[int, Field(ge=0)]]


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

    ids: tuple[Annotated[int, Field(ge=0)], ...]
    seconds: Finite
    first_token_s: Finite
    notes: tuple[Annotated[str, Field(max_length=500)], ...] = ()


class CheckResult(_Answer):
    """A check of `verify`."""

    name: Name
    ok: bool
    where: Annotated[str, Field(max_length=2000)] = ""


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


def invalid(where: str, value: str) -> InputError:
    """The error of an answer that is not what was asked for."""
    return InputError(
        "answer-invalid",
        where=where,
        value=value[:200],
        rule="a device answers as this version writes",
        remedy="run it again; if it stays, what runs there is not this version's",
    )
