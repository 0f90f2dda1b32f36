"""Estimate the memory and disk of a compile, in words and for refusals; of an open model: `blocks/prepared.py`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters import reader
from quantkit.model.device import AUTO, CPU, absent, demand_name
from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.compiling import CompileSpec, Compiling, described, predict, timed
from quantkit.planning.fit import USABLE, Fit, fit
from quantkit.recipe import Recipe
from quantkit.report.kit import words
from quantkit.runtimes import load_runtime
from quantkit.target import Target

PROCESSORS = "memory is a processor's: no compile on a GPU was measured yet"


def line(expected: Compiling) -> str:
    """Say it to people, before work starts."""
    disk = expected.disk
    space = f"{words.size(disk.bundle)} of disk ({words.size(disk.most)} while at it)"
    kept = f", {words.size(disk.cache)} for the float baseline" if disk.cache else ""
    kept += f"; {PROCESSORS}" if PROCESSORS in expected.notes else ""
    return f"expected: {words.size(expected.peak)} of memory, {space}{kept}; its time is known after the first block"


def unopened(
    architecture: Architecture, recipe: Recipe, *, speed: bool, device: str = CPU, target: Target | None = None
) -> Compiling:
    """Predict the compile of a model whose config alone was read.

    Args:
        recipe: its exports those that the target reads.
        speed: whether the target is this machine, so that what is exported is timed.
        device, target: as of `foreseen_device`.

    Raises InputError: what the compile would refuse by the sizes alone; `compile-unknown`, a network of images.
    """
    sizes = described(architecture, recipe, speed=speed and has_timer(recipe))
    expected = predict(sizes)
    if device == CPU or target is None:
        return expected
    where, fitting = foreseen_device(device, sizes, target)
    notes = (*expected.notes, f"compiles {where}", *([PROCESSORS] if fitting else []))
    return replace(expected, notes=notes, device=fitting.as_dict() if fitting else None)


def lies(fitting: Fit, asked: str, model: str) -> str:
    """Say how a compile lies on a GPU. Raises InputError (`device-memory`), if it was named and does not fit."""
    if fitting.fits:
        where = "stay on it" if fitting.resident else "lie in memory"
        at_once = f"{words.plural(fitting.chunk, 'sequence')} at once, hidden states {where}"
        return f"on {model}: {words.size(fitting.needed)} of {words.size(fitting.free)} free; {at_once}"
    need = f"blocks with their activations take {words.size(fitting.needed)}, "
    need += f"{words.size(USABLE * fitting.free)} can be used of {words.size(fitting.free)} that are free"
    if asked == AUTO:
        return f"on the processor: on {model} {need}"
    rule = "the device holds a block, the factor of its widest input, embedding, head and one sequence"
    remedy = "--device cpu; or fewer tokens a sequence: --set calibration.tokens=256"
    raise InputError("device-memory", f"--device {asked}", f"{model}: {need}", rule, remedy)


def foreseen_device(asked: str, sizes: CompileSpec, target: Target) -> tuple[str, Fit | None]:
    """Tell how a compile will lie on a device, for a plan: in words, and in bytes if it is a GPU; without torch.

    Args:
        asked: as `--device` of a compile.
        target: whose memory is taken where this machine has no GPU.

    Raises InputError: `unknown-device`, `device-absent`, `device-memory`.
    """
    if demand_name(asked) == CPU:
        return "on the processor", None
    here, reason = machine.gpus()
    number = int(asked.partition(":")[2] or 0)
    capacity = target.memory.capacity.number if target.kind == "gpu" else None
    if number < len(here):
        model, size = str(here[number]["name"]), float(here[number]["memory"])
    elif capacity is not None and not here and not number:
        model, size = f"{target.name}, which is not here ({reason})", capacity
    elif asked == AUTO:
        return f"on the processor: {reason}", None
    else:
        raise absent(asked, reason or f"{len(here)} GPUs are here")
    fitting = fit(sizes, size)
    return lies(fitting, asked, model), fitting


def demand_disk(expected: Compiling, out: Path) -> None:
    """Refuse a build larger than the free disk space. Raises InputError `disk-space`."""
    need = expected.disk.most
    place = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), Path())
    free = shutil.disk_usage(place).free
    if need > free:
        rule, remedy = f"{words.size(free)} are free there", "free some space, or choose --out on another disk"
        value = f"about {words.size(need)} while it is built"
        raise InputError("disk-space", where=str(out), value=value, rule=rule, remedy=remedy)


def has_timer(recipe: Recipe) -> bool:
    """Tell whether this machine has what times a recipe's export."""
    step = timed(recipe)
    return step is not None and load_runtime(reader(step.name, step.options)).why_not_here() is None
