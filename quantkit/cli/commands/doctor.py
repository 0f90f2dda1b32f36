"""`quantkit doctor`: the machine at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json


def doctor(
    target: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="The target whose figures are wanted; default: this one.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the measured figures for this user.")] = False,
    as_json: Json = False,
) -> Answer:
    """What this machine is, and can do at best."""
    from quantkit.measurement.doctor import doctor as examine
    from quantkit.pipeline.request import this_machine
    from quantkit.report import terminal
    from quantkit.target import Target

    aimed = Target.load(target or this_machine())
    with showing() as progress:
        progress.begin("measuring this machine", 10.0 if aimed.kind == "cpu" else None)
        report = examine(aimed, write=write)
    return Answer(report, terminal.machine(report), warnings=report["warnings"])
