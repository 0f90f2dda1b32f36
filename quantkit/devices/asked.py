"""Questions to a device besides timings: its ceilings, a bundle's integrity there, free room, its target."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from quantkit.bundle import Bundle, Check
from quantkit.bundle.disk import write_atomic, writing
from quantkit.bundle.manifest import UNLISTED
from quantkit.content import Closed, find, read_yaml, validated
from quantkit.devices.answers import Bytes, CeilingSamples, Cells, CheckResult, believed, invalid, read
from quantkit.devices.link import busy
from quantkit.devices.named import NamedDevice, target_path
from quantkit.devices.probed import Probed
from quantkit.devices.reached import Reached, shell
from quantkit.errors import InputError
from quantkit.measurement.doctor import figures
from quantkit.measurement.operators.ceilings import Ceiling, write_graphs
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.reload import exports_of
from quantkit.target import Target

# side of the matrices whose product is timed, which is what `write_graphs` writes; repetitions of each
SIZE, RUNS = 1024, 15
_MEASURED = [("ceiling.read", None), ("ceiling.copy", None), ("ceiling.compute", "fp32"), ("ceiling.compute", "int8")]
# what a device may have
RUNTIMES = ("onnxruntime", "llama_cpp", "openvino")
_ARM = ("aarch64", "arm64")
_Number = Annotated[int, Field(ge=0, le=1 << 30)]


def doctor_on(reached: Reached, progress: Progress, *, write: bool = False) -> dict[str, Any]:
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
    link = reached.link
    link.install(partial(progress.at, "carrying"))
    with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
        graphs = link.carry("ceilings", {path.name: path for path in write_graphs(Path(folder), SIZE)})

    def look(answers: Cells, cell: str) -> None:
        if write and cell == "about" and answers.about.emulated:
            rule = "times of an emulator say nothing of any machine, and make no target"
            remedy, value = "leave out --write, or measure on the machine itself", answers.about.machine
            raise InputError("emulated", where=answers.on, value=f"its {value} is a program", rule=rule, remedy=remedy)

    job = {"graphs": graphs, "size": SIZE, "runs": RUNS}
    answers = link.run("doctor", job, partial(progress.at, "measuring"), row=look)
    ceilings = answers.one(CeilingSamples, "ceilings").ceilings
    if [(ceiling.name, ceiling.settings.get("compute_type")) for ceiling in ceilings] != _MEASURED:
        raise invalid(answers.on, f"ceilings: {', '.join(ceiling.name for ceiling in ceilings)}")
    about = answers.about
    with believed(answers.on):
        rows = [ceiling.row(device=about.device(answers.on), versions=about.versions) for ceiling in ceilings]
    rows = [row.model_copy(update={"flags": [*row.flags, *about.flags]}) for row in rows]
    written = None
    if write:
        written = str(write_target(target_of(answers.on, reached.about, ceilings, datetime.now(UTC).date())))
    warnings = ["it is an emulator: its times say nothing of any machine"] if about.emulated else []
    warnings += [
        f"{row.name} ({row.unit}): two halves of the runs differ by {row.aa_spread:.0%}"
        for row in rows
        if "noisy" in row.flags
    ]
    return {
        "device": answers.on,
        "machine": reached.about.as_dict(),
        "measurements": [row.as_dict() for row in rows],
        "written": written,
        "warnings": warnings,
    }


def verify_on(bundle: Bundle, reached: Reached, progress: Progress | None = None) -> tuple[list[Check], list[str]]:
    """Carry a bundle to a device, hash its files there, load each export in its runtime and make a step in it.

    Returns:
        the checks, and a note for each export whose runtime the device does not have.

    Raises:
        InputError: `hash-mismatch`, it is not whole here; what the device answers; those of the link.
    """
    progress, link = progress or Progress(), reached.link
    here = bundle.verify()
    for check in here:
        if not check.ok:
            rule, remedy = "what is carried is what the manifest says", f"quantkit verify {bundle.path}"
            raise InputError("hash-mismatch", where=check.where, value=check.name, rule=rule, remedy=remedy)
    exports = exports_of(bundle, RUNTIMES)
    # they are loaded one after another
    largest = max(
        map(_loaded, exports.values()), key=lambda files: sum(path.stat().st_size for path in files), default=[]
    )
    progress.plan({"carrying": 60.0, "verifying": 20.0})
    carrying = partial(progress.at, "carrying")
    reached.prepare(largest, progress=carrying)
    listed = [*(entry.path for entry in bundle.manifest.files), *UNLISTED]
    files = {name: path for name in sorted(listed) if (path := bundle.path / name).is_file()}
    place = link.carry("bundle", files, carrying)
    loads = {name: f"{place}/{path.relative_to(bundle.path).as_posix()}" for name, path in exports.items()}
    job = {"bundle": place, "loads": loads, "graphs": holds_graph(bundle)}
    answers = link.run("verify", job, partial(progress.at, "verifying"))
    found = [read(CheckResult, row, link.name) for row in answers.get("checks", ())]
    names = [check.name for check in found]
    hashed = [check.name for check in here]
    loads = {f"{name}.loads": name for name in exports}
    if names[: len(hashed)] != hashed or not set(names[len(hashed) :]) <= set(loads):
        raise invalid(link.name, f"checks: {', '.join(names)}")
    checks = [
        Check(name=check.name, value=float(not check.ok), limit=0.0, ok=check.ok, where=check.where) for check in found
    ]
    whole = all(check.ok for check in found[: len(hashed)])
    notes = [f"{link.name} has no {name}: not loaded there" for check, name in loads.items() if check not in names]
    return checks, notes if whole else ["not loaded: files differ"]


def _loaded(path: Path) -> list[Path]:
    return [file for file in (path if path.is_dir() else path.parent).rglob("*") if file.is_file()]


class Cleaned(Closed):
    """Counts what was removed, in files of each kind and bytes."""

    bundles: _Number
    wheels: _Number
    bytes: Bytes


def clean(device: NamedDevice) -> Cleaned:
    """Remove the bundles and wheels there, unless somebody is at work; what is needed again is carried again.

    Raises:
        InputError: `device-busy`; `workdir-foreign`; what keeps one out.
        Stopped: `device-gone`.
    """
    with shell(device) as way:
        found = way.call("files", {"workdir": device.workdir, "do": "clean"}, seconds=600.0)
    if "holder" in found:
        raise busy(device.name, found["holder"])
    return validated(Cleaned, found, where=device.name, code="answer-invalid", rule="what was removed, in numbers")


def target_of(name: str, about: Probed, ceilings: Sequence[Ceiling], when: date) -> Target:
    """Its processor as a target.

    Args:
        name: of the device.
        about: what it says of itself.
        ceilings: as `ceilings.measured` gives them for `read`, `copy` and `compute`.
        when: they were measured.
    """
    base = _shipped(about)
    # as it ships: what this machine has measured for itself is not the device's
    target = Target.from_dict(read_yaml(find("export", base)), name=name)
    measured = figures(target, ceilings, {"memory_limit": about.memory, "last_level_cache": about.last_level_cache})
    source = f"measured by quantkit device doctor {name} on {about.processor}, {about.cores} cores, {when}"
    data = target.resolve({"figures": measured, "isa": about.isa, "source": source}).as_dict()
    summary = f"{about.model or about.processor}, {about.cores} cores: {name}, figures measured there on {when}"
    return Target.from_dict({**data, "summary": summary}, name=name)


def usual(name: str, about: Probed) -> str:
    """The target of what is measured on a device: its own, where it was written, else that of its architecture."""
    own = target_path(name)
    return str(own) if own.is_file() else _shipped(about)


def _shipped(about: Probed) -> str:
    return "cpu-arm" if about.machine.lower() in _ARM else "cpu-x86"


def write_target(target: Target) -> Path:
    """Its YAML, in the user's settings. Raises InputError `file-unwritable`, Stopped `disk-full`."""
    path = target_path(target.name)
    data = {key: value for key, value in target.as_dict().items() if key != "name" and value is not None}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).encode())
    return path
