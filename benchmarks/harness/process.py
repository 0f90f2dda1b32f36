"""A command in a fresh process, and what it took: wall seconds, processor seconds, the most memory it had resident.

A process inherits the high-water mark of whoever starts it, so scripts stay small: no torch in them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# else idle OpenMP threads spin, and their turning is counted as work
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
THREADS = 2
_LIMITED = (
    "import os, resource, sys; limit = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)); os.execvp(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Done:
    """What a process did.

    Args:
        status: its exit status; negative is the signal that ended it.
        out, err: what it printed.
        wall: seconds.
        cpu: processor seconds, user and system, of it and of the processes it waited for.
        peak: bytes, the most that one of them had resident.
    """

    status: int
    out: str
    err: str
    wall: float
    cpu: float
    peak: int


def environment(threads: int = THREADS, **more: str) -> dict[str, str]:
    """This environment with the thread count that figures are taken at."""
    counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**os.environ, **QUIET, **counts, **more}


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    data_limit: int | None = None,
    struck: Callable[[], bool] | None = None,
) -> Done:
    """Run a command to its end.

    Args:
        command: program and arguments.
        env: None is `environment()`.
        cwd: where.
        data_limit: bytes that it may have for data (RLIMIT_DATA): heap and private writable mappings.
        struck: asked again and again; the process is killed (SIGKILL) once it holds.
    """
    if data_limit is not None:
        command = [sys.executable, "-c", _LIMITED, str(data_limit), *command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=err, env=dict(env or environment()), cwd=cwd
        )
        ended, status, used = os.wait4(process.pid, os.WNOHANG if struck else 0)
        while struck and not ended:
            time.sleep(0.2)
            if struck():
                os.kill(process.pid, signal.SIGKILL)  # Popen.kill would wait for it, and its times be lost
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Done(process.returncode, *texts, wall, used.ru_utime + used.ru_stime, peak)


def quantkit(*arguments: str | Path) -> list[str]:
    """The command line of this checkout, by this interpreter."""
    return [sys.executable, "-m", "quantkit", *(str(argument) for argument in arguments)]


def compiled(
    model: str | Path, recipe: str | Path, out: Path, *arguments: str | Path, **options: Any
) -> tuple[dict[str, Any], Done]:
    """`quantkit compile`: its result, and what it took. A failed gate is a result too; anything else ends all."""
    command = quantkit("compile", model, "--recipe", recipe, "--out", out, "--json", *arguments)
    done = run(command, **options)
    answer = envelope(done)
    if done.status not in (0, 1) or answer["result"] is None:
        why = f"compile of {Path(recipe).stem} failed, exit {done.status}: {answer['error']}"
        raise SystemExit(f"{why}\n{done.err[-2000:]}")
    return {**answer["result"], "exit": done.status, "decisions": answer["decisions"]}, done


def envelope(done: Done) -> dict[str, Any]:
    """The `--json` object of a command."""
    try:
        found: dict[str, Any] = json.loads(done.out)
    except json.JSONDecodeError:
        why = f"exit {done.status}, and no JSON object but {done.out[-500:]!r}"
        raise SystemExit(f"{why}\n{done.err[-2000:]}") from None
    return found


def helper(
    script: str | Path, request: Mapping[str, Any], *, python: str | Path = sys.executable, threads: int = THREADS
) -> tuple[Any, Done]:
    """Run `main` of a script of this folder in a process of its own; a script elsewhere reads and writes by itself."""
    here = Path(__file__).parent
    command = [script] if Path(script).is_absolute() else [here / "side.py", here / script]
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(request))
        done = run([python, *command, asked, answered], env=environment(threads))
        if done.status != 0 or not answered.exists():
            raise SystemExit(f"{script} failed, exit {done.status}\n{done.err[-3000:]}")
        return json.loads(answered.read_text()), done


def scored(
    reference: str,
    candidates: Mapping[str, str],
    texts: Mapping[str, Mapping[str, str]],
    *,
    samples: int = 12,
    paired: str | None = None,
) -> list[dict[str, Any]]:
    """`score.py`: candidates x texts, 512 tokens a sequence.

    Args:
        reference: the model that they were made from.
        candidates: name -> folder.
        texts: name -> see `score.py`.
        samples: sequences of each text, at most.
        paired: a candidate that the others are compared with position by position; it comes first.
    """
    request = {"reference": reference, "candidates": candidates, "texts": texts} | {
        "samples": samples,
        "tokens": 512,
        "paired": paired,
    }
    rows: list[dict[str, Any]] = helper("score.py", request)[0]
    return rows
