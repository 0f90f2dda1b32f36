"""What is asked of the way to a device: run, carry, start, listen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quantkit.devices.job import At, Done, Failed, Found, Job, Note
from quantkit.runtimes.child import Report


@dataclass(frozen=True)
class Completed:
    """A command that ran there."""

    code: int
    out: bytes
    err: bytes


class Link(Protocol):
    """The way to one device. Each call raises InputError where the device refuses, Stopped `device-gone` where it is
    not there any more: what it has done is kept, and asking again goes on."""

    @property
    def name(self) -> str:
        """Of the device, as rows and pages have it."""
        ...

    def run(self, argv: Sequence[str], stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        """Run a short command; its words are quoted, never a shell's."""
        ...

    def put(self, files: Mapping[str, Path], progress: Report | None = None) -> None:
        """Carry what is not there yet: sha256 -> a file here."""
        ...

    def lay_out(self, name: str, files: Mapping[str, str]) -> str:
        """A folder of what was carried: relative path -> sha256. Returns its `Place`; lays nothing out twice."""
        ...

    def start(self, job: Job) -> str:
        """Start the job, or take up the one that asks the same; returns its id. A device does one at a time."""
        ...

    def follow(self, job: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
        """Its answers from number `after` on, as they come, each once and in order; ends after `Failed` or `Done`."""
        ...

    def cancel(self, job: str) -> None:
        """End the job and all that it started; what it answered stays."""
        ...
