"""`quantkit show`: one thing in full."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quantkit
from quantkit.cli.answer import Answer
from quantkit.cli.options import AllowCode, Json


def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name from `quantkit list`, or a path (./...).", show_default=False)
    ],
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> Answer:
    """Show one thing in full: any name of `list`, or a bundle."""
    from quantkit import content
    from quantkit.bundle.manifest import MANIFEST
    from quantkit.measurement.rows import Row
    from quantkit.pipeline.verdict import of_original
    from quantkit.report import catalog, terminal
    from quantkit.report.bundle import figures
    from quantkit.report.bundle.document import document

    if content.is_path(name) and (Path(name).expanduser() / MANIFEST).is_file():
        opened = quantkit.load(name)
        notes = figures.notes(opened.manifest)
        measured = [Row.model_validate(row) for row in opened.measurements]
        rows = of_original(measured, opened.manifest.model.source.sha256)
        result = {"kind": "bundle", "manifest": opened.manifest.as_dict(), "measurements": opened.measurements}
        return Answer(result, [document(opened.manifest, rows, notes, path=opened.path)], warnings=notes)
    entries = (
        [catalog.find_file(Path(name).expanduser(), allow_code=allow_code)]
        if content.is_path(name)
        else catalog.find(name)
    )
    shown = [part for entry in entries for part in terminal.entry(entry)]
    return Answer([{"kind": entry.kind, "name": entry.name, **entry.data} for entry in entries], shown)
