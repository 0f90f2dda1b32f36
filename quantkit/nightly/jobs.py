"""Define jobs, outcomes and executors, and the separate process that runs a job.

A job's process commits its results to the store itself, so a lost answer loses nothing; an outcome only tells how the
process ended. A Python error, a signal, too little memory or a hang becomes an outcome, never the end of the night.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from quantkit import content
from quantkit.bundle import disk
from quantkit.errors import InputError, QuantkitError, Stopped
from quantkit.model.device import is_out_of_memory
from quantkit.nightly.records import NightCell
from quantkit.pipeline.progress import Overall, Progress
from quantkit.runtimes import child

# seconds between two progress reports
_SELDOM = 0.2


@dataclass(frozen=True)
class BuildJob:
    """A build with cells to measure: plain data, for other processes and machines.

    Args:
        config: path of the `nightly.yaml`.
        config_sha256: hash of that file when the night began.
        cells: keys of cells, all of one build.
        attempt: 1, or 2 for the repetition after an alarm.
        limit: seconds after which its process is ended.
        device: YAML of the device to measure on; a cluster's node need not know the device.
    """

    night: str
    config: str
    config_sha256: str
    cells: tuple[str, ...]
    attempt: int
    limit: float
    device: str = ""

    @property
    def build(self) -> str:
        """Key of the build."""
        return NightCell.of(self.cells[0]).build

    @property
    def place(self) -> str:
        """Resource required of a cluster's node."""
        return self.on or NightCell.of(self.cells[0]).target

    @property
    def on(self) -> str:
        """Device to measure on; empty for the machine that builds."""
        return NightCell.of(self.cells[0]).on


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a job: `missing` without a machine for it; otherwise with the five fields of its error unless it is
    done."""

    job: BuildJob
    state: Literal["done", "failed", "missing"]
    error: Mapping[str, str] | None = None

    @classmethod
    def of(cls, job: BuildJob, problem: QuantkitError, state: Literal["failed", "missing"] = "failed") -> JobOutcome:
        """Return the outcome of an error."""
        return cls(job, state, problem.as_dict())


# the function of a module that a job's process runs
Work = Callable[[BuildJob, Progress], None]


class Executor(Protocol):
    """Runner of jobs, here or elsewhere."""

    def ready(self) -> None:
        """Refuse to start a night that cannot run. Raises InputError."""
        ...

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """Run every job once, and yield its outcome as it ends.

        Raises Stopped: the disk is full. After an interrupt, no job keeps running.
        """
        ...


def contained(
    job: BuildJob, work: Work, progress: Progress, *, alone: bool = True, over: threading.Event | None = None
) -> JobOutcome:
    """Run a job in a process of its own.

    Args:
        alone: True to run one job at a time on this machine, since timing needs a quiet one.
        over: event that ends the job.

    Raises Stopped: the disk is full, `over` is set, or the process was ended safely.
    """
    with _machine(progress) if alone else nullcontext():
        try:
            child.run(
                _run,
                {"job": asdict(job), "module": work.__module__, "function": work.__qualname__},
                lambda share, words: progress.at(job.build, share, words),
                where=job.build,
                died="process-died",
                remedy="read the system's log; raise `limit` in nightly.yaml if the job was still running",
                seconds=job.limit,
                note=progress.note,
                shown=True,
                over=over,
            )
        except Stopped:
            raise
        except QuantkitError as problem:
            return JobOutcome.of(job, problem)
    return JobOutcome(job, "done")


def _run(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Run in the job's process."""
    signal.signal(signal.SIGTERM, _interrupt)
    job = BuildJob(**{**data["job"], "cells": tuple(data["job"]["cells"])})
    work: Work = getattr(import_module(data["module"]), data["function"])
    reported = 0.0

    def report(share: float, words: str) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _SELDOM:
            reported = time.monotonic()
            caller.at(share, words)

    try:
        work(job, Overall(report, caller.note))
    except Exception as problem:
        if isinstance(problem, QuantkitError) or is_out_of_memory(problem):
            raise
        traceback.print_exc()
        raise _unexpected(job, problem) from None


def _unexpected(job: BuildJob, problem: Exception) -> InputError:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    value, remedy = f"{type(problem).__name__}: {problem}", "the log has the traceback; please report it"
    rule = f"raised in {last.name}, {Path(last.filename).name}:{last.lineno}"
    return InputError("internal-error", where=job.build, value=value, rule=rule, remedy=remedy)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _machine(progress: Progress) -> Iterator[None]:
    """Hold the machine's lock for one job at a time; the kernel frees the lock of a killed process."""
    place = content.cache_dir() / "nightly.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = disk.lock_file(place)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("waiting for another night's build on this machine: timing needs a quiet one")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
