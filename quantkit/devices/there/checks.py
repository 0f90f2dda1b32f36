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
from quantkit.runtimes import child
from quantkit.runtimes.onnxruntime.open import open_graph


def verify(data: Mapping[str, Any], caller: child.Caller) -> None:
    """One cell, `checks`: the files' hashes, and whether ONNX Runtime there loads the graph."""
    work, workdir = jobs.Verify.model_validate(data["work"]), Path(data["workdir"])
    bundle = Bundle.load(workdir / work.bundle)
    found = [CheckResult(name=check.name, ok=check.ok, where=(check.where or "")[:2000]) for check in bundle.verify()]
    graph = bundle.path / "onnx" / "model.onnx"
    if graph.is_file():
        try:
            open_graph(graph, machine.cores())
            found.append(CheckResult(name="onnx.loads", ok=True))
        except QuantkitError as problem:
            found.append(CheckResult(name="onnx.loads", ok=False, where=problem.line()[:2000]))
    caller.row({"cell": "checks", "rows": [dumped(each) for each in found]})


def doctor(data: Mapping[str, Any], caller: child.Caller) -> None:
    """One cell, `ceilings`."""
    work, workdir = jobs.Doctor.model_validate(data["work"]), Path(data["workdir"])
    pool = ceilings.Pool(graphs=workdir / work.graphs)
    threads = work.threads or machine.cores()
    found = ceilings.measured(threads, ("read", "copy", "compute"), size=work.size, runs=work.runs, pool=pool)
    caller.row({"cell": "ceilings", "rows": [dumped(CeilingSamples(ceilings=tuple(found)))]})
