"""What a job's process does in tests: commits each cell after a while, or meets what its recipe is called after."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from quantkit.errors import InputError
from quantkit.nightly.jobs import Job
from quantkit.nightly.records import Cell, Result
from quantkit.nightly.store import Store
from quantkit.pipeline.progress import Progress

SECONDS = 0.2


def work(job: Job, progress: Progress) -> None:
    """The store lies beside the configuration's path; who began what stands in `log`."""
    home = Path(job.config).parent
    store = Store.open(home / "store")
    with (home / "log").open("a") as log:
        log.write(f"{job.build} {os.getpid()}\n")
    recipe = Cell.of(job.cells[0]).recipe
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
        time.sleep(SECONDS)
        progress.at("measure", 0.5, key)
        store.commit(Result.of(job.night, Cell.of(key), "done", attempt=job.attempt, content_sha256="a" * 64))
