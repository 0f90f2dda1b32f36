"""A `Link` by OpenSSH: carries files, starts jobs, listens, and takes all of it up again when the connection breaks."""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import json
import re
import socket
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from quantkit.bundle import stopping_when_full
from quantkit.devices.job import ANSWER, LINE, At, Done, Failed, Found, Job, Note, parse
from quantkit.devices.link import folder_of
from quantkit.devices.ssh.client import client, is_gone
from quantkit.devices.ssh.openssh import Lost, OpenSSH, again, source
from quantkit.errors import InputError, QuantkitError
from quantkit.runtimes.child import Report

_JOB = re.compile(r"[0-9a-f]{24}")
_CHUNK = 1 << 18
# of the free disk: what is left to the device
_SPARE = 64 << 20
# a job that ended so goes on when it is started again: nobody listened, or the device was off
_INTERRUPTED = ("left", "gone")
# a wheel takes about so much more unpacked
_UNPACKED = 4
_STARTS = 20
# seconds that ending the work there may take whoever leaves
_LEAVE = 20.0


class SSHLink:
    """See `devices.link.Link`.

    Args:
        shell: the way there.
        workdir: its folder there.
        wheels: sha256 -> wheel of what runs there.
        lease: seconds after which a job ends that nobody listens to.
        patience: seconds that a broken connection is tried again for.
    """

    def __init__(
        self,
        shell: OpenSSH,
        workdir: str,
        *,
        wheels: Mapping[str, Path],
        lease: int = 120,
        patience: float = 300.0,
    ) -> None:
        self._shell, self._workdir, self._wheels = shell, workdir, dict(wheels)
        self._lease, self._patience = lease, patience
        self._jobs: dict[str, Job] = {}

    @property
    def name(self) -> str:
        """Of the device."""
        return self._shell.name

    def _ask(self, room: str, do: str, *, seconds: float = 120.0, **asked: Any) -> dict[str, Any]:
        told = {"workdir": self._workdir, "do": do, **asked}
        found: dict[str, Any] = again(lambda: self._shell.call(room, told, seconds=seconds), self._patience)
        return found

    def put(self, files: Mapping[str, Path], progress: Report | None = None) -> None:
        """See `Link`.

        Raises:
            InputError: `device-full`, before anything is carried; `transfer-damaged`.
            Stopped: `device-gone`.
        """
        sizes = {sha: path.stat().st_size for sha, path in files.items()}
        tried: list[str] = []
        left: list[int] = []

        def carry() -> None:
            missing, free = self._missing(sizes)
            need = sum(sizes[sha] - begin for sha, begin in missing.items())
            left[:] = [need]
            if need + _SPARE > free and need:
                value = f"{need / 1e6:,.0f} MB are to be carried, {free / 1e6:,.0f} are free"
                raise self._shell.refused("no-space", value)
            if not missing:
                return
            parts = [[sha, sizes[sha], begin] for sha, begin in missing.items()]

            def send(stream: IO[bytes]) -> None:
                sent = 0
                for sha, begin in missing.items():
                    with files[sha].open("rb") as content:
                        content.seek(begin)
                        while chunk := content.read(_CHUNK):
                            stream.write(chunk)
                            sent += len(chunk)
                            if progress is not None:
                                progress(sent / need, f"carrying {files[sha].name} to {self.name}")

            told = {"workdir": self._workdir, "do": "receive", "files": parts}
            # as slow as a line may be: 20 kB a second
            damaged = self._shell.call("store", told, send=send, seconds=600 + need / 2e4).get("damaged")
            if damaged:
                if tried:
                    raise InputError(
                        "transfer-damaged",
                        where=self.name,
                        value="what arrived twice was not what was sent",
                        rule="a file is what its hash says",
                        remedy="look at the device's disk and memory; or the file changed here meanwhile",
                    )
                tried.append("once")
                carry()

        again(carry, self._patience, lambda: tuple(left))

    def _missing(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Bytes there of what is not whole there, and bytes that are free. Of its answer only numbers count."""
        found = self._shell.call("store", {"workdir": self._workdir, "do": "have", "files": dict(sizes)})
        there, free = found.get("there"), found.get("free")
        if not isinstance(there, dict) or not isinstance(free, int) or not 0 <= free < 1 << 63:
            raise self._shell.invalid(repr(found).encode())
        missing = {}
        for sha, size in sizes.items():
            begin = there.get(sha, 0)
            if begin is not None:
                missing[sha] = min(max(begin, 0), size) if isinstance(begin, int) else 0
        return missing, free

    def lay_out(self, name: str, files: Mapping[str, str]) -> str:
        """See `Link`."""
        folder = folder_of(name, files)
        self._ask("store", "lay_out", name=folder, files=dict(files), seconds=3600)
        return f"bundles/{folder}"

    def install(self, progress: Report | None = None) -> None:
        """Carry and unpack what runs there, unless it is there. Raises as `put`."""
        sizes = {sha: path.stat().st_size for sha, path in self._wheels.items()}
        missing, free = again(lambda: self._missing(sizes), self._patience)
        need = _UNPACKED * sum(sizes[sha] for sha in missing)
        if need + _SPARE > free and need:
            value = f"packages take about {need / 1e6:,.0f} MB, {free / 1e6:,.0f} are free"
            raise self._shell.refused("no-space", value)
        if missing:
            self.put({sha: self._wheels[sha] for sha in missing}, progress)
            self._ask("store", "unpack", files=list(self._wheels), seconds=1800)

    def start(self, job: Job) -> str:
        """See `Link`: it asks by what is asked and by what runs there.

        Raises:
            InputError: `device-busy`.
        """
        parts = [job.id, *sorted(self._wheels)]
        made = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        self._jobs[made] = job
        self._begin(made)
        return made

    def _begin(self, name: str) -> None:
        found = self._started(name)
        holder = found.get("holder")
        if isinstance(holder, dict) and _JOB.fullmatch(str(holder.get("job"))) and is_gone(holder.get("client")):
            # of a command that was killed here: nobody listens to it any more; what it answered stays
            self.cancel(holder["job"])
            found = self._started(name)
        if found.get("state") not in ("started", "running", "ended"):
            raise busy(self.name, found.get("holder"))

    def _started(self, name: str) -> dict[str, Any]:
        job = self._jobs[name]
        return self._ask(
            "jobs",
            "start",
            job=name,
            text=job.text(),
            what=job.work.kind,
            who=f"{getpass.getuser()}@{socket.gethostname()}",
            client=client(),
            wheels=list(self._wheels),
            lease=self._lease,
            module="quantkit.devices.there",
            program=source("jobs"),
        )

    def follow(self, job: str, after: int = 0) -> Generator[At | Note | Found | Failed | Done]:
        """See `Link`. A job that is done is forgotten there: asked again, it is done again.

        Whoever leaves, or refuses an answer, ends the work there: now, and not when its lease does. Where the machine
        there went off, what it had told of its progress may not have reached its disk: after a break it is asked from
        the last answer on that has.

        Raises:
            InputError: `answer-invalid`, `job-died`, `job-cancelled`.
            Stopped: `device-gone`.
        """
        count, kept, most, starts = after, after, ANSWER, 0
        cells: set[str] = set()
        while True:
            ended: dict[str, Any] | None = None
            try:
                told = {"workdir": self._workdir, "do": "follow", "job": job, "after": count}
                for line in self._listen(told, most):
                    if isinstance(line, dict):
                        ended = line
                        break
                    most -= len(line)
                    answer = parse(line, where=self.name)
                    if answer.n != count:
                        raise self._shell.invalid(line)
                    count, starts = count + 1, 0
                    kept = kept if isinstance(answer, At) else count
                    if isinstance(answer, Found):
                        if answer.cell in cells:  # told, and off before it was on the disk
                            continue
                        cells.add(answer.cell)
                    yield answer
                    if isinstance(answer, Failed | Done):
                        with contextlib.suppress(Lost):  # it has answered: it is forgotten there when it is old
                            self._ask("jobs", "collect", job=job)
                        return
            except Lost:
                pass
            except BaseException:
                # without patience: who leaves does not wait until a network is back
                with contextlib.suppress(QuantkitError):
                    told = {"workdir": self._workdir, "do": "cancel", "job": job}
                    self._shell.call("jobs", told, seconds=_LEAVE)
                raise
            if ended is not None and ended.get("why") == "cancelled":
                value = "somebody who asked the same has ended it"
                raise InputError("job-cancelled", where=self.name, value=value, remedy="run the same command again")
            if ended is not None and ended.get("why") not in _INTERRUPTED:
                raise InputError(
                    "job-died",
                    where=self.name,
                    value=f"its process ended with exit code {ended.get('code')}: {str(ended.get('said'))[:200]}",
                    rule="it ends by itself; SIGKILL (-9) is often too little memory",
                    remedy="a smaller model or batch; what it answered is kept",
                )
            starts += 1
            if starts > _STARTS or job not in self._jobs:
                raise self._shell.lost("its answer broke off")
            count = kept
            self._begin(job)

    def _listen(self, told: dict[str, Any], most: int) -> Iterator[bytes | dict[str, Any]]:
        """Lines as they come; a dictionary when the job has ended. Says now and then that it listens."""
        over = threading.Event()
        with self._shell.open("jobs", {**told, "lease": self._lease, "most": LINE}) as talk:

            def beat() -> None:
                while not over.wait(self._lease / 6):
                    talk.say(_beat)

            threading.Thread(target=beat, daemon=True).start()
            try:
                talk.say(_beat)
                mark = talk.mark.encode()
                for line in talk.lines(most + LINE, LINE):
                    if line.startswith(mark):
                        yield _said(line[len(mark) :])
                        return
                    yield line
                talk.done()
            finally:
                over.set()
        raise self._shell.lost("its answer broke off")

    def fetch(self, sha256: str, size: int, to: Path, progress: Report | None = None) -> None:
        """See `Link`.

        Raises:
            InputError: `answer-invalid`, it is longer or no base64; `transfer-damaged`.
            Stopped: `device-gone`; `disk-full` here.
        """
        part = to.with_name(f".{to.name}.part")

        def bring() -> None:
            begin = part.stat().st_size
            told = {"workdir": self._workdir, "do": "send", "sha": sha256, "begin": begin}
            with self._shell.open("store", told) as talk, stopping_when_full(part.parent), part.open("ab") as stream:
                # four letters for three bytes, and line feeds
                for line in talk.lines(2 * (size - begin) + (1 << 20), 2 << 20):
                    if line.startswith(b"{"):
                        found = _said(line)
                        if "error" in found:
                            raise self._shell.refused(str(found["error"])[:64], str(found.get("value", ""))[:200])
                        return
                    try:
                        data = base64.b64decode(line, validate=True)
                    except ValueError:
                        raise self._shell.invalid(line) from None
                    if stream.tell() + len(data) > size:
                        raise self._shell.invalid(line)
                    stream.write(data)
                    if progress is not None:
                        progress(stream.tell() / size, f"bringing {to.name} from {self.name}")
                talk.done()
            raise self._shell.lost("its answer broke off")

        try:
            part.write_bytes(b"")
            again(bring, self._patience, lambda: part.stat().st_size)
            with part.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != sha256:
                raise InputError(
                    "transfer-damaged",
                    where=self.name,
                    value="what arrived is not what was made there",
                    rule="a file is what its hash says",
                    remedy="run it again; if it stays, look at the device's disk and memory",
                )
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
        self._ask("store", "drop", sha=sha256)

    def cancel(self, job: str) -> None:
        """See `Link`."""
        self._ask("jobs", "cancel", job=job)

    def close(self) -> None:
        """End the connection."""
        self._shell.close()


def busy(name: str, holder: Any) -> InputError:
    """The error for a device that is at work for somebody."""
    return InputError(
        "device-busy", where=name, value=held(holder), rule="a device does one job at a time", remedy="try again later"
    )


def held(holder: Any) -> str:
    """Who has a device, and for what, by what its lock says."""
    found = holder if isinstance(holder, dict) else {}
    return f"{str(found.get('who', 'somebody'))[:80]} has it, for: {str(found.get('what', 'a job'))[:40]}"


def _beat(stream: IO[bytes]) -> None:
    stream.write(b"\n")


def _said(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}
