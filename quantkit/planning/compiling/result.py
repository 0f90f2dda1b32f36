"""What a compile runs on, and what it is predicted to take there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from quantkit.target import Target

RATES = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class Machine:
    """What a compile runs on.

    Args:
        cores: that torch computes with.
        fp32: flop/s of all of them.
        read: B/s from memory.
        assumed: where the figures are not this machine's, whose they are.
    """

    name: str
    cores: int
    fp32: float
    read: float
    assumed: str = ""

    @classmethod
    def of(cls, target: Target | None, cores: int) -> Self:
        """The machine that a CPU target describes; without measured figures that of the table, scaled by cores.

        Args:
            target: with `doctor --write`'s figures, if it was run here.
            cores: that may be used.
        """
        fitted = shipped().machine
        figures = target.figures() if target is not None and target.kind == "cpu" else {}
        found = {place: figure.value for place, figure in figures.items() if isinstance(figure.value, float)}
        if target is not None and {"compute.fp32", "memory.read_bandwidth"} <= found.keys():
            return cls(target.name, cores, found["compute.fp32"], found["memory.read_bandwidth"])
        share = cores / fitted["cores"]
        assumed = f"a core like those of {fitted['name']}: quantkit doctor --write measures this machine's"
        return cls(fitted["name"], cores, fitted["fp32"] * share, fitted["read"], assumed)


@dataclass(frozen=True)
class Rates:
    """What was learned of compiles.

    Args:
        kinds: kind of work -> `of` (the figure that it goes by), `value` (the share of it that is reached; of `clock`
            seconds a unit), `parallel` (whether on all cores).
        memory: part -> what it holds -> how often that is there at once; of what is counted as 1, bytes.
        interval: real over predicted seconds, from the least to the most that was seen of models that were not fitted.
        machine: `name`, `cores`, `fp32`, `read` of the one that it was learned on.
        sharing: of the cores, how much work that runs on all of them keeps busy.
    """

    kinds: Mapping[str, Mapping[str, Any]]
    memory: Mapping[str, Mapping[str, float]]
    interval: tuple[float, float]
    machine: Mapping[str, Any]
    sharing: float = 1.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `rates.json` holds."""
        low, high = data["interval"]
        return cls(data["kinds"], data["memory"], (low, high), data["machine"], data.get("sharing", 1.0))

    def seconds(self, kind: str, machine: Machine) -> float:
        """Processor seconds that one unit of a kind of work takes."""
        rate = self.kinds.get(kind)
        if rate is None or not rate["value"]:
            return 0.0
        if rate["of"] == "clock":
            return float(rate["value"])
        figure = machine.fp32 / machine.cores if rate["of"] == "fp32" else machine.read
        return 1.0 / (figure * float(rate["value"]))

    def at_once(self, kind: str, machine: Machine) -> float:
        """Processor seconds of a kind of work that pass in one by the clock."""
        if kind not in self.kinds or not self.kinds[kind]["parallel"]:
            return 1.0
        return max(1.0, machine.cores * self.sharing)


@cache
def shipped() -> Rates:
    """`rates.json`."""
    return Rates.from_dict(json.loads(RATES.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Args:
        bundle: of the result.
        work: beside it while it is built: codes and hidden states.
        cache: in the user's cache: the float model as a graph, where speed is measured.
    """

    bundle: float
    work: float
    cache: float

    @property
    def most(self) -> float:
        """What the bundle's disk has to hold at one time."""
        return self.bundle + self.work


@dataclass(frozen=True)
class Compiling:
    """What a compile takes.

    Args:
        seconds: by stage, in order: `open`, `quantize`, `export`, `check`, `build`, `score`, `speed`, `finish`; of a
            graph `ranges`, `codes`, `mixed`, `score`, `speed`.
        cpu_seconds: the same, summed over cores.
        interval: factors on `seconds` between which compiles of other models than the fitted ones lay; 1 and 1 where
            no compile was fitted.
        memory: part -> bytes resident at its peak; a graph's timing runs in processes of its own and is not in it.
        notes: what was assumed.
        device: how it lies on a GPU, if it computes on one: bytes, and sequences that go through at once.
    """

    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    interval: tuple[float, float]
    memory: Mapping[str, float]
    disk: Disk
    machine: Machine
    notes: tuple[str, ...] = ()
    device: Mapping[str, Any] | None = None

    @property
    def total(self) -> float:
        """Seconds, all stages."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        """Bytes of memory."""
        return max(self.memory.values())

    @property
    def at_peak(self) -> str:
        """The part that takes the most memory."""
        return max(self.memory, key=lambda part: self.memory[part])

    def as_dict(self) -> dict[str, Any]:
        """As JSON: seconds and bytes."""
        low, high = self.interval
        return {
            "seconds": dict(self.seconds),
            "total_seconds": self.total,
            "total_interval": [self.total * low, self.total * high],
            "cpu_seconds": sum(self.cpu_seconds.values()),
            "memory_peak_bytes": round(self.peak),
            "memory_peak_at": self.at_peak,
            "disk_bytes": {name: round(getattr(self.disk, name)) for name in ("bundle", "work", "cache")},
            "machine": self.machine.name,
            "notes": list(self.notes),
            **({"device": dict(self.device)} if self.device else {}),
        }
