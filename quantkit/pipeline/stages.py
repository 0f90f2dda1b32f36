"""What each stage of a compile took, to be set against what was expected: seconds, processor seconds, memory."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from quantkit import machine


@dataclass(frozen=True)
class Stage:
    """One stage that has ended.

    Args:
        name: `open`, `prove`, `quantize`, `export`, `check`, `build`, `score`, `speed` or `finish`.
        seconds: by the wall clock.
        cpu_seconds: user and system, of this process, all its threads, and the processes that it waited for.
        memory_peak_bytes: the most that this process has had resident up to its end.
    """

    name: str
    seconds: float
    cpu_seconds: float
    memory_peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a result."""
        return asdict(self)


class Stages:
    """A stop watch: `begin` ends the stage before. The first one runs from the making of it."""

    def __init__(self, first: str = "open") -> None:
        self.ended: list[Stage] = []
        self._name = first
        self._began = self._now()

    def begin(self, name: str) -> None:
        """End the present stage and begin another."""
        self.end()
        self._name = name

    def end(self) -> list[Stage]:
        """End the present stage; all that have ended."""
        now = self._now()
        wall, cpu = (after - before for after, before in zip(now, self._began, strict=True))
        self.ended.append(Stage(self._name, wall, cpu, machine.peak_bytes()))
        self._began = now
        return self.ended

    def _now(self) -> tuple[float, float]:
        used = os.times()  # of this process it counts hundredths of a second, which a short stage has none of
        return time.perf_counter(), time.process_time() + used.children_user + used.children_system
