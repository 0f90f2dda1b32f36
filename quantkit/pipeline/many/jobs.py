"""Define jobs, outcomes and executors, and the separate process that runs a job.

A job's process commits its results itself, so a lost answer loses nothing; an outcome only tells how the process ended.
A Python error, a signal, too little memory or a hang becomes an outcome, never the end of the other jobs.
"""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from quantkit import content
from quantkit.bundle import disk
from quantkit.errors import InputError, QuantkitError, Stopped
from quantkit.model.device import is_out_of_memory
from quantkit.pipeline.progress import Overall, Progress
from quantkit.runtimes import child

# seconds between two progress reports
_SELDOM = 0.2


class Job:
    """Work for a process of its own: a dataclass of plain data, for other processes and machines.

    Attributes:
        limit: seconds after which its process is ended; None for no limit.
        alone: True to run one such job at a time on a machine, since timing needs a quiet one.
    """

    limit: float | None
    alone: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name, one of its kind in a run."""
        raise NotImplementedError

    @property
    def on(self) -> str:
        """Device to measure on; empty for the machine that runs the job."""
        return ""

    @property
    def place(self) -> str:
        """Resource of a cluster's node that the job takes one unit of: a name, `GPU`, or `CPU` for a whole node."""
        raise NotImplementedError

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and folders to be seen by a node."""
        raise NotImplementedError


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class JobOutcome(Generic[J]):
    """Outcome of a job: `missing` without a machine for it; otherwise with the five fields of its error unless it is
    done.

    Attributes:
        answer: returned value of its work, as JSON can hold it.
        exit: exit code of its error.
        node: machine where it ran.
    """

    job: J
    state: Literal["done", "failed", "missing"]
    error: Mapping[str, str] | None = None
    answer: Any = None
    exit: int = 0
    node: str = field(default="", compare=False)

    @classmethod
    def of(cls, job: J, problem: QuantkitError, state: Literal["failed", "missing"] = "failed") -> JobOutcome[J]:
        """Return the outcome of an error."""
        return cls(job, state, problem.as_dict(), exit=problem.exit, node=platform.node())


# the function of a module that a job's process runs, with the job
Work = Callable[[Any, Progress], Any]


class Executor(Protocol):
    """Runner of jobs, here or elsewhere."""

    def ready(self) -> None:
        """Check the place where jobs would run. Raises InputError."""
        ...

    def run(self, jobs: Sequence[J], work: Work, progress: Progress) -> Iterator[JobOutcome[J]]:
        """Run every job once, and yield its outcome as it ends.

        Raises Stopped: the disk is full. After an interrupt, no job keeps running.
        """
        ...


def contained(
    job: J, work: Work, progress: Progress, *, over: threading.Event | None = None, threads: int | None = None
) -> JobOutcome[J]:
    """Run a job in a process of its own.

    Args:
        over: event that ends the job, which then runs beside those of other devices.
        threads: number of its threads; None for that of this process.

    Raises Stopped: the disk is full, `over` is set, or the process was ended safely.
    """
    with _machine(progress) if job.alone and over is None else nullcontext():
        try:
            answers = child.run(
                _run,
                {"job": vars(job), "kind": _place(type(job)), "work": _place(work)},
                lambda share, words: progress.at(job.name, share, words),
                where=job.name,
                died="process-died",
                remedy="read the system's log; raise `limit` in the configuration if the job was still running",
                environment=None if threads is None else {"OMP_NUM_THREADS": str(threads)},
                seconds=job.limit,
                note=progress.note,
                shown=True,
                over=over,
            )
        except Stopped:
            raise
        except QuantkitError as problem:
            return JobOutcome.of(job, problem)
    return JobOutcome(job, "done", answer=next(iter(answers), None), node=platform.node())


def _place(thing: Any) -> list[str]:
    return [thing.__module__, thing.__qualname__]


def _found(place: Sequence[str]) -> Any:
    return getattr(import_module(place[0]), place[1])


def _run(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Run in the job's process."""
    signal.signal(signal.SIGTERM, _interrupt)
    # JSON has no tuples
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in data["job"].items()}
    job, work = _found(data["kind"])(**fields), _found(data["work"])
    reported = 0.0

    def report(share: float, words: str) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _SELDOM:
            reported = time.monotonic()
            caller.at(share, words)

    try:
        answer = work(job, Overall(report, caller.note))
    except Exception as problem:
        if isinstance(problem, QuantkitError) or is_out_of_memory(problem):
            raise
        traceback.print_exc()
        raise _unexpected(job, problem) from None
    if answer is not None:
        caller.row(answer)


def _unexpected(job: Job, problem: Exception) -> InputError:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    value, remedy = f"{type(problem).__name__}: {problem}", "the log has the traceback; please report it"
    rule = f"raised in {last.name}, {Path(last.filename).name}:{last.lineno}"
    return InputError("internal-error", where=job.name, value=value, rule=rule, remedy=remedy)


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
            progress.note("waiting for another job on this machine: timing needs a quiet one")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
