"""`quantkit doctor`: examine the current machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json, On, Wheelhouse, demand_device
from quantkit.errors import InputError


def doctor(
    target: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="Target to compare with; default: this processor.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Save the figures, for targets marked `auto`.")] = False,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    as_json: Json = False,
) -> Answer:
    """Measure the limits of this machine, or of a device."""
    from quantkit.kernels.cpu import library
    from quantkit.measurement.doctor import doctor as examine
    from quantkit.measurement.doctor import runtimes
    from quantkit.pipeline.request import this_machine
    from quantkit.report import terminal
    from quantkit.target import Target

    demand_device(on, wheelhouse)
    if on is not None and target is not None:
        raise InputError("usage", "--target", "with --on", "a device has its own target")
    if on is not None:
        return on_device(on, write=write, wheelhouse=wheelhouse)
    aimed = Target.load(target or this_machine())
    with showing() as progress:
        progress.begin("measuring this machine")
        report = examine(aimed, write=write)
    programs = {**runtimes(), "C compiler": library.told()}
    return Answer(report, terminal.machine(report, programs), warnings=report["warnings"])


def on_device(on: str, *, write: bool, wheelhouse: Path | None = None) -> Answer:
    """Measure a device."""
    from quantkit.devices.asked import doctor_on
    from quantkit.devices.named import find, names, reach
    from quantkit.report import terminal

    device = find(on)
    if write and on not in names():
        rule, remedy = "a target is saved under the name of its device", f"quantkit device add NAME {on}"
        raise InputError("usage", "--write", on, rule, remedy)
    with showing() as progress, reach(device, wheelhouse=wheelhouse) as reached:
        progress.begin(f"measuring {on}")
        report = doctor_on(reached, progress, write=write)
    shown = terminal.ceilings(report["device"], report["measurements"], report["written"])
    return Answer(report, shown, warnings=report["warnings"])
