"""What an executor is given, what it gives back, and the process of its own in which a job runs.

A job's process commits what it finds to the store itself, so that a lost answer loses nothing; an outcome tells only
how the process ended. Whatever happens in it, a Python error, a signal, too little memory, no end: it is an outcome,
and never the end of the night.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Protocol

from quantkit import content
from quantkit.errors import InputError, QuantkitError, Stopped
from quantkit.model.full_memory import is_out_of_memory, out_of_memory
from quantkit.nightly.store.records import Cell
from quantkit.pipeline.progress import Progress

# that a process has to put away what it is at
_GRACE = 20.0


@dataclass(frozen=True)
class Job:
    """A build whose cells are to be measured. Plain data, for other processes and other machines.

    Args:
        night: its name.
        config: path of the `nightly.yaml`.
        config_sha256: of that file when the night began.
        cells: keys, all of one build.
        attempt: 1, and 2 for the repetition that an alarm asks for.
        limit: seconds after which its process is ended.
    """

    night: str
    config: str
    config_sha256: str
    cells: tuple[str, ...]
    attempt: int
    limit: float

    @property
    def build(self) -> str:
        """Its key."""
        return Cell.of(self.cells[0]).build

    @property
    def target(self) -> str:
        """Where it has to run."""
        return Cell.of(self.cells[0]).target


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        job: which.
        state: `missing`: there is no machine for it.
        error: the five fields, unless it is done.
    """

    job: Job
    state: Literal["done", "failed", "missing"]
    error: Mapping[str, str] | None = None

    @classmethod
    def of(cls, job: Job, problem: QuantkitError, state: Literal["failed", "missing"] = "failed") -> Outcome:
        """The outcome of what went wrong."""
        return cls(job, state, problem.as_dict())


# what a job's process runs: a function that can be imported
Work = Callable[[Job, Progress], None]


class Executor(Protocol):
    """Runs jobs, here or elsewhere."""

    def ready(self) -> None:
        """Refuse to begin a night that could not be run. Raises InputError."""
        ...

    def run(self, jobs: Sequence[Job], work: Work, progress: Progress) -> Iterator[Outcome]:
        """Every job once, its outcome as it ends.

        Raises:
            Stopped: the disk is full. On an interrupt nothing of the jobs is left running.
        """
        ...


def contained(job: Job, work: Work, progress: Progress) -> Outcome:
    """Run a job in a process of its own, one at a time on this machine: timing needs a quiet one.

    Raises:
        Stopped: the disk is full, or somebody ended the process safely.
    """
    with _machine(progress):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_child, args=(job, work, theirs), name=job.build)
        process.start()
        theirs.close()
        try:
            return _watched(job, process, ours, progress)
        finally:
            _end(process)
            ours.close()


_CONTEXT = multiprocessing.get_context("spawn")


def _watched(job: Job, process: BaseProcess, messages: Connection, progress: Progress) -> Outcome:
    """Pass on what it says until it ends."""
    end = time.monotonic() + job.limit
    problem: QuantkitError | None = None
    while True:
        left = end - time.monotonic()
        if left <= 0:
            value = f"not done after {job.limit:g} s"
            remedy = "raise `limit` in nightly.yaml if it was still at work"
            return Outcome.of(job, InputError("timeout", where=job.build, value=value, rule="the limit", remedy=remedy))
        if messages not in multiprocessing.connection.wait([messages, process.sentinel], min(left, 60.0)):
            if process.exitcode is None:
                continue
            break  # it has ended, and nothing is left to read
        try:
            kind, said = messages.recv()
        except (EOFError, OSError):
            process.join(_GRACE)
            break
        if kind == "at":
            share, words = said
            progress.at(job.build, share, words)
        elif kind == "note":
            progress.note(said)
        elif kind == "stopped":
            raise said
        else:
            problem = said
    if problem is None and process.exitcode != 0:
        problem = _died(job, process.exitcode)
    return Outcome(job, "done") if problem is None else Outcome.of(job, problem)


def _died(job: Job, code: int | None) -> InputError:
    value = f"its process ended with exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            value = f"its process was ended by {signal.Signals(-code).name}"
    rule = "it ends by itself; SIGKILL is often too little memory"
    return InputError("process-died", where=job.build, value=value, rule=rule, remedy="look into the system's log")


def _end(process: BaseProcess) -> None:
    """It and what it started."""
    assert process.pid, "it was started"
    if process.exitcode is None:
        process.terminate()
        process.join(_GRACE)
    if process.exitcode is None:
        process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _child(job: Job, work: Work, messages: Connection) -> None:
    """What the process does. It leads a group, so that what it starts ends with it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    message = _done(job, work, messages)
    # its last words are not broken off: whoever hears them ends it, as it does itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if message is not None:
        messages.send(message)
    messages.close()


def _done(job: Job, work: Work, messages: Connection) -> tuple[str, QuantkitError] | None:
    """Run it; what its process has to say at its end, if not all is well."""
    try:
        work(job, _Told(messages))
    except Stopped as problem:
        return "stopped", problem
    except KeyboardInterrupt:
        return "stopped", Stopped("interrupted", where=job.build)
    except QuantkitError as problem:
        return "failed", problem
    except Exception as problem:
        if is_out_of_memory(problem):
            return "failed", out_of_memory(job.build, problem)
        traceback.print_exc()
        return "failed", _unexpected(job, problem)
    return None


def _unexpected(job: Job, problem: Exception) -> InputError:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    return InputError(
        "internal-error",
        where=job.build,
        value=f"{type(problem).__name__}: {problem}",
        rule=f"raised in {last.name}, {Path(last.filename).name}:{last.lineno}",
        remedy="the log has the traceback; please report it",
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """A night that is killed leaves nothing running that would disturb the times of the next."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


class _Told(Progress):
    """Sends what it is told, and how far the whole job is by the expected seconds of its stages."""

    def __init__(self, messages: Connection) -> None:
        self._messages = messages
        self._stages: dict[str, float] = {}
        self._said = 0.0

    def plan(self, stages: Mapping[str, float]) -> None:
        self._stages = {**stages}

    def at(self, stage: str, done: float, detail: str = "") -> None:
        now = time.monotonic()
        if now - self._said < 0.2:
            return
        self._said = now
        names = list(self._stages)
        before = sum(self._stages[name] for name in names[: names.index(stage)]) if stage in names else 0.0
        share = (before + done * self._stages.get(stage, 0.0)) / max(sum(self._stages.values()), 1e-9)
        self._send(("at", (min(share, 1.0), f"{stage} {detail}".rstrip())))

    def note(self, line: str) -> None:
        self._send(("note", line))

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self._messages.send(message)


@contextmanager
def _machine(progress: Progress) -> Iterator[None]:
    """One job at a time on a machine, whoever runs it; the kernel frees the lock of one that is killed."""
    place = content.cache_dir() / "nightly.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("waiting for another night's build on this machine: timing needs a quiet one")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
