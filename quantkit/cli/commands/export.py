"""`quantkit export`: one more export in a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import quantkit
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import BundlePath, Calibration, Json, On, Wheelhouse, demand_device

if TYPE_CHECKING:
    from quantkit.bundle import Bundle


def export(
    bundle: BundlePath,
    to: Annotated[str, typer.Option("--to", metavar="EXPORTER", help="What to add; see `quantkit list exporters`.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=YAML", help="An option of the exporter: accuracy_level=0."),
    ] = None,
    autotune_qdq: Annotated[
        bool,
        typer.Option("--autotune-qdq", help="With tensorrt, on its GPU: search which layers gain by quantized inputs."),
    ] = False,
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="With --autotune-qdq, what a graph is given.")
    ] = None,
    calibration: Calibration = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    as_json: Json = False,
) -> Answer:
    """Add an export to a finished bundle: quantkit export BUNDLE --to onnx."""
    from quantkit.errors import InputError
    from quantkit.pipeline.export import export_bundle
    from quantkit.report import terminal

    demand_device(on, wheelhouse)
    if autotune_qdq and on is not None:
        raise InputError("usage", "--autotune-qdq", "with --on", "it searches on this machine's GPU")
    if calibration is not None and (on is not None or autotune_qdq):
        raise InputError("usage", "--calibration", "for an engine", "engines are checked without samples")
    if autotune_qdq:
        return _autotuned(quantkit.load(bundle), to, set_ or (), inputs)
    with showing() as progress:
        progress.begin(f"exporting {bundle}")
        if on is None:
            done = export_bundle(
                quantkit.load(bundle), to, set_ or (), calibration=calibration, dry_run=dry_run, progress=progress
            )
        else:
            from quantkit.devices.asked import demand_builds, export_on
            from quantkit.devices.named import reach

            demand_builds(to)
            with reach(on, wheelhouse=wheelhouse) as device:
                done = export_on(quantkit.load(bundle), device, to, set_ or (), dry_run=dry_run, progress=progress)
    shown = terminal.verified(done.bundle.path, done.bundle.manifest, done.checks, [done.says])
    return Answer(done.as_dict(), shown, [x.as_dict() for x in done.decisions])


def _autotuned(bundle: Bundle, to: str, changes: Sequence[str], inputs: Path | None) -> Answer:
    """Where inputs are better left in 16 bits, as changes of a recipe; the bundle stays as it is."""
    import json

    from quantkit.errors import InputError
    from quantkit.exporters import load_exporter
    from quantkit.pipeline.export import engine_options
    from quantkit.report.kit.tree import Remark
    from quantkit.tuning.placement import autotune

    if to != "tensorrt":
        rule = "pairs are searched in the network of TensorRT"
        raise InputError("set-invalid", "--autotune-qdq", f"--to {to}", rule, "--to tensorrt")
    with showing() as progress:
        progress.begin("measuring placements")
        progress.plan({"measure": 600.0})
        options = engine_options(bundle, load_exporter(to), changes)
        found, changed = autotune(
            bundle, options, inputs=inputs, progress=lambda share, words: progress.at("measure", share, words)
        )
    overrides = changed.get("overrides", [])
    result = {"off": list(found.off), "gain": found.gain, "tried": found.tried, "overrides": overrides}
    result["keep"] = changed.get("keep", [])
    said = f"{found.gain:.3f} times as fast with {len(found.off)} groups of inputs in 16 bits; {found.tried} measured"
    shown = [Remark(said)]
    shown += [Remark(f"compile again with: --set '{key}={json.dumps(value)}'") for key, value in changed.items()]
    return Answer(result, shown)
