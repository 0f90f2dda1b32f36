"""`quantkit export`: one more export in a bundle."""

from __future__ import annotations

from typing import Annotated

import typer

import quantkit
from quantkit.cli.answer import Answer
from quantkit.cli.options import BundlePath, Json
from quantkit.cli.progress import showing


def export(
    bundle: BundlePath,
    to: Annotated[str, typer.Option("--to", metavar="EXPORTER", help="What to add; see `quantkit list exporters`.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=YAML", help="An option of the exporter: accuracy_level=0."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    as_json: Json = False,
) -> Answer:
    """Add an export to a finished bundle: quantkit export BUNDLE --to onnx."""
    from quantkit.pipeline.export import export_bundle
    from quantkit.report import terminal

    with showing() as progress:
        progress.begin(f"exporting {bundle}", 40.0)
        done = export_bundle(quantkit.load(bundle), to, set_ or (), dry_run=dry_run, progress=progress)
    shown = terminal.verified(done.bundle.path, done.bundle.manifest, done.checks, [done.says])
    return Answer(done.as_dict(), shown, [x.model_dump(mode="json", by_alias=True) for x in done.decisions])
