"""Runs one program of quantkit on a device while somebody listens: one at a time, never doubled, never orphaned.

    WORKDIR/lock          held while it runs; says whose it is
    /tmp/quantkit.lock    the same for the machine: see `_locks`
    WORKDIR/tmp/          what the program writes; removed with it, or by the next one

What the program prints goes to whoever asked, who sends a byte now and then. The program ends with them, with all that
it has started: orphans become this process's, and where this process itself is killed the system kills the program.
Nothing is kept of it: who asked keeps its answers, and says which are known when the connection is taken up again. The
locks are the kernel's, so a reboot frees them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # sent with it
    from quantkit.devices.sent import lock_file

# of prctl(2): the system's signal where the parent has gone; orphans below are this process's
_PDEATHSIG, _SUBREAPER = 1, 36
# bytes of what it says besides; seconds to put away what it is at, and between two looks
_LOG, _GRACE, _TICK = 1 << 20, 5.0, 0.25
_TRIES = 4
# where all users of a machine may write; what lies in /dev/shm goes with the session of whoever made it
_SHARED = "/tmp/quantkit.lock"  # noqa: S108 (made for itself alone, no link is followed, and what it says is no program)


class _Left(Exception):
    """Nobody listens any more, or somebody asks for the end: `gone` or `left`."""


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Run `program`, tell it `text`, and print what it prints.

    Args:
        asked: `workdir`; `wheels`, of what runs it; `environment`; `lease`, seconds without a byte until it ends;
            `who`, `client`, `token` and `what`, for others who find it at work; `oust`, the token of one that may be
            ended.

    Returns:
        `why` it ended: `done`, `died` (with `code` and what it `said` last), `left`, `gone` (with the machine), or
        `busy` (with its `holder`).
    """
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    locks = _locks(place)
    for lock in locks:
        holder = _taken(lock, (asked["token"], asked["oust"]))
        if holder is not None:
            return {"why": "busy", "holder": holder}
    said = {name: asked[name] for name in ("who", "client", "token", "what")}
    for lock in locks:
        lock.truncate(0)
        lock.write(json.dumps({**said, "since": time.time(), "runner": os.getpid()}))
        lock.flush()
    scratch = place / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        return _run(place, scratch, asked)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for lock in locks:
            lock.truncate(0)


def _locks(place: Path) -> list[IO[str]]:
    """The lock of the workdir and that of the machine, whose users and workdirs take turns too; not that one where
    there is no such place, or `QUANTKIT_LOCK`, which names another, is empty."""
    locks, shared = [lock_file(place / "lock")], os.environ.get("QUANTKIT_LOCK", _SHARED)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        locks += [lock_file(shared, mode=0o666)] if shared else []
    return locks


def _taken(lock: IO[str], ours: tuple[str, ...]) -> dict[str, Any] | None:
    """None once it is held; else who has it. One of `ours` is asked to end, and waited for."""
    until, asked = time.monotonic() + _TRIES * _TICK, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            holder = _holder(lock)
        if holder.get("token") in ours and isinstance(holder.get("runner"), int):
            until, asked = until if asked else time.monotonic() + 4 * _GRACE, True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(holder["runner"], signal.SIGTERM)
        if time.monotonic() > until:
            return holder
        time.sleep(_TICK)  # somebody only looks whether it is held


def _holder(lock: IO[str]) -> dict[str, Any]:
    """Reads the lock's owner."""
    lock.seek(0)
    with contextlib.suppress(ValueError):
        found = json.loads(lock.read(4096))
        if isinstance(found, dict):
            return found
    return {}


def _run(place: Path, scratch: Path, asked: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    environment = {
        **os.environ,
        **asked["environment"],
        "OMP_WAIT_POLICY": "PASSIVE",
        # the first GPU is then the same to CUDA, which else begins with the fastest, and to the driver, which names it
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "PYTHONPATH": os.pathsep.join(str(place / "wheels" / wheel) for wheel in asked["wheels"]),
        **{"TMPDIR": str(scratch), "HOME": str(scratch), "QUANTKIT_CACHE": str(scratch / "cache")},
    }
    for number in (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _leave)
    log, why = scratch / "log", ""
    with log.open("ab") as stream:
        work = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", asked["program"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (a process of one thread)
            env=environment,
            cwd=place,
        )
    try:
        signal.alarm(asked["lease"])
        _pump(work, asked, log)
    except _Left as left:
        why = str(left)
    except BrokenPipeError:
        why = "left"
    finally:
        signal.alarm(0)
        code = _end(work)
    return {"why": why or ("done" if code == 0 else "died"), "code": code, "said": _last(log)}


def _leave(number: int, _: object) -> None:
    raise _Left("gone" if number == signal.SIGTERM else "left")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _pump(work: subprocess.Popen[bytes], asked: dict[str, Any], log: Path) -> None:
    """Tell it what it is asked, and pass on what it prints until it ends. Raises _Left."""
    assert work.stdin is not None and work.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
        work.stdin.write(asked["text"].encode() + b"\n")
        work.stdin.flush()
    out, source, mended = sys.stdout.buffer, work.stdout.fileno(), True
    while True:
        # looked at before its output: what ended has printed all of it
        ended = work.poll() is not None
        ready = select.select([0, source], [], [], 0 if ended else _TICK)[0]
        if 0 in ready:
            if not os.read(0, 4096):
                raise _Left("left")
            signal.alarm(asked["lease"])
        if source in ready:
            chunk = os.read(source, 1 << 16)
            out.write(chunk)
            out.flush()
            if chunk:
                mended = chunk.endswith(b"\n")
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):  # it puts away what it has loaded
                work.wait(4 * _GRACE)
            ended = True
        if ended:  # what it has started may hold its output open
            out.write(b"" if mended else b"\n")
            return
        if log.stat().st_size > _LOG:
            os.truncate(log, 0)


def _end(work: subprocess.Popen[bytes]) -> int:
    """Ends the program and all that it has started; its exit code."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assert work.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        work.stdin.close()
    try:
        work.wait(_TICK)
    except subprocess.TimeoutExpired:
        work.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            work.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(work.pid, signal.SIGKILL)
    code = work.wait()
    _reap()
    return code


def _reap() -> None:
    """Ends the orphans, which are this process's children. One that does not end is left."""
    until = time.monotonic() + _GRACE
    while time.monotonic() < until:
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_TICK / 5)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Numbers of this process's children: not every kernel has a list of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name of a program may have brackets and blanks
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _last(log: Path) -> str:
    """The last line that was printed besides."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
    return ""
