"""Report the progress of the pipeline, and the seconds of each stage."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from quantkit import given, machine


class Progress:
    """Receives the stages and the share of each that is done. This one shows nothing."""

    def begin(self, what: str) -> None:
        """Set the current activity."""

    def plan(self, stages: Mapping[str, float]) -> None:
        """Receive the coming stages in order, with the number of parts of each."""

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """Receive the share of a stage that is done, 0 to 1; `detail` names the current part."""

    def note(self, line: str) -> None:
        """Receive a line for the user: a decision, a caveat."""


@contextmanager
def showing(asked: bool = True) -> Iterator[Progress]:
    """Show progress: a bar on a terminal or in a notebook, else lines on stderr; nothing if `asked` is False.

    Raises InputError: `usage`, what is neither True nor False.
    """
    given.flags(progress=asked)
    if not asked:
        yield Progress()
        return
    from quantkit.report.kit.progress import Display, notebook

    class Shown(Display, Progress):
        """A display with the interface of `Progress`."""

    with Shown(sys.stderr, live=sys.stderr.isatty(), cell=notebook()) as shown:
        yield shown


class Overall(Progress):
    """One share for all stages together; it never falls.

    Args:
        report: function called with that share, the stage and its detail.
        note: function called with notes.
    """

    def __init__(self, report: Callable[[float, str], None], note: Callable[[str], None] = lambda _: None) -> None:
        self._report, self._note = report, note
        self._stages: dict[str, float] = {}
        self._share = 0.0

    def plan(self, stages: Mapping[str, float]) -> None:
        """See `Progress`."""
        self._stages = dict(stages)

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """See `Progress`."""
        names = list(self._stages)
        if stage in names:
            over = sum(self._stages[name] for name in names[: names.index(stage)]) + done * self._stages[stage]
            self._share = max(self._share, min(over / (sum(self._stages.values()) or 1.0), 1.0))
        self._report(self._share, f"{stage} {detail}".rstrip())

    def note(self, line: str) -> None:
        """See `Progress`."""
        self._note(line)


@dataclass(frozen=True)
class Stage:
    """A finished stage.

    Attributes:
        name: `open`, `prove`, `quantize`, `train`, `export`, `check`, `build`, `score`, `speed` or `finish`.
        seconds: wall-clock seconds.
        cpu_seconds: user and system seconds of this process, its threads, and the processes that it waited for.
        memory_peak_bytes: largest resident size of this process up to the stage's end.
    """

    name: str
    seconds: float
    cpu_seconds: float
    memory_peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as it stands in a result."""
        return asdict(self)


class Stages:
    """Stopwatch: `begin` ends the stage before. The first stage begins with the object."""

    def __init__(self, first: str = "open") -> None:
        self.ended: list[Stage] = []
        self._name, self._began = first, self._now()

    def begin(self, name: str) -> None:
        """End the present stage and begin another."""
        self.end()
        self._name = name

    def end(self) -> list[Stage]:
        """End the present stage; return all that have ended."""
        now = self._now()
        wall, cpu = (after - before for after, before in zip(now, self._began, strict=True))
        self.ended.append(Stage(self._name, wall, cpu, machine.peak_bytes()))
        self._began = now
        return self.ended

    def _now(self) -> tuple[float, float]:
        used = os.times()  # of this process it counts hundredths of a second, which a short stage has none of
        return time.perf_counter(), time.process_time() + used.children_user + used.children_system
