"""`python -m quantkit.devices.there JOBDIR`: does a job, and writes what it finds beside it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from quantkit import limits
from quantkit.devices.job import Job
from quantkit.devices.there import work
from quantkit.devices.there.ledger import Ledger
from quantkit.errors import InputError, QuantkitError, Stopped


def main(folder: Path) -> int:
    """Do what `job.json` asks, as far as it is not done yet.

    Args:
        folder: `WORKDIR/jobs/ID`; nothing outside of it is written.

    Returns:
        0, or the exit code of what ended it, which the last line says; of a signal no line does: it is taken up again.
    """
    (folder / "pid").write_text(f"{os.getpid()}\n", encoding="ascii")
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    os.environ.update(TMPDIR=str(scratch), QUANTKIT_CACHE=str(scratch / "cache"), HOME=str(scratch))
    # the first GPU is then the same to CUDA, which else begins with the fastest, and to the driver, which names it
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    signal.signal(signal.SIGTERM, _stop)
    ledger = Ledger(folder)
    if ledger.is_done:
        return 0
    try:
        job = Job.read(limits.read(folder / "job.json").decode())
        work.do(job.work, folder.parents[1], ledger)
        ledger.done()
        return 0
    except QuantkitError as problem:
        met = problem
    except Exception as problem:
        met = InputError("device-failed", where=folder.name, value=f"{type(problem).__name__}: {problem}"[:500])
    ledger.failed(met)
    return met.exit


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    except KeyboardInterrupt:
        sys.exit(Stopped.exit)
