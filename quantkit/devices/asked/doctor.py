"""What a device can do at best, measured there, and made a target of."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantkit.devices import job as jobs
from quantkit.devices import target as targets
from quantkit.devices.answers import CeilingSamples, believed, invalid
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import Job
from quantkit.devices.named import find, names
from quantkit.devices.reached import Reached, reach
from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import write_graphs
from quantkit.pipeline.progress import Progress

# side of the matrices whose product is timed, which is what `write_graphs` writes; repetitions of each
SIZE, RUNS = 1024, 15
_MEASURED = [("ceiling.read", None), ("ceiling.copy", None), ("ceiling.compute", "fp32"), ("ceiling.compute", "int8")]


def doctor_at(
    on: str, progress: Progress | None = None, *, write: bool = False, wheelhouse: Path | None = None
) -> dict[str, Any]:
    """`doctor_on` of a device's name or address.

    Raises:
        InputError: `usage`, a target of a device that has no name; those of `reach`.
    """
    device = find(on)
    if write and on not in names():
        rule, remedy = "a target is kept under the name of its device", f"quantkit device add NAME {on}"
        raise InputError("usage", where="--write", value=on, rule=rule, remedy=remedy)
    with reach(device, wheelhouse=wheelhouse) as found:
        return doctor_on(found, progress or Progress(), write=write)


def doctor_on(found: Reached, progress: Progress, *, write: bool = False) -> dict[str, Any]:
    """Measure a device's ceilings.

    Args:
        write: make a target of it, in the user's settings.

    Returns:
        `device`, `machine` (see `Probed`), `measurements` (rows), `written` (a path or None), `warnings`.

    Raises:
        InputError: `emulated`, with `write`; what the device answers; those of the link.
        MissingDependency: onnx, here.
    """
    progress.plan({"carrying": 20.0, "measuring": 20.0})
    found.ready(progress)([])
    with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
        graphs = found.carry("ceilings", {path.name: path for path in write_graphs(Path(folder), SIZE)})
    work = jobs.Doctor(graphs=graphs, size=SIZE, runs=RUNS)

    def look(answers: CollectedCells, cell: str) -> None:
        if write and cell == "about" and answers.about.emulated:
            raise InputError(
                "emulated",
                where=answers.on,
                value=f"its {answers.about.machine} is a program",
                rule="times of an emulator say nothing of any machine, and make no target",
                remedy="leave out --write, or measure on the machine itself",
            )

    answers = CollectedCells.of(found.link, Job(work=work), progress, "measuring", look)
    ceilings = answers.one(CeilingSamples, "ceilings").ceilings
    if [(each.name, each.settings.get("compute_type")) for each in ceilings] != _MEASURED:
        raise invalid(answers.on, f"ceilings: {', '.join(each.name for each in ceilings)}")
    about = answers.about
    with believed(answers.on):
        rows = [each.row(device=about.device(answers.on), versions=about.versions) for each in ceilings]
    rows = [row.model_copy(update={"flags": [*row.flags, *about.flags]}) for row in rows]
    written = None
    if write:
        written = str(targets.write(targets.target_of(answers.on, found.about, ceilings, datetime.now(UTC).date())))
    warnings = ["it is an emulator: its times say nothing of any machine"] if about.emulated else []
    warnings += [
        f"{row.name} ({row.unit}): two halves of the runs differ by {row.aa_spread:.0%}"
        for row in rows
        if "noisy" in row.flags
    ]
    return {
        "device": answers.on,
        "machine": found.about.as_dict(),
        "measurements": [row.as_dict() for row in rows],
        "written": written,
        "warnings": warnings,
    }
