"""Whether a bundle is whole on this device, and what the device can do at best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.devices import job as jobs
from quantkit.devices.answers import CeilingSamples, CheckResult, dumped
from quantkit.errors import QuantkitError
from quantkit.measurement.operators import ceilings
from quantkit.measurement.timing import speed
from quantkit.runtimes import child, load_runtime


def verify(data: Mapping[str, Any], caller: child.Caller) -> None:
    """One cell, `checks`: the files' hashes and, if they hold, what each runtime that is there makes of its export."""
    work, workdir = jobs.Verify.model_validate(data["work"]), Path(data["workdir"])
    bundle = Bundle.load(workdir / work.bundle)
    found = [CheckResult(name=check.name, ok=check.ok, where=(check.where or "")[:2000]) for check in bundle.verify()]
    for runtime, place in work.loads.items() if all(each.ok for each in found) else ():
        if load_runtime(runtime).why_not_here() is not None:
            continue
        caller.at(0.5, f"loading it in {runtime}")
        path, met = workdir / place, ""
        speed.demand_room([path])
        try:
            speed.stepped(path, runtime, graph=work.graphs)
        except QuantkitError as problem:
            met = problem.line()[:2000]
        found.append(CheckResult(name=f"{runtime}.loads", ok=not met, where=met))
    caller.row({"cell": "checks", "rows": [dumped(each) for each in found]})


def doctor(data: Mapping[str, Any], caller: child.Caller) -> None:
    """One cell, `ceilings`."""
    work, workdir = jobs.Doctor.model_validate(data["work"]), Path(data["workdir"])
    pool = ceilings.Pool(graphs=workdir / work.graphs)
    threads = work.threads or machine.cores()
    found = ceilings.measured(threads, ("read", "copy", "compute"), size=work.size, runs=work.runs, pool=pool)
    caller.row({"cell": "ceilings", "rows": [dumped(CeilingSamples(ceilings=tuple(found)))]})
