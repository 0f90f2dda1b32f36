"""Jobs on a device: one at a time, never doubled, never orphaned.

    WORKDIR/lock                held while a job runs; says whose it is
    /tmp/quantkit.lock          the same for the machine: see `_machine`
    WORKDIR/jobs/ID/job.json    what is asked
                   /wheels      what runs it, by their hashes
                   /rows.jsonl  what is answered
                   /lease       touched while somebody listens
                   /cancel      is there once it is to end for good
                   /ended       why its process has ended, once it has: `done`, `died`, `cancelled`; or to be taken up,
                                `left` by whoever listened, `gone` with the machine
                   /log         what it printed

A keeper holds the lock and starts the job in a group of its own. It ends the job when nobody has touched the lease for
some time, or when it is told to, and with it all that the job started: orphans become the keeper's, and where the
keeper itself is killed the system kills the job. The lock is the kernel's, so a reboot frees it.
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
    from quantkit.devices.sent.answer import lock_file

# of prctl(2): the system's signal where the parent has gone; orphans below are this process's
_PDEATHSIG, _SUBREAPER = 1, 36
# how a job ends that was asked to
_STOPPED = 75
_LOG = 1 << 20
# seconds: to put away what it is at; how long an answer may lie there that nobody fetched
_GRACE, _OLD = 5.0, 86_400.0
_TICK = 0.25
_TRIES = 4
# where all users of a machine may write; what lies in /dev/shm goes with the session of whoever made it
_SHARED = "/tmp/quantkit.lock"  # noqa: S108 (made for itself alone, no link is followed, and what it says is no program)


def main(asked: dict[str, Any]) -> dict[str, Any] | None:
    """`do` is one of `start`, `follow`, `cancel`, `collect`; `workdir` where, `job` which."""
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    folder = place / "jobs" / asked["job"]
    return {"start": start, "follow": follow, "cancel": cancel, "collect": collect}[asked["do"]](place, folder, asked)


def start(place: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Start it, unless it runs or is done: `state` is `started`, `running`, `ended` or `busy`."""
    lock = lock_file(place / "lock")
    for again in range(_TRIES, -1, -1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _holder(place)
            if holder.get("job") == asked["job"]:
                return {"state": "running"}
            if not again:
                return {"state": "busy", "holder": holder}
        time.sleep(_TICK)  # somebody only looks whether it is held
    machine = _machine()
    if machine is not None:
        for again in range(_TRIES, -1, -1):
            try:
                fcntl.flock(machine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not again:
                    return {"state": "busy", "holder": _read(machine)}
            time.sleep(_TICK)
    if folder.exists() and time.time() - folder.stat().st_mtime > _OLD:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if _ended(folder).get("why") == "done":
        return {"state": "ended"}
    (folder / "ended").unlink(missing_ok=True)
    (folder / "cancel").unlink(missing_ok=True)
    _mend(folder / "rows.jsonl")
    (folder / "job.json").write_text(asked["text"])
    (folder / "wheels").write_text(" ".join(asked["wheels"]))
    (folder / "lease").touch()
    said = {each: asked[each] for each in ("job", "who", "client", "what")} | {"since": time.time()}
    for each in (lock, machine):
        if each is not None:
            each.truncate(0)
            each.write(json.dumps(said))
            each.flush()
    # on its command line, where a word has 128 KiB at most: the job, which may be longer, is in its file
    told = {"module": asked["module"], "lease": asked["lease"], "lock": lock.fileno(), "folder": str(folder)}
    program = f"{asked['program']}\nkeep({told!r})\n"
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(str(place / "wheels" / wheel) for wheel in asked["wheels"]),
    }
    with (folder / "log").open("wb") as log:
        subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[each.fileno() for each in (lock, machine) if each is not None],
            env=environment,
            cwd=place,
        )
    return {"state": "started"}


def _machine() -> IO[str] | None:
    """The lock of the machine: its users, and workdirs of one of them, take turns too. None where there is no such
    place, or `QUANTKIT_LOCK`, which names another, is empty."""
    path = os.environ.get("QUANTKIT_LOCK", _SHARED)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return lock_file(path, mode=0o666) if path else None
    return None


def _read(stream: IO[str]) -> dict[str, Any]:
    """Whoever holds a lock, as far as it says so."""
    stream.seek(0)
    with contextlib.suppress(ValueError):
        found = json.loads(stream.read(4096))
        if isinstance(found, dict):
            return found
    return {}


def _mend(rows: Path) -> None:
    """Take from the answers what the next process does not go on with, before anybody follows them: a line that broke
    off with its writer, and the error that ended it."""
    if not rows.exists():
        return
    with rows.open("r+b") as stream:
        lines = stream.read().splitlines(keepends=True)
        while lines and (not lines[-1].endswith(b"\n") or _kind(lines[-1]) == "error"):
            lines.pop()
        stream.truncate(sum(map(len, lines)))


def _kind(line: bytes) -> str:
    try:
        return str(json.loads(line)["kind"])
    except (ValueError, KeyError, TypeError):
        return ""


def _holder(place: Path) -> dict[str, Any]:
    with lock_file(place / "lock") as stream:
        return _read(stream)


def _ended(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "ended").read_text())
    except (OSError, ValueError):
        return {}
    return found


def keep(told: dict[str, Any]) -> None:
    """What the keeper does."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    folder = Path(told["folder"])
    lock = os.fdopen(told["lock"], "r+")
    lock.seek(0)
    said = {**json.loads(lock.read()), "keeper": os.getpid()}
    lock.seek(0)
    lock.truncate()
    lock.write(json.dumps(said))
    lock.flush()
    work = subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", told["module"], str(folder)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_keeper,  # noqa: PLW1509 (a process of one thread)
    )
    seen, since, why = 0, time.monotonic(), ""
    while work.poll() is None and not why:
        time.sleep(_TICK)
        touched = (folder / "lease").stat().st_mtime_ns
        # counted here: the clock of a device may jump by years once it finds the network
        if touched != seen:
            seen, since = touched, time.monotonic()
        # a machine that is switched off asks everybody to end
        asked = "cancelled" if (folder / "cancel").exists() else "gone"
        why = asked if stop else "left" if time.monotonic() - since > told["lease"] else ""
        if (folder / "log").stat().st_size > _LOG:
            os.truncate(folder / "log", 0)
    if why:
        work.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            work.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(work.pid, signal.SIGKILL)
    code = work.wait()
    _reap()
    # the same, where it was asked before this process
    why = why or ("done" if code == 0 else "gone" if code in (_STOPPED, -signal.SIGTERM) else "died")
    text = json.dumps({"why": why, "code": code, "said": _last(folder / "log")})
    (folder / "ended.part").write_text(text)
    (folder / "ended.part").replace(folder / "ended")
    lock.truncate(0)


def _die_with_keeper() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _reap() -> None:
    """End what the job has left: its orphans are this process's children. One that does not end is left."""
    until = time.monotonic() + _GRACE
    while time.monotonic() < until:
        for each in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_TICK / 5)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Of this process: not every kernel has a list of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name of a program may have brackets and blanks
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _last(log: Path) -> str:
    """The last line that was printed."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def follow(place: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Print the answers from line `after` on as they come; the last line is `mark` and why it ended.

    Whoever listens sends a byte now and then: this process ends without them, and so, later, does the job.
    """
    out, patience = sys.stdout.buffer, asked["lease"]
    signal.alarm(patience)
    rows, skipped, rest = None, 0, b""
    while True:
        # looked at before the answers: what ended has written them all
        ended = _ended(folder) or (_held(place, asked["job"]) or {"why": "gone"})
        if rows is None and (folder / "rows.jsonl").exists():
            rows = (folder / "rows.jsonl").open("rb")
        while rows is not None and (chunk := rows.read(1 << 16)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if skipped < asked["after"]:
                    skipped += 1
                else:
                    out.write(line + b"\n")
            out.flush()
            if len(rest) > asked["most"]:
                return {"error": "line-too-long"}
        if "why" in ended:
            out.write(f"{asked['mark']}{json.dumps(ended)}\n".encode())
            out.flush()
            return None
        if select.select([0], [], [], _TICK)[0]:
            if not os.read(0, 4096):
                return None
            (folder / "lease").touch()
            signal.alarm(patience)


def _held(place: Path, job: str) -> dict[str, Any]:
    """A dictionary with something in it while the job runs."""
    with lock_file(place / "lock") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"held": True} if _holder(place).get("job") == job else {}
    return {}


def cancel(place: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """End it, and come back when it has."""
    until = time.monotonic() + 4 * _GRACE
    while _held(place, asked["job"]):
        keeper = _holder(place).get("keeper")
        if keeper:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                (folder / "cancel").touch()
                os.kill(keeper, signal.SIGTERM)
        if time.monotonic() > until:
            return {"error": "not-ended"}
        time.sleep(_TICK)
    return {}


def collect(place: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Its answers have been fetched: asked again, it is done again."""
    until = time.monotonic() + 4 * _GRACE
    while _held(place, asked["job"]) and time.monotonic() < until:  # its last answer comes a moment before its end
        time.sleep(_TICK / 5)
    shutil.rmtree(folder, ignore_errors=True)
    return cancel(place, folder, asked)
