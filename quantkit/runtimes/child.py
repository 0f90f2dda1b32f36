"""Work in a process of its own: its threads and memory are not those of whoever asks, and it may be ended.

The child prints lines: `row {...}` a result, `at 0.5 words` its progress, `error {...}` what it met.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from quantkit.errors import InputError

Report = Callable[[float, str], None]


def lines(
    module: str,
    arguments: list[str],
    text: str,
    progress: Report | None,
    *,
    remedy: str,
    environment: Mapping[str, str] | None = None,
    code: str = "speed-failed",
    where: str = "timing",
    timeout: float | None = None,
) -> list[str]:
    """What the child's rows say; what it says of its progress is passed on.

    Args:
        module: whose `main(arguments)` the child runs: `quantkit.measurement.timing.speed`.
        arguments: of that.
        text: what it reads from stdin.
        progress: told the share that is done, and what is being done.
        remedy: what to try if it ends without a word.
        environment: added to this process's.
        code, where: of the error if it ends without a word.
        timeout: seconds after which it is ended.

    Raises:
        InputError: what the child met, `code` if it ended without a word, or `timeout`.
    """
    # not `-m`, which would import from the current folder: a file there that is called like a package would be run
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.append({root!r}); from {module} import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", program, *arguments]
    inherited = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(  # noqa: S603 (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=inherited
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout or 0, end)
        if timeout is not None:
            timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
                process.stdin.write(text)
                process.stdin.close()
            found = []
            for line in process.stdout:
                kind, _, rest = line.rstrip("\n").partition(" ")
                if kind == "row":
                    found.append(rest)
                elif kind == "at" and progress is not None:
                    share, _, words = rest.partition(" ")
                    progress(float(share), words)
                elif kind == "error":
                    raise InputError(**json.loads(rest))
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        ended = process.wait()
        said.seek(0)
        last = next((line.strip() for line in reversed(said.read().splitlines()) if line.strip()), "")
    if late.is_set():
        raise InputError("timeout", where=where, value=f"not done after {timeout:g} s", rule="the limit", remedy=remedy)
    if ended != 0:
        raise InputError(
            code,
            where=where,
            value=f"its process ended with {ended}{f': {last[:200]}' if last else ''}",
            rule="it ends by itself; a negative number is a signal: -9 is often too little memory",
            remedy=remedy,
        )
    return found


def answering(work: Callable[[], None]) -> None:
    """Run the child's work, and say what it meets as the parent reads it."""
    from quantkit.errors import QuantkitError

    try:
        work()
    except QuantkitError as problem:
        fields = ("code", "where", "value", "rule", "remedy")
        print("error " + json.dumps({name: str(getattr(problem, name)) for name in fields}), flush=True)
