"""What a job's process does in tests: commits each cell after a while, or meets what its recipe is called after."""

import os
import signal
import time
from pathlib import Path

from quantkit.devices.named import NamedDevice
from quantkit.errors import InputError
from quantkit.nightly.records import BuildJob, NightCell, Result, Time
from quantkit.nightly.store import Store
from quantkit.pipeline.progress import Progress


def work(job: BuildJob, progress: Progress) -> None:
    """The store lies beside the configuration's path; who began what, and where, stands in `log`, and where there is a
    `seconds`, a cell takes as many."""
    home = Path(job.config).parent
    store = Store.open(home / "store")
    with (home / "log").open("a") as log:
        log.write(f"{job.name} {os.getpid()} {time.monotonic()} {os.environ.get('NODE')} {_address(job)}\n")
    recipe = NightCell.of(job.cells[0]).recipe
    if recipe == "raises":
        raise InputError("planted", where="here", value="1", rule="2", remedy="3")
    if recipe == "breaks":
        raise ZeroDivisionError("by zero")
    if recipe == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if recipe == "hangs":
        time.sleep(60)
    for key in job.cells:
        if key in store.committed(job.night, job.attempt):
            continue
        if (home / "seconds").exists():
            time.sleep(float((home / "seconds").read_text()))
        progress.at("measure", 0.5, key)
        cell = NightCell.of(key)
        before = store.accepted(before=job.night).get(key)
        sha256 = None if before is None else before.content_sha256
        result = Result.of(
            job.night, cell, "done", attempt=job.attempt, content_sha256="a" * 64, bytes=10, baseline_sha256=sha256
        )
        taken = times(job, cell, slower=(home / "slower").exists())
        store.commit(result, [each for each in taken if before or each.side == "candidate"])


def _address(job: BuildJob) -> str | None:
    return NamedDevice.read(job.device, where=job.on).address if job.on else None


def prepare(job: BuildJob, progress: Progress) -> None:
    """What stands for a compile."""
    with (Path(job.config).parent / "log").open("a") as log:
        log.write(f"prepare {os.getpid()}\n")
    if NightCell.of(job.cells[0]).recipe == "unprepared":
        raise InputError("planted", where="compile")


def times(job: BuildJob, cell: NightCell, *, slower: bool) -> list[Time]:
    """Ten rounds of two blocks; with `slower` the candidate takes half as long again, in every attempt."""
    took = {"candidate": 1.5e-3 if slower else 1e-3, "baseline": 1e-3}
    order = ["candidate"] * 2 + ["baseline"] * 4 + ["candidate"] * 2
    return [
        Time(job.night, cell.key, job.attempt, side, turn, block, place, took[side] * (1 + 1e-4 * turn), 1.0)  # type: ignore[arg-type]
        for turn in range(10)
        for block in range(2)
        for place, side in enumerate(order)
    ]
