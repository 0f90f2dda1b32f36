"""Work in a process of its own: its threads and memory are not those of whoever asks, and it may be ended.

The child is told a function and a job, as JSON, and answers in lines:

    row {...}      a result
    at 0.5 words   its progress
    note "..."     something worth a line
    error {...}    what it met

Whatever else prints goes to its standard error. It leads a group of processes, so that what it starts ends with it, and
all of them end when whoever started it does: its standard input, which stays open until then, comes to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from quantkit import machine
from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError, Stopped

Report = Callable[[float, str], None]
# seconds that a child has to put away what it is at
_GRACE = 20.0
# between two looks whether it is to end
_LOOK = 0.5


class Caller:
    """Whoever started the child, as the child's work speaks to it."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def row(self, data: Any) -> None:
        """A result, of what JSON has."""
        self._say(f"row {json.dumps(data, allow_nan=False)}")

    def at(self, share: float, words: str) -> None:
        """How much is done, 0 to 1, and what is being done."""
        self._say(f"at {share} {words}")

    def note(self, line: str) -> None:
        """Something worth a line."""
        self._say(f"note {json.dumps(line)}")

    def error(self, problem: QuantkitError) -> None:
        """What ended the work."""
        self._say(f"error {json.dumps({**problem.as_dict(), 'exit': problem.exit})}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            self._answers.write(f"{line}\n")
            self._answers.flush()


Work = Callable[[Any, Caller], None]


def run(
    work: Work,
    job: Any,
    progress: Report | None = None,
    *,
    remedy: str,
    where: str = "timing",
    died: str = "speed-failed",
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    note: Callable[[str], None] | None = None,
    row: Callable[[Any], None] | None = None,
    shown: bool = False,
    over: threading.Event | None = None,
) -> list[Any]:
    """The rows that a function gives in a child process.

    Args:
        work: a function of a module, called in the child with the job and its `Caller`.
        job: for `work`, of what JSON has.
        progress: told what the child says of its progress.
        remedy: what to try if it ends without a word, or too late.
        where: of an error that the child does not tell itself.
        died: the code of the error if it ends without a word.
        environment: added to this process's.
        seconds: after which it is ended.
        note: told the child's notes.
        row: told each row as it comes: what a child has given before it dies is not lost.
        shown: whether its standard error is this process's; else the last line of it stands in the error.
        over: ends it once it is set, whether it says a word or not.

    Raises:
        InputError: what the child met, `out-of-memory`, `timeout`, or `died`.
        GateError, Inconclusive, Stopped: what the child met; `interrupted` by `over`.
    """
    # not `-m`, and this process's path last: a file of the current folder that is called like a package would be run
    path = [str(Path(__file__).parents[2]), *(each for each in sys.path if Path(each).is_absolute())]
    function = f"{work.__module__}:{work.__qualname__}"
    program = f"import sys; sys.path += {path!r}; from {__name__} import main; main({function!r}, {where!r})"
    late = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(  # noqa: S603 (our own module)
            machine.python("-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shown else said,
            encoding="utf-8",
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})},
            start_new_session=True,
        )

        def end() -> None:
            late.set()
            _end(process)

        def watch() -> None:
            while process.poll() is None:
                if over is not None and over.wait(_LOOK):
                    _end(process)

        timer = threading.Timer(seconds or 0.0, end)
        try:
            if over is not None:
                threading.Thread(target=watch, daemon=True).start()
            if seconds is not None:
                timer.start()
            found = _heard(process, job, progress, note, where, row)
            ended = process.wait()
        except QuantkitError:
            if not late.is_set():  # else it met its own end
                raise
        finally:
            timer.cancel()
            _end(process)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        said.seek(0)
        last = next((line.strip() for line in reversed(said.read().splitlines()) if line.strip()), "")
    if over is not None and over.is_set() and ended != 0:
        raise Stopped("interrupted", where)
    if late.is_set():
        raise InputError("timeout", where, f"not done after {seconds:g} s", "the limit", remedy)
    if ended != 0:
        how = f"ended with exit code {ended}"
        if ended < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-ended).name}"
        value = f"its process {how}{f': {last[:200]}' if last else ''}"
        rule = "it ends by itself; SIGKILL is often too little memory"
        raise InputError(died, where, value, rule, remedy)
    return found


def _heard(
    process: subprocess.Popen[str],
    job: Any,
    progress: Report | None,
    note: Callable[[str], None] | None,
    where: str,
    row: Callable[[Any], None] | None,
) -> list[Any]:
    """The rows of all lines until its output ends. Raises what the child met."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
        process.stdin.write(f"{json.dumps(job)}\n")
        process.stdin.flush()
    return heard(process.stdout, progress, note, where, row)


def heard(
    lines: Iterable[str],
    progress: Report | None = None,
    note: Callable[[str], None] | None = None,
    where: str = "child",
    row: Callable[[Any], None] | None = None,
) -> list[Any]:
    """The rows of the lines in which a child, here or on a device, answers.

    Raises:
        InputError: `answer-invalid`, a line is not as the protocol says; what the child met.
        GateError, Inconclusive, Stopped: what the child met.
    """
    found = []
    for line in lines:
        kind, _, rest = line.rstrip("\n").partition(" ")
        try:
            answer: Any = None
            if kind == "at":
                share, _, answer = rest.partition(" ")
                done = min(max(float(share), 0.0), 1.0)  # of no number, 0
            elif kind in ("row", "note", "error"):
                answer = json.loads(rest)
            if kind == "note" and not isinstance(answer, str):
                raise ValueError("a note is a text")
            if kind == "error":
                code = answer.pop("exit", 2)
                kinds = {each.exit: each for each in (GateError, Inconclusive, Stopped)}
                answer = kinds.get(code, InputError)(**{str(name): str(text) for name, text in answer.items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as problem:
            rule = f"a line of `row`, `at`, `note` or `error`, and JSON ({problem})"
            remedy = "run it again; if it stays, the program there is not this version's"
            raise InputError("answer-invalid", where, line.strip()[:80], rule, remedy) from None
        if kind == "error":
            raise answer
        if kind == "row":
            found.append(answer)
            if row is not None:
                row(answer)
        elif kind == "at" and progress is not None:
            progress(done, answer)
        elif kind == "note" and note is not None:
            note(answer)
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """It and what it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(function: str, where: str) -> None:
    """What the child does."""
    from quantkit.model.device import is_out_of_memory, out_of_memory

    caller = Caller(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # whatever a library prints is no answer
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(job, caller)
        return
    except QuantkitError as problem:
        met = problem
    except KeyboardInterrupt:
        met = Stopped("interrupted", where)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        met = out_of_memory(where, problem)
    # its last words are not broken off: whoever hears them ends it, as it does itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    caller.error(met)


def _end_with_parent() -> None:
    """Nothing is left running that would disturb the times of whoever comes next."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
