"""`quantkit list`: the names of all there is."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.answer import Answer
from quantkit.cli.options import Json
from quantkit.errors import InputError

_MATRIX = "matrix"


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="recipes, passes, formats, exporters, targets, calibrations, models or runtimes; or matrix: which "
            "runtime computes in which format on which target, each with its source.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of the matrix, the cells of one target.")] = None,
    format_: Annotated[str | None, typer.Option("--format", help="Of the matrix, the cells of one format.")] = None,
    runtime: Annotated[str | None, typer.Option(help="Of the matrix, the cells of one runtime.")] = None,
    as_json: Json = False,
) -> Answer:
    """What there is, by kind."""
    from quantkit.report import catalog, terminal

    if kind == _MATRIX:
        from quantkit.planning import matrix
        from quantkit.report import cells

        found = matrix.entries(target=target, form=format_, runtime=runtime)
        return Answer({_MATRIX: matrix.as_rows(found)}, cells.shown(found))
    if target or format_ or runtime:
        value = f"--target, --format or --runtime with {kind or 'all kinds'}"
        rule = "they choose among the cells of the matrix"
        raise InputError("option-unused", "quantkit list", value, rule, "quantkit list matrix")
    listed = catalog.listing(kind)
    return Answer(listed, terminal.listing(listed))
