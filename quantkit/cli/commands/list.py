"""`quantkit list`: names of everything that ships."""

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
            help="recipes, passes, formats, exporters, targets, calibrations, models or runtimes; or matrix: formats "
            "that each runtime computes in on each target, with sources.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="With matrix: only this target.")] = None,
    format_: Annotated[str | None, typer.Option("--format", help="With matrix: only this format.")] = None,
    runtime: Annotated[str | None, typer.Option(help="With matrix: only this runtime.")] = None,
    as_json: Json = False,
) -> Answer:
    """List recipes, formats, targets, models and more."""
    from quantkit.report import catalog, terminal

    if kind == _MATRIX:
        from quantkit.planning import matrix
        from quantkit.report import cells

        cells_ = matrix.entries(target=target, form=format_, runtime=runtime)
        return Answer({_MATRIX: matrix.as_rows(cells_)}, cells.shown(cells_))
    if target or format_ or runtime:
        value = f"--target, --format or --runtime with {kind or 'all kinds'}"
        rule = "these options filter the matrix"
        raise InputError("option-unused", "quantkit list", value, rule, "quantkit list matrix")
    listed = catalog.listing(kind)
    return Answer(listed, terminal.listing(listed))
