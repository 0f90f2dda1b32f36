"""Run one program of quantkit on a device while somebody listens: one at a time, never doubled, never orphaned.

    WORKDIR/lock          held while it runs; names the owner
    /tmp/quantkit.lock    the same for the machine: see `_locks`
    WORKDIR/tmp/          the program's files; removed with it, or by the next program

The program's output goes to the client, who sends a byte now and then. The program ends with the client, together with
all its children: orphans become children of this process, and if this process is killed, the system kills the program.
The device keeps no results; the client keeps them, and names the known ones when it reconnects. The locks are the
kernel's, so a reboot frees them.
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

# prctl(2): signal on the parent's death; adopt orphaned descendants
_PDEATHSIG, _SUBREAPER = 1, 36
# most bytes of its standard error; seconds to finish after a signal, and between two checks
_LOG, _GRACE, _TICK = 1 << 20, 5.0, 0.25
_TRIES = 4
# a place where all users may write; files in /dev/shm may vanish with their owner's session
_SHARED = "/tmp/quantkit.lock"  # noqa: S108 (created exclusively, no link is followed, its text is never executed)


class _Left(Exception):
    """The client is gone, or asks for the end: `gone` or `left`."""


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Run `program`, send it `text`, and print its output.

    Args:
        asked: `workdir`; `wheels` that it needs; `environment`; `lease`, seconds without a byte until it ends; `who`,
            `client`, `token` and `what`, for other clients while it is busy; `oust`, token of a job that may be ended.

    Returns:
        `why` it ended: `done`, `died` (with `code` and the last line `said`), `left`, `gone` (with the machine), or
            `busy` (with its `holder`).
    """
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    locks = _locks(place)
    for lock in locks:
        holder = _taken(lock, (asked["token"], asked["oust"]))
        if holder is not None:
            return {"why": "busy", "holder": holder}
    owner = {name: asked[name] for name in ("who", "client", "token", "what")}
    for lock in locks:
        lock.truncate(0)
        lock.write(json.dumps({**owner, "since": time.time(), "runner": os.getpid()}))
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
    """Open the locks of the workdir and of the machine, which all users and workdirs share.

    The second is skipped if its folder is missing, or if `QUANTKIT_LOCK`, which overrides its path, is empty.
    """
    locks, shared = [lock_file(place / "lock")], os.environ.get("QUANTKIT_LOCK", _SHARED)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        locks += [lock_file(shared, mode=0o666)] if shared else []
    return locks


def _taken(lock: IO[str], ours: tuple[str, ...]) -> dict[str, Any] | None:
    """Take a lock; return None, or its owner if it is held. An owner among `ours` is asked to end, and awaited."""
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
        time.sleep(_TICK)  # another process may only be checking the lock


def _holder(lock: IO[str]) -> dict[str, Any]:
    """Read the lock's owner."""
    lock.seek(0)
    with contextlib.suppress(ValueError):
        owner = json.loads(lock.read(4096))
        if isinstance(owner, dict):
            return owner
    return {}


def _run(place: Path, scratch: Path, asked: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    # the user's, where a Python of a runtime's own is known (`runtimes.apart`)
    data = os.path.join(os.path.expanduser("~"), ".local", "share")  # noqa: PTH111, PTH118
    environment = {
        "XDG_DATA_HOME": data,
        **os.environ,
        **asked["environment"],
        "OMP_WAIT_POLICY": "PASSIVE",
        # makes CUDA, which otherwise begins with the fastest, number the GPUs as the driver does
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
    """Send the request, and pass on the output until the program ends. Raises _Left."""
    assert work.stdin is not None and work.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, with a message
        work.stdin.write(asked["text"].encode() + b"\n")
        work.stdin.flush()
    out, source, mended = sys.stdout.buffer, work.stdout.fileno(), True
    while True:
        # check before reading: a program that has ended has printed everything
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # it frees its memory
                work.wait(4 * _GRACE)
            ended = True
        if ended:  # its children may hold its output open
            out.write(b"" if mended else b"\n")
            return
        if log.stat().st_size > _LOG:
            os.truncate(log, 0)


def _end(work: subprocess.Popen[bytes]) -> int:
    """End the program and its descendants; return its exit code."""
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
    """Kill the orphans, all children of this process; give up on one that survives."""
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
    """List this process's children; not every kernel has such a list."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # a program's name may contain brackets and blanks
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(path.parent.name))
    return children


def _last(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
    return ""
