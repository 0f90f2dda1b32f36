"""An engine built on this device, with the TensorRT that it has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.devices import job as jobs
from quantkit.exporters.tensorrt import engine
from quantkit.exporters.tensorrt.timings import place
from quantkit.runtimes import child
from quantkit.runtimes.tensorrt.file import NETWORK
from quantkit.runtimes.tensorrt.library import load


def build(data: Mapping[str, Any], caller: child.Caller) -> None:
    """One cell, `engine`: what came of it. The engine itself lies in the store, by its hash."""
    work, workdir = jobs.BuildEngine.model_validate(data["work"]), Path(data["workdir"])
    if "engine" in data["cells"]:
        return
    # in the job's own folder until it is whole
    made = Path(os.environ["TMPDIR"]) / "engine"
    cache = place(load(work.library), work.gpu, work.flags)
    built = engine.build(
        engine.EngineJob.model_validate(
            {
                **work.flags,
                "network": str(workdir / work.network / NETWORK),
                "engine": str(made),
                "library": work.library,
                "sm": work.sm,
                "gpu": work.gpu,
                "profiles": work.profiles,
                # of the device, from job to job
                "timing_cache": None if cache is None else str(workdir / "timing" / cache.name),
                "seconds": work.seconds,
            }
        ),
        progress=caller.at,
    )
    made.replace(workdir / "store" / built.sha256)
    caller.row({"cell": "engine", "rows": [built.model_dump(mode="json")]})
