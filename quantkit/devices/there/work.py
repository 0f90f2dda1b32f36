"""What each kind of job is: cells, done one by one, in processes of their own."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.devices import job as jobs
from quantkit.devices.answers import DeviceFacts, dumped
from quantkit.devices.sent import probe
from quantkit.devices.there import checks, engine, models, night, streamed, tax, times
from quantkit.devices.there.ledger import Ledger
from quantkit.measurement.operators.run import environment
from quantkit.runtimes import child, load_runtime

_REMEDY = "try smaller batches: --batch 1,2,4"
# kind of job -> what its process does
_DONE_BY: Mapping[str, Callable[[Any, child.Caller], None]] = {
    "measure": times.measure,
    "rounds": times.rounds,
    "accuracy": models.score,
    "streamed": streamed.score,
    "tax": tax.tax,
    "generate": models.generate,
    "verify": checks.verify,
    "doctor": checks.doctor,
    "night": night.night,
    "engine": engine.build,
}


def do(work: jobs.Work, workdir: Path, ledger: Ledger) -> None:
    """All cells of a job that the ledger lacks.

    The work is done in a child: its end for want of memory is one more answer, and not the end of this process.

    Raises:
        InputError, GateError, Stopped: what the child met.
    """
    if "about" not in ledger.cells:
        ledger.found("about", [dumped(about())])
    child.run(
        _DONE_BY[work.kind],
        {"work": work.model_dump(mode="json"), "workdir": str(workdir), "cells": dict(ledger.cells)},
        ledger.at,
        remedy=_REMEDY,
        where=work.kind,
        died="device-failed",
        environment=environment(work.threads) if isinstance(work, jobs.Tax) else None,
        note=ledger.note,
        row=lambda row: ledger.found(row["cell"], row["rows"]),
    )
    # last: the first times are waited for
    weighed = isinstance(work, jobs.Measure) and work.samples is None and load_runtime(work.runtime).floats is not None
    if isinstance(work, jobs.Measure) and weighed and "memory" not in ledger.cells:
        ledger.found("memory", [dumped(times.memory(work, workdir))])


def about() -> DeviceFacts:
    """This machine, as it knows itself."""
    # without nvidia-ml-py, which torch does not bring, as the probe found it
    device, gpus = machine.device(), machine.gpus()[0] or probe.gpus()
    return DeviceFacts(
        id=device["id"],
        name=device["name"],
        machine=platform.machine(),
        isa=machine.isa(),
        cores=machine.cores(),
        memory=machine.memory_limit(),
        cache=machine.last_level_cache(),
        versions=machine.versions(),
        emulated=machine.emulated(),
        gpu=gpus[0]["name"] if gpus else "",
        driver=gpus[0]["driver"] if gpus else "",
    )
