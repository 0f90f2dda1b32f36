"""One compile in a process of its own, with what each of its parts took.

    request: {"model", "recipe", "changes": [...], "out", "speed": false, "vllm": true, "resume": false,
              "target": null,
              "scored": positions, fewer than a user's, so that many compiles take minutes}
    answer:  {"parts": [{"stage", "detail", "seconds", "cpu_seconds", "peak_bytes"}], "stages", "peak_bytes", ...,
              "figures": rows of accuracy and size, "gates": {name: holds}}

The kernel's high-water mark of resident memory is set back at each part, so that every part has a peak of its own. This
must not be done in a user's process, whose mark is not ours.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.progress import Progress
from quantkit.report.bundle import figures

FIGURES = ("accuracy.", "size.bits_per_weight")


class Watch(Progress):
    """Takes the time and the peak of every part that the pipeline names."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self._part = ("open", "")
        self._began = self._now()

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """Ends a part where another begins."""
        # blocks and shares of a score are no parts
        part = (stage, detail if stage in ("export", "check") else detail.rpartition(", ")[2] if detail else "")
        if stage in ("quantize", "speed", "build"):
            part = (stage, "")
        if part[1] == "" and part[0] == self._part[0] and done < 1.0:
            return
        if part != self._part:
            self.end()
            self._part = (stage, part[1] if done < 1.0 else "end")

    def end(self) -> None:
        """Notes what the present part took, and sets the mark back."""
        now = self._now()
        wall, cpu = (after - before for after, before in zip(now, self._began, strict=True))
        found = {"stage": self._part[0], "detail": self._part[1], "seconds": wall, "cpu_seconds": cpu}
        self.parts.append({**found, "peak_bytes": machine.peak_bytes(), "resident_bytes": _resident()})
        Path("/proc/self/clear_refs").write_text("5")
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        used = os.times()
        return time.perf_counter(), used.user + used.system + used.children_user + used.children_system


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def main(request: dict[str, Any]) -> dict[str, Any]:
    if "scored" in request:
        tokens.SCORED = request["scored"]
    watch = Watch()
    started = watch._now()
    asked = Request.of(
        request["model"],
        recipe=request["recipe"],
        target=request.get("target"),
        changes=request.get("changes", []),
        out=request["out"],
        speed=request.get("speed", False),
        vllm=request.get("vllm", True),
        resume=request.get("resume", False),
    )
    done = compile_model(asked, watch)
    watch.end()
    wall, cpu = (after - before for after, before in zip(watch._now(), started, strict=True))
    bundle = sum(path.stat().st_size for path in Path(request["out"]).rglob("*") if path.is_file())
    return (
        {"parts": watch.parts, "stages": [stage.as_dict() for stage in done.stages]}
        | {"seconds": wall, "cpu_seconds": cpu, "quantize_cpu": done.seconds["quantize_cpu"]}
        | {"peak_bytes": max(part["peak_bytes"] for part in watch.parts)}
        | {"bundle_bytes": bundle, "warnings": done.warnings}
        | {"figures": [row.model_dump(mode="json") for row in done.rows if row.name.startswith(FIGURES)]}
        | {"gates": {check.name: check.ok for check in figures.gates(done.bundle.manifest.checks)}}
    )
