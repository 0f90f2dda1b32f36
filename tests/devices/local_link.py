"""A device that is a folder of this machine: the runner as it is elsewhere, without a way to go.

For tests, and for a Python that is another machine's: an emulator's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quantkit.devices.job import ANSWER, At, Done, Failed, Found, Job, Note, parse
from quantkit.devices.link import folder_of
from quantkit.devices.sent import answer, store
from quantkit.devices.ssh.openssh import Lost
from quantkit.devices.there.ledger import FILE
from quantkit.errors import InputError
from quantkit.runtimes.child import Report

store.lock_file = answer.lock_file  # type: ignore[attr-defined]  # as it is sent


class LocalLink:
    """See `link.Link`.

    Args:
        workdir: made if it is not there.
        name: of the device.
        python: the command that is its Python; None: this one.
        environment: added to this process's.
    """

    def __init__(
        self,
        workdir: Path,
        name: str = "local",
        python: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.workdir, self.name = workdir.resolve(), name
        self._python = list(python or [sys.executable])
        self._environment = dict(environment or {})
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}

    def put(self, files: Mapping[str, Path], progress: Report | None = None) -> None:
        """See `link.Link`."""
        files_there = self.workdir / "store"
        files_there.mkdir(parents=True, exist_ok=True)
        sizes = {digest: path.stat().st_size for digest, path in files.items()}
        for digest, there in store.have(self.workdir, {"files": sizes})["there"].items():
            if there is not None:
                shutil.copyfile(files[digest], files_there / f"{digest}.part")
                (files_there / f"{digest}.part").rename(files_there / digest)

    def lay_out(self, name: str, files: Mapping[str, str]) -> str:
        """See `link.Link`."""
        folder = folder_of(name, files)
        assert store.lay_out(self.workdir, {"name": folder, "files": files}) == {}
        return f"bundles/{folder}"

    def start(self, job: Job) -> str:
        """See `link.Link`."""
        folder = self.workdir / "jobs" / job.id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(job.text(), encoding="utf-8")
        with (folder / "stderr").open("ab") as said:
            self._jobs[job.id] = subprocess.Popen(
                [*self._python, "-m", "quantkit.devices.there", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        return job.id

    def follow(self, job: str, after: int = 0) -> Generator[At | Note | Found | Failed | Done]:
        """See `link.Link`."""
        try:
            yield from self._followed(job, after)
        except BaseException:
            self.cancel(job)
            raise

    def _followed(self, job: str, after: int) -> Iterator[At | Note | Found | Failed | Done]:
        path, offset, process = self.workdir / "jobs" / job / FILE, 0, self._jobs[job]
        while True:
            ended = process.poll() is not None
            lines = b""
            if path.is_file():
                with path.open("rb") as stream:
                    stream.seek(offset)
                    lines = stream.read(ANSWER)
            whole = lines[: lines.rfind(b"\n") + 1]
            offset += len(whole)
            for line in whole.splitlines():
                answer = parse(line, where=self.name)
                if answer.n >= after:
                    yield answer
                if isinstance(answer, (Failed, Done)):
                    process.wait()
                    shutil.rmtree(self.workdir / "jobs" / job)
                    return
            if ended and not whole:
                said = (self.workdir / "jobs" / job / "stderr").read_text(errors="replace").splitlines()
                if process.returncode > 0:
                    raise InputError("device-failed", where=self.name, value=said[-1][:200] if said else "no word")
                raise Lost("device-gone", where=self.name, value="the job has ended", remedy="--resume goes on")
            time.sleep(0.05)

    def fetch(self, sha256: str, size: int, to: Path, progress: Report | None = None) -> None:
        """See `link.Link`."""
        shutil.move(self.workdir / "store" / sha256, to)

    def cancel(self, job: str) -> None:
        """See `link.Link`."""
        process = self._jobs[job]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
