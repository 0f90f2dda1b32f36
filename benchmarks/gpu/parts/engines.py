"""`benchmarks/gpu/tensorrt.py` as a stage: its record, section by section."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.errors import InputError

_SCRIPT = Path(__file__).parents[1] / "tensorrt.py"


def missing(runtime: str) -> bool:
    """Whether the runtime's library is not installed: the script is called like one, so it is not looked for."""
    return machine.packages()[runtime.replace("_", "-")] is None


def measured(job: dict[str, Any], deadline: float) -> Iterator[tuple[str, Any]]:
    """(section, entry) of what the script records: `engines`, and lines of PENDING.md under `settles`.

    Raises:
        InputError: `engines-failed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        left = max(deadline - time.monotonic(), 1.0)
        command = [sys.executable, str(_SCRIPT), *job["bundles"], "--runtime", job["runtime"], "--out", str(out)]
        command += ["--expected", *job["expected"]] if job["expected"] else []
        command += ["--seconds", f"{left:.0f}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.is_file():
            said = (done.stderr.strip().splitlines() or [""])[-1]
            raise InputError("engines-failed", where=str(_SCRIPT), value=f"exit {done.returncode}: {said}")
        found = json.loads(out.read_text())
    yield "engines", found
    if found["correct"]:
        holds = all(row["ok"] for row in found["correct"])
        yield "settles", {"line": "engine-right", "holds": holds, "by": f"{len(found['correct'])} bundles"}
        yield "settles", {"line": "engine-address", "holds": holds, "by": "their `steps`"}
    if found["rows"]:
        yield "settles", {"line": "engine-speed", "holds": True, "by": f"{len(found['rows'])} rows"}
