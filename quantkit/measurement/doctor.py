"""Describe this machine for `quantkit doctor`: hardware, measured ceilings, and the figures of a target.

A processor's target may leave figures to measurement (`auto`). With `write`, the measured ones are saved in the user's
cache, where `Target.load` finds them. A GPU target states all its figures; the ceilings of a card of its architecture
are reported beside them. The doctor works without torch; a figure that needs it (the int8 rate) is then null, with the
reason.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.operators import ceilings
from quantkit.runtimes import apart
from quantkit.runtimes.tensorrt.library import NAMES, load
from quantkit.target import Target, read_measured, write_measured

# number of A B B A rounds for each ceiling of a GPU
_BLOCKS = 4
# relative difference in memory that means another card; the driver's own memory is less
_OTHER = 0.15


def doctor(target: Target, *, write: bool = False, runs: int = 15, size: int = 2048) -> dict[str, Any]:
    """Describe this machine and measure its ceilings: the processor's, or the GPU's for a GPU target.

    Args:
        target: target whose `auto` figures to measure.
        write: True to save the measured figures in the user's cache.
        runs: repetitions of each measurement on a processor.
        size: side of the square matrices to multiply on a processor.

    Returns:
        `machine` (as `machine.describe`), `tensorrt` (see there), `measurements` (rows), `figures`
        (measured `auto` figures by place in the target), `stated` (share of each stated figure that a GPU reached, by
        place), `unmeasured` (places without a measurement), `written` (path or None), `warnings` (doubts about the
        figures).

    Raises InputError: `wrong-machine` for a target of another architecture; `cache-unwritable`.
    """
    about = machine.describe()
    report: dict[str, Any] = {"target": target.name, "machine": about, "measurements": [], "figures": {}}
    report |= {"stated": {}, "warnings": []}
    report["tensorrt"] = tensorrt(about["gpus"], about["gpus_absent"])
    if target.kind == "cpu":
        if busy := _busy(about["cores"]):
            report["warnings"].append(busy)
        if write:
            demand_architecture(target, about["isa"])
        measured = ceilings.measured(machine.cores(), ("read", "copy", "compute", "bf16"), size=size, runs=runs)
        kept = {"device": about["device"], "versions": machine.versions()}
        report["measurements"] = [ceiling.row(**kept).as_dict() for ceiling in measured]
        report["figures"] = figures(target, measured, about)
        for row in report["measurements"]:
            if "noisy" in row["flags"]:
                report["warnings"].append(_noisy(row))
    else:
        report["measurements"], why = _of_gpu(target, about["gpus"], about["gpus_absent"])
        report["stated"] = shares(target, report["measurements"])
        report["warnings"] += (
            [f"nothing was measured of {target.name}: {why}"] if why else _doubts(target, report["measurements"])
        )
        if write:
            report["warnings"].append(f"nothing was written: {target.name} states all of its figures")
    report["unmeasured"] = [place for place in _auto(target) if place not in report["figures"]]
    report["written"] = None
    if write and report["figures"]:
        when = datetime.datetime.now(datetime.UTC).date().isoformat()
        data = {
            "target": target.name,
            "source": f"measured by quantkit doctor on {about['device']['name']}, {about['cores']} cores, {when}",
            "device": about["device"],
            "isa": about["isa"],
            "figures": report["figures"],
            "measurements": report["measurements"],
        }
        report["written"] = str(write_measured(target.name, data))
    return report


def _of_gpu(target: Target, gpus: Sequence[Mapping[str, Any]], absent: str) -> tuple[list[dict[str, Any]], str]:
    """Return (rows `ceiling.*` of torch's first GPU, reason for having none or "")."""
    if not gpus:
        return [], absent or "no NVIDIA GPU"
    if not machine.has("triton"):
        return [], "triton is not installed"
    if blind := _torch_blind():
        return [], blind
    import numpy as np
    import torch

    from quantkit.measurement.cuda import device as cuda
    from quantkit.measurement.cuda.device import GpuDevice

    name, sm = torch.cuda.get_device_name(0), "{}.{}".format(*torch.cuda.get_device_capability(0))
    if sm != target.arch.sm:
        return [], f"{name} is SM {sm}, the target {f'SM {target.arch.sm}' if target.arch.sm else 'states none'}"
    try:
        return cuda.measured(GpuDevice("cuda", dry=False), _BLOCKS, np.random.default_rng(0)), ""
    except RuntimeError as problem:  # too little free memory, or a card too old for a kernel
        return [], f"{name}: {str(problem).splitlines()[0]}"


def _doubts(target: Target, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    import torch

    doubts = []
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    stated = target.memory.capacity.value
    if isinstance(stated, float) and abs(memory / stated - 1) > _OTHER:
        doubts.append(f"{name} has {memory / 1e9:.0f} GB, {target.name} {stated / 1e9:.0f}: it is another card")
    return doubts + [_noisy(row) for row in rows if (row.get("aa_spread") or 0.0) > ceilings.NOISY]


def _noisy(row: Mapping[str, Any]) -> str:
    return f"{row['name']} ({row['unit']}): the halves of its runs differ by {row['aa_spread']:.0%}"


def shares(target: Target, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of each stated figure that a GPU reached, by place; `rows` are its `ceiling.*` rows."""
    stated = {place: figure.value for place, figure in target.figures().items() if figure.value}
    reached = {place_of(row): row["value"] for row in rows if row["value"] is not None}
    return {place: float(value) / float(stated[place]) for place, value in reached.items() if place in stated}


def place_of(row: Mapping[str, Any]) -> str:
    """Return the place of a `ceiling.*` row's figure in a target; "" without one."""
    kind = row["settings"].get("compute_type")
    return f"compute.{kind}" if kind else "memory.read_bandwidth" if row["name"] == "ceiling.read" else ""


def tensorrt(gpus: Sequence[Mapping[str, Any]], absent: str) -> list[dict[str, Any]]:
    """Report the capabilities of both TensorRT libraries on `gpus`, and obstacles.

    Returns:
        for each library: `library`, `version` (None if not installed), `builds_for` (compute capabilities; those of
        this machine if the library builds on the GPU) and `missing`, a sentence for each obstacle to a build or a run.
    """
    reports: list[dict[str, Any]] = []
    for name in NAMES:
        try:
            library = load(name)
        except MissingDependency as problem:
            why = f"not installed; {problem.remedy}"
            reports.append({"library": name, "version": None, "builds_for": [], "missing": [why]})
            continue
        able = library.capabilities() if library.ahead_of_time else [str(gpu["sm"]) for gpu in gpus]
        missing = []
        if not gpus:
            verb = "runs no engine" if library.ahead_of_time else "neither builds nor runs an engine"
            missing.append(f"it {verb} here: {absent or 'no NVIDIA GPU'}")
        elif str(gpus[0]["sm"]) not in able:
            missing.append(f"{gpus[0]['name']} is SM {gpus[0]['sm']}, for which it has no engines")
        if gpus and (blind := _torch_blind()):
            missing.append(f"it runs no engine: {blind}")
        reports.append({"library": name, "version": library.version, "builds_for": able, "missing": missing})
    return reports


def runtimes() -> dict[str, str]:
    """Describe the runtimes with a Python of their own: version and Python, or how to add it."""
    told = {}
    for name in apart.known():
        try:
            place = apart.demand(name)
            told[name] = f"{place.versions.get(name)} in {place.python}"
        except InputError as problem:
            told[name] = f"{problem.value}; {problem.remedy}"
    return told


def _torch_blind() -> str:
    """Return why torch sees no GPU, or "": timing and engine inputs need torch's GPU memory."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def _busy(cores: int) -> str:
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not available on every system
        return ""
    return f"the machine is busy: load {load:.1f} on {cores} cores; measure again when idle" if load > cores / 2 else ""


def _auto(target: Target) -> list[str]:
    return [place for place, figure in target.figures().items() if figure.state != "stated"]


def figures(target: Target, measured: Sequence[ceilings.Ceiling], about: Mapping[str, Any]) -> dict[str, float]:
    """Return the value of each `auto` figure of a target, by place.

    Args:
        target: the target.
        measured: ceilings `read`, `copy`, then those of computing.
        about: description of the machine, with `memory_limit` and `last_level_cache`.
    """
    values = {
        "memory.capacity": about["memory_limit"],
        "memory.last_level_cache": about["last_level_cache"],
        "memory.read_bandwidth": measured[0].value,
        **{f"compute.{ceiling.settings['compute_type']}": ceiling.value for ceiling in measured[2:]},
    }
    return {place: float(values[place]) for place in _auto(target) if values.get(place) is not None}


def demand_architecture(target: Target, isa: list[str]) -> None:
    """Refuse to measure a target of another architecture here. Raises InputError `wrong-machine`."""
    arm = any(name.startswith(("neon", "sve")) for name in isa)
    fits = {"x86": not arm, "intel": not arm, "amd": not arm, "arm": arm, "apple": arm}
    remedy = f"use --target {'cpu-arm' if arm else 'cpu-x86'}, or run the doctor on such a machine"
    if not fits.get(target.arch.vendor, True):
        value, rule = (
            f"the machine has {isa[0]}",
            f"a target's figures are measured on its hardware ({target.arch.vendor})",
        )
        raise InputError("wrong-machine", where=target.name, value=value, rule=rule, remedy=remedy)
    # the instructions of the file, not those of an earlier measurement here
    named = target.arch.isa if target.arch.isa != read_measured(target.name).get("isa") else []
    missing = [name for name in named or [] if name not in isa]
    if missing and named != "auto":
        value, rule = f"the machine has no {', '.join(missing)}", "a target's figures are measured on its hardware"
        raise InputError("wrong-machine", where=target.name, value=value, rule=rule, remedy=remedy)
