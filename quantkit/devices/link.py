"""What is asked of the way to a device: run, carry, start, listen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Protocol

from quantkit.bundle.disk import sha256
from quantkit.devices.job import At, Done, Failed, Found, Job, Note
from quantkit.runtimes.child import Report


class Link(Protocol):
    """The way to one device. Each call raises InputError where the device refuses, Stopped `device-gone` where it is
    not there any more: what it has done is kept, and asking again goes on."""

    @property
    def name(self) -> str:
        """Of the device, as rows and pages have it."""
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

    def follow(self, job: str, after: int = 0) -> Generator[At | Note | Found | Failed | Done]:
        """Its answers from number `after` on, as they come, in order, each cell once; ends after `Failed` or `Done`.

        To close it before ends the job: `contextlib.closing`, or the work there goes on until the collector comes.
        """
        ...

    def fetch(self, sha256: str, size: int, to: Path, progress: Report | None = None) -> None:
        """A file that a job left in the store there, by its content: whole and of that hash, or none is at `to`.

        Its name is whoever asks's; more than `size` bytes are not taken. There it is gone afterwards.
        """
        ...

    def cancel(self, job: str) -> None:
        """End the job and all that it started; what it answered stays."""
        ...


def carry(link: Link, name: str, files: Mapping[str, Path], progress: Report | None = None) -> str:
    """A folder of files there, relative path -> file here; its `Place`. Raises as `Link.put`."""
    hashes = {place: sha256(path) for place, path in files.items()}
    link.put({hashes[place]: path for place, path in files.items()}, progress)
    return link.lay_out(name, hashes)


def folder_of(name: str, files: Mapping[str, str]) -> str:
    """What a folder of these files is called there, relative path -> sha256: others are another folder."""
    return f"{name}-{hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]}"
