"""`quantkit list`: the names of all there is."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.answer import Answer
from quantkit.cli.options import Json


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="recipes, passes, formats, exporters, targets, calibrations, models or runtimes."
        ),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """What there is, by kind."""
    from quantkit.report import catalog, terminal

    found = catalog.listing(kind)
    return Answer(found, terminal.listing(found))
