"""Run work in a child process with its own threads and memory, which can be killed.

The child receives a function and a job, as JSON, and answers in lines:

    row {...}      a result
    at 0.5 words   its progress
    note "..."     a message for the user
    error {...}    the error that ended it

Other output goes to its standard error. The child leads a process group, so that its own children end with it. All of
them end when the parent does: the child then reaches the end of its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from quantkit import machine
from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError, Stopped

Report = Callable[[float, str], None]
# seconds for a child to clean up before it is killed
_GRACE = 20.0
# seconds between two checks of `over`
_LOOK = 0.5


class Caller:
    """The parent, as the work in the child talks to it."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def row(self, data: Any) -> None:
        """Send a result, as JSON can hold it."""
        self._say(f"row {json.dumps(data, allow_nan=False)}")

    def at(self, share: float, words: str) -> None:
        """Report the share done, 0 to 1, and the current work."""
        self._say(f"at {share} {words}")

    def note(self, line: str) -> None:
        """Send a message for the user."""
        self._say(f"note {json.dumps(line)}")

    def error(self, problem: QuantkitError) -> None:
        """Send the error, the last line of the work."""
        self._say(f"error {json.dumps({**problem.as_dict(), 'exit': problem.exit})}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
            self._answers.write(f"{line}\n")
            self._answers.flush()


Work = Callable[[Any, Caller], None]


def run(
    work: Work | Sequence[str],
    job: Any,
    progress: Report | None = None,
    *,
    remedy: str,
    where: str = "timing",
    died: str = "speed-failed",
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    silence: float | None = None,
    note: Callable[[str], None] | None = None,
    row: Callable[[Any], None] | None = None,
    shown: bool = False,
    over: threading.Event | None = None,
) -> list[Any]:
    """Run a function in a child process and return its rows.

    Args:
        work: function of a module, called in the child with the job and its `Caller`; or the command line of another
            program that reads and answers alike.
        job: argument of `work`, as JSON can hold it.
        progress: callback for the child's progress.
        remedy: remedy in the error if the child dies or is too slow.
        where: place in an error that the child does not send itself.
        died: code of the error if the child dies without sending one.
        environment: variables added to this process's.
        seconds: time after which the child is killed.
        silence: time without a line after which it is killed.
        note: callback for the child's notes.
        row: callback for every row as it arrives: rows before a crash are not lost.
        shown: whether its standard error is this process's; else its last line is part of the error.
        over: event that ends the child when it is set.

    Raises:
        InputError: the child's error, `out-of-memory`, `timeout`, or `died`.
        GateError, Inconclusive, Stopped: the child's error; `interrupted` by `over`.
    """
    late = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(  # noqa: S603 (our own module)
            _program(work, where) if callable(work) else work,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shown else errors,
            encoding="utf-8",
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})},
            start_new_session=True,
        )

        def end() -> None:
            late.set()
            _end(process)

        last_line = time.monotonic()

        def lines() -> Iterator[str]:
            nonlocal last_line
            assert process.stdout is not None
            for line in process.stdout:
                last_line = time.monotonic()
                yield line

        def watch() -> None:
            stopped = over or threading.Event()
            while process.poll() is None:
                if stopped.wait(_LOOK):
                    _end(process)
                elif silence is not None and time.monotonic() - last_line > silence:
                    end()

        timer = threading.Timer(seconds or 0.0, end)
        try:
            if over is not None or silence is not None:
                threading.Thread(target=watch, daemon=True).start()
            if seconds is not None:
                timer.start()
            _told(process, job)
            rows = heard(lines(), progress, note, where, row)
            ended = process.wait()
        except QuantkitError:
            if not late.is_set():  # otherwise the timeout below is the error
                raise
        finally:
            timer.cancel()
            _end(process)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        errors.seek(0)
        last = next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "")
    if over is not None and over.is_set() and ended != 0:
        raise Stopped("interrupted", where)
    if late.is_set():
        silent = silence is not None and time.monotonic() - last_line > silence
        value = f"no answer for {silence:g} s" if silent else f"not done after {seconds:g} s"
        raise InputError("timeout", where, value, "the limit", remedy)
    if ended != 0:
        how = f"ended with exit code {ended}"
        if ended < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-ended).name}"
        value = f"its process {how}{f': {last[:200]}' if last else ''}"
        rule = "it ends with exit code 0; SIGKILL often means too little memory"
        raise InputError(died, where, value, rule, remedy)
    return rows


def _program(work: Work, where: str) -> list[str]:
    # no `-m`, and this process's path last: else a file in the current folder with a package's name would be run
    path = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if Path(entry).is_absolute())]
    function = f"{work.__module__}:{work.__qualname__}"
    program = f"import sys; sys.path += {path!r}; from {__name__} import main; main({function!r}, {where!r})"
    return machine.python("-c", program)


def _told(process: subprocess.Popen[str], job: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended with an error
        process.stdin.write(f"{json.dumps(job)}\n")
        process.stdin.flush()


def heard(
    lines: Iterable[str],
    progress: Report | None = None,
    note: Callable[[str], None] | None = None,
    where: str = "child",
    row: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Parse the lines of a child, here or on a device, and return its rows.

    Raises:
        InputError: `answer-invalid`, a line does not follow the protocol; the child's error.
        GateError, Inconclusive, Stopped: the child's error.
    """
    rows = []
    for line in lines:
        kind, _, rest = line.rstrip("\n").partition(" ")
        try:
            answer: Any = None
            if kind == "at":
                share, _, answer = rest.partition(" ")
                done = min(max(float(share), 0.0), 1.0)  # NaN becomes 0
            elif kind in ("row", "note", "error"):
                answer = json.loads(rest)
            if kind == "note" and not isinstance(answer, str):
                raise ValueError("a note is a text")
            if kind == "error":
                code = answer.pop("exit", 2)
                kinds = {kind.exit: kind for kind in (GateError, Inconclusive, Stopped)}
                answer = kinds.get(code, InputError)(**{str(name): str(text) for name, text in answer.items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as problem:
            rule = f"a line of `row`, `at`, `note` or `error`, and JSON ({problem})"
            remedy = "run it again; if it stays, the program there is not this version's"
            raise InputError("answer-invalid", where, line.strip()[:80], rule, remedy) from None
        if kind == "error":
            raise answer
        if kind == "row":
            rows.append(answer)
            if row is not None:
                row(answer)
        elif kind == "at" and progress is not None:
            progress(done, answer)
        elif kind == "note" and note is not None:
            note(answer)
    return rows


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(function: str, where: str) -> None:
    """Run the work in the child process."""
    from quantkit.model.device import is_out_of_memory, out_of_memory

    caller = Caller(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(job, caller)
        gc.freeze()  # else the interpreter searches all objects for cycles before it ends, and the parent waits
        return
    except QuantkitError as problem:
        met = problem
    except KeyboardInterrupt:
        met = Stopped("interrupted", where)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        met = out_of_memory(where, problem)
    # finish writing the error: the parent kills this process after reading it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    caller.error(met)


def _end_with_parent() -> None:
    """Kill the process group when the parent ends: a process left over would disturb later timings."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
