"""What an executor is given, what it gives back, and the process of its own in which a job runs.

A job's process commits what it finds to the store itself, so that a lost answer loses nothing; an outcome tells only
how the process ended. Whatever happens in it, a Python error, a signal, too little memory, no end: it is an outcome,
and never the end of the night.
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

# seconds between two words on progress
_SELDOM = 0.2


@dataclass(frozen=True)
class BuildJob:
    """A build whose cells are to be measured. Plain data, for other processes and other machines.

    Args:
        config: path of the `nightly.yaml`.
        config_sha256: of that file when the night began.
        cells: keys, all of one build.
        attempt: 1, and 2 for the repetition that an alarm asks for.
        limit: seconds after which its process is ended.
        device: YAML of what its cells are measured on, as this user knows it: a node of a cluster need not know it.
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
        """Its key."""
        return NightCell.of(self.cells[0]).build

    @property
    def place(self) -> str:
        """What a node of a cluster offers that it can run on."""
        return self.on or NightCell.of(self.cells[0]).target

    @property
    def on(self) -> str:
        """The device that its cells are measured on; empty: the machine that builds it."""
        return NightCell.of(self.cells[0]).on


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: `missing` where there is no machine for it; the five fields of the error unless it is done."""

    job: BuildJob
    state: Literal["done", "failed", "missing"]
    error: Mapping[str, str] | None = None

    @classmethod
    def of(cls, job: BuildJob, problem: QuantkitError, state: Literal["failed", "missing"] = "failed") -> JobOutcome:
        """Make the outcome of what went wrong."""
        return cls(job, state, problem.as_dict())


# what a job's process runs: a function of a module
Work = Callable[[BuildJob, Progress], None]


class Executor(Protocol):
    """Runs jobs, here or elsewhere."""

    def ready(self) -> None:
        """Refuse to begin a night that could not be run. Raises InputError."""
        ...

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """Run every job once, and give its outcome as it ends.

        Raises:
            Stopped: the disk is full. On an interrupt nothing of the jobs is left running.
        """
        ...


def contained(
    job: BuildJob, work: Work, progress: Progress, *, alone: bool = True, over: threading.Event | None = None
) -> JobOutcome:
    """Run a job in a process of its own.

    Args:
        alone: one at a time on this machine: timing needs a quiet one.
        over: ends it once it is set.

    Raises:
        Stopped: the disk is full, `over` is set, or somebody ended the process safely.
    """
    with _machine(progress) if alone else nullcontext():
        try:
            child.run(
                _run,
                {"job": asdict(job), "module": work.__module__, "function": work.__qualname__},
                lambda share, words: progress.at(job.build, share, words),
                where=job.build,
                died="process-died",
                remedy="look into the system's log; raise `limit` in nightly.yaml if it was still at work",
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
    """What the job's process does."""
    signal.signal(signal.SIGTERM, _interrupt)
    job = BuildJob(**{**data["job"], "cells": tuple(data["job"]["cells"])})
    work: Work = getattr(import_module(data["module"]), data["function"])
    said = 0.0

    def report(share: float, words: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _SELDOM:
            said = time.monotonic()
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
    """One job at a time on a machine, whoever runs it; the kernel frees the lock of one that is killed."""
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
