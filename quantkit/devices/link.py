"""Connect to one device: carry files, run jobs there, and continue after a broken connection.

A device runs the same functions as child processes of this machine, through the same `runtimes.child.main`: it reads a
job from one line, and answers in lines of `row`, `at`, `note` and `error`. A row is a cell: a shape, a round, or a
stretch of positions. Received cells are kept here. If the connection breaks, the work there ends; it then starts again
with the names of the cells that are done.

A line is untrusted data: it is never executed, names no file, and has a limit.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import json
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field, ValidationError

from quantkit.bundle.disk import sha256, stopping_when_full
from quantkit.content import Closed
from quantkit.devices.answers import ANSWER, LINE, ROUND, Cells, Failed, FoundCell, read
from quantkit.devices.openssh import OpenSSH, again, held
from quantkit.errors import GateError, Inconclusive, InputError, Stopped
from quantkit.runtimes.child import Report

_CHUNK = 1 << 18
# free disk bytes left to the device; unpacked size of a wheel, relative to the file
_SPARE, _UNPACKED = 64 << 20, 4
_PROGRAM = "from quantkit.runtimes.child import main; main('quantkit.devices.there:work', {what!r})"
_KINDS: dict[int, Any] = {kind.exit: kind for kind in (GateError, Inconclusive, Stopped)}
_PROC = Path("/proc")
_Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
# called with all cells so far and the new one's name
Tell = Callable[[Cells, str], None]


class _Have(Closed):
    """Files and wheels that a device already has, and its free bytes."""

    whole: bool
    there: dict[str, _Size]
    free: _Size
    wheels: list[str]


class Link:
    """Connection to a device. Raises InputError if the device refuses, `Lost` if it is gone.

    Args:
        shell: runner of programs there.
        workdir: folder there.
        wheels: sha256 -> wheel needed there.
        lease: seconds without a listener after which work there ends.
        patience: seconds of retrying a broken connection.
    """

    def __init__(
        self, shell: OpenSSH, workdir: str, *, wheels: Mapping[str, Path], lease: int = 120, patience: float = 300.0
    ) -> None:
        self.name = shell.name
        self._shell, self._workdir, self._wheels = shell, workdir, dict(wheels)
        self._lease, self._patience = lease, patience
        # identifies this link's work, so that the next connection can end it after a break
        self._token = secrets.token_hex(16)

    def close(self) -> None:
        """End the connection."""
        self._shell.close()

    def _files(self, do: str, **asked: Any) -> dict[str, Any]:
        return {"workdir": self._workdir, "do": do, **asked}

    def carry(self, name: str, files: Mapping[str, Path], progress: Report | None = None) -> str:
        """Copy a folder of files there, relative path -> local file; nothing is sent twice.

        Returns:
            Its path below the workdir.

        Raises:
            InputError: `device-full`, before anything is carried; `transfer-damaged`.
            Stopped: `device-gone`.
        """
        sizes = {place: path.stat().st_size for place, path in files.items()}
        hashes = {place: sha256(path) for place, path in files.items()}
        folder = f"{name}-{hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()[:16]}"
        missing, damaged = -1, False

        def put() -> None:
            nonlocal missing, damaged
            there = self._have(folder, sizes)
            if there.whole:
                return
            begins = {place: min(there.there.get(place, 0), size) for place, size in sizes.items()}
            need = missing = sum(size - begins[place] for place, size in sizes.items())
            self._demand_room(need, there.free, "are to be carried")

            def send(stream: IO[bytes]) -> None:
                sent = 0
                for place, path in files.items():
                    with path.open("rb") as content:
                        content.seek(begins[place])
                        while chunk := content.read(_CHUNK):
                            stream.write(chunk)
                            sent += len(chunk)
                            if progress is not None:
                                progress(sent / need, f"carrying {path.name} to {self.name}")

            parts = [[place, size, hashes[place], begins[place]] for place, size in sizes.items()]
            told = self._files("receive", name=folder, files=parts)
            # slowest accepted line: 20 kB a second
            if self._shell.call("files", told, send=send, seconds=600 + need / 2e4).get("damaged"):
                if damaged:
                    raise _damaged(self.name, "two transfers differ from the file", "or the file changed here")
                damaged = True
                put()

        again(put, self._patience, lambda: missing)
        return f"files/{folder}"

    def _have(self, folder: str, sizes: Mapping[str, int], wheels: list[str] | None = None) -> _Have:
        answer = self._shell.call("files", self._files("have", name=folder, files=list(sizes), wheels=wheels or []))
        try:
            return _Have.model_validate(answer)
        except ValidationError:
            raise self._shell.invalid(repr(answer).encode()) from None

    def _demand_room(self, need: float, free: int, words: str) -> None:
        if need and need + _SPARE > free:
            raise self._shell.refused("no-space", f"{need / 1e6:,.0f} MB {words}, {free / 1e6:,.0f} are free")

    def install(self, progress: Report | None = None) -> None:
        """Carry and unpack the needed wheels, unless they are there. Raises as `carry`."""
        there = again(lambda: self._have("wheels", {}, list(self._wheels)), self._patience)
        missing = {sha: path for sha, path in self._wheels.items() if sha not in there.wheels}
        need = _UNPACKED * sum(path.stat().st_size for path in missing.values())
        self._demand_room(need, there.free, "about, for the packages")
        if not missing:
            return
        names = {f"{number}-{path.name}": path for number, path in enumerate(missing.values())}

        def unpack() -> None:
            folder = self.carry("wheels", names, progress).partition("/")[2]
            wheels = dict(zip(names, missing, strict=True))
            self._shell.call("files", self._files("unpack", name=folder, wheels=wheels), seconds=1800)

        again(unpack, self._patience)

    def run(
        self,
        work: str,
        job: Mapping[str, Any],
        progress: Report | None = None,
        *,
        row: Tell = lambda cells, cell: None,
        note: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str] | None = None,
    ) -> Cells:
        """Run a work of `devices.there` to its end.

        Args:
            job: JSON values; its paths are below the workdir.
            environment: environment of its process.

        Returns:
            Its cells.

        Raises:
            InputError: `device-busy`, `answer-invalid`, `job-died`.
            Stopped: `device-gone`.
            QuantkitError: the error of the work there.
        """
        cells, left = Cells(self.name), ANSWER

        def take(told: dict[str, Any]) -> dict[str, Any]:
            """Read all lines; return why the work ended."""
            nonlocal left
            over = threading.Event()
            with self._shell.open("work", told) as talk:

                def beat() -> None:
                    while not over.wait(self._lease / 6):
                        talk.say(lambda stream: stream.writelines([b"\n"]))

                threading.Thread(target=beat, daemon=True).start()
                try:
                    for line in talk.lines(left + LINE, LINE):
                        if line.startswith(b"{"):
                            return self._shell.read(line)
                        left -= len(line)
                        self._take(line, cells, progress, row, note)
                    talk.done()
                finally:
                    over.set()
            raise self._shell.lost("its answer broke off")

        def hear() -> None:
            # the next round depends on the rows of the rounds before it
            done = {cell: cells[cell] if cell.startswith(ROUND) else [] for cell in cells}
            told = {
                **{"workdir": self._workdir, "wheels": list(self._wheels), "lease": self._lease, "what": work},
                **{"who": f"{getpass.getuser()}@{socket.gethostname()}", "client": client(), "token": self._token},
                **{"program": _PROGRAM.format(what=work), "environment": dict(environment or {}), "oust": ""},
                "text": json.dumps({"work": work, "job": job, "cells": done}, allow_nan=False),
            }
            ended = take(told)
            holder = ended.get("holder")
            if ended.get("why") == "busy" and isinstance(holder, dict) and is_gone(holder.get("client")):
                # it belongs to a command that was killed here: it has no listener
                ended = take({**told, "oust": str(holder.get("token"))})
            if ended.get("why") == "busy":
                raise busy(self.name, ended.get("holder"))
            if ended.get("why") == "died":
                value = f"its process ended with exit code {ended.get('code')}: {str(ended.get('said'))[:200]}"
                rule = "a job ends by itself; SIGKILL (-9) often means too little memory"
                raise InputError("job-died", self.name, value, rule, "a smaller model or batch")
            if ended.get("why") != "done":
                raise self._shell.lost("its answer broke off")

        again(hear, self._patience, lambda: len(cells))
        return cells

    def _take(self, line: bytes, cells: Cells, progress: Report | None, row: Tell, note: Callable[[str], None]) -> None:
        """Process one line of the work. Raises InputError `answer-invalid`, and the error that ended the work."""
        kind, _, rest = line.partition(b" ")
        try:
            if kind == b"at":
                share, _, words = rest.partition(b" ")
                if not math.isfinite(done := float(share)):
                    raise ValueError("a share is a number")
                if progress is not None:
                    progress(min(max(done, 0.0), 1.0), f"{_text(words)}, on {self.name}")
                return
            data = json.loads(rest, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise self._shell.invalid(line) from None
        if kind == b"note" and isinstance(data, str):
            note(f"{self.name}: {_text(data.encode())}")
        elif kind == b"error":
            failed = read(Failed, data, self.name)
            where = f"{self.name} says: {failed.where}".removesuffix(": ")
            fields = failed.model_dump(exclude={"exit", "code", "where"})
            raise _KINDS.get(failed.exit, InputError)(failed.code, where=where, **fields)
        elif kind == b"row":
            answer = read(FoundCell, data, self.name)
            if answer.cell not in cells:
                cells.add(answer.cell, answer.rows)
                row(cells, answer.cell)
        else:
            raise self._shell.invalid(line)

    def fetch(self, sha: str, size: int, to: Path, progress: Report | None = None) -> None:
        """Fetch a file made by a work, named by its hash; it appears at `to` only if intact, and is then removed there.

        Raises:
            InputError: `answer-invalid`, it is too long or not base64; `transfer-damaged`.
            Stopped: `device-gone`; `disk-full` here.
        """
        part = to.with_name(f".{to.name}.part")

        def bring() -> None:
            told = self._files("send", sha=sha, begin=part.stat().st_size)
            with self._shell.open("files", told) as talk, stopping_when_full(part.parent), part.open("ab") as stream:
                # base64 takes four letters for three bytes, plus line feeds
                for line in talk.lines(2 * (size - stream.tell()) + (1 << 20), 2 << 20):
                    if line.startswith(b"{"):
                        self._shell.read(line)
                        return
                    try:
                        data = base64.b64decode(line, validate=True)
                    except ValueError:
                        raise self._shell.invalid(line) from None
                    if stream.tell() + len(data) > size:
                        raise self._shell.invalid(line)
                    stream.write(data)
                    if progress is not None:
                        progress(stream.tell() / size, f"bringing {to.name}")
                talk.done()
            raise self._shell.lost("its answer broke off")

        try:
            part.write_bytes(b"")
            again(bring, self._patience, lambda: part.stat().st_size)
            if sha256(part) != sha:
                raise _damaged(self.name, "the received file differs from its hash", "run it again")
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
        again(lambda: self._shell.call("files", self._files("drop", sha=sha)), self._patience)


def _text(words: bytes) -> str:
    return words.decode("utf-8", "replace")[:2000]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _damaged(name: str, value: str, remedy: str) -> InputError:
    remedy = f"look at the device's disk and memory; {remedy}"
    return InputError("transfer-damaged", name, value, "a file has to match its hash", remedy)


def busy(name: str, holder: Any) -> InputError:
    """Return the error for a busy device."""
    rule = "a device does one job at a time"
    return InputError("device-busy", name, held(holder), rule, "try again later")


def client() -> str:
    """Return this process as `BOOT:NAMESPACE:PID:BEGAN`; empty where the system does not tell (not Linux)."""
    try:
        return f"{_kernel()}:{os.getpid()}:{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(other: object) -> bool:
    """Tell whether a process ran on this machine and has ended; False if uncertain.

    A device cannot distinguish a broken connection from a killed client; this machine can.

    Args:
        other: `client` value reported by a device; untrusted, and never used as a file name.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        kernel, pid, began = str(other).rsplit(":", 2)
        if kernel != _kernel():
            return False
        try:
            return _began(int(pid)) != int(began)
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False


def _kernel() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{(_PROC / 'self/ns/pid').stat().st_ino}"


def _began(pid: int) -> int:
    """Return a process's start in ticks since boot; a program's name may contain brackets and blanks."""
    return int((_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[19])
