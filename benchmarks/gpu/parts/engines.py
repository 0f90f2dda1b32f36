"""`benchmarks/gpu/tensorrt.py` as a stage: its record, section by section."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).parents[1] / "tensorrt.py"


def measured(job: dict[str, Any], deadline: float) -> Iterator[tuple[str, Any]]:
    """(section, entry) of what the script records: `engines`, and lines of PENDING.md under `settles`."""
    import time

    from quantkit import machine
    from quantkit.errors import InputError

    runtime = job["runtime"]
    if not machine.has(runtime):
        raise InputError("stage-skipped", where="engines", value=f"{runtime} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        argv = [str(_SCRIPT), *job["bundles"], "--runtime", runtime, "--out", str(out)]
        argv += ["--expected", *job["expected"]] if job["expected"] else []
        sys.argv = [*argv, "--seconds", f"{max(deadline - time.monotonic(), 1):.0f}"]
        try:
            runpy.run_path(str(_SCRIPT), run_name="__main__")
        except SystemExit as ended:
            if not out.is_file():
                raise InputError("engines-failed", where=str(_SCRIPT), value=f"exit {ended.code}") from None
        found = json.loads(out.read_text())
    yield "engines", found
    if found["correct"]:
        holds = all(row["ok"] for row in found["correct"])
        yield "settles", {"line": "engine-right", "holds": holds, "by": f"{len(found['correct'])} bundles"}
        yield "settles", {"line": "engine-address", "holds": holds, "by": "their `steps`"}
    if found["rows"]:
        yield "settles", {"line": "engine-speed", "holds": True, "by": f"{len(found['rows'])} rows"}
