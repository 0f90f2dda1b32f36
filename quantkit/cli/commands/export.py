"""`quantkit export`: add an export to a bundle."""

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
    to: Annotated[str, typer.Option("--to", metavar="EXPORTER", help="Exporter: see `quantkit list exporters`.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=YAML", help="An option of the exporter: accuracy_level=0."),
    ] = None,
    autotune_qdq: Annotated[
        bool,
        typer.Option("--autotune-qdq", help="With tensorrt, on its GPU: find layers that gain from quantized inputs."),
    ] = False,
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="With --autotune-qdq: inputs of a graph.")
    ] = None,
    calibration: Calibration = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    as_json: Json = False,
) -> Answer:
    """Add an export to a bundle: quantkit export BUNDLE --to onnx."""
    from quantkit.errors import InputError
    from quantkit.pipeline.export import export_bundle
    from quantkit.report import terminal

    demand_device(on, wheelhouse)
    if autotune_qdq and on is not None:
        raise InputError("usage", "--autotune-qdq", "with --on", "the search runs on this machine's GPU")
    if calibration is not None and (on is not None or autotune_qdq):
        raise InputError("usage", "--calibration", "for an engine", "an engine is checked without samples")
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
    """Search for inputs to leave in 16 bits, as changes of a recipe; the bundle stays unchanged."""
    import json

    from quantkit.errors import InputError
    from quantkit.exporters import load_exporter
    from quantkit.pipeline.export import engine_options
    from quantkit.report.kit.tree import Remark
    from quantkit.tuning.placement import autotune

    if to != "tensorrt":
        rule = "the search needs a TensorRT network"
        raise InputError("set-invalid", "--autotune-qdq", f"--to {to}", rule, "--to tensorrt")
    with showing() as progress:
        progress.begin("measuring placements")
        progress.plan({"measure": 600.0})
        options = engine_options(bundle, load_exporter(to), changes)
        placement, changed = autotune(
            bundle, options, inputs=inputs, progress=lambda share, words: progress.at("measure", share, words)
        )
    overrides = changed.get("overrides", [])
    result = {"off": list(placement.off), "gain": placement.gain, "tried": placement.tried, "overrides": overrides}
    result["keep"] = changed.get("keep", [])
    groups = f"{len(placement.off)} groups of inputs in 16 bits"
    shown = [Remark(f"{placement.gain:.3f} times as fast with {groups}; {placement.tried} measured")]
    shown += [Remark(f"compile again with: --set '{key}={json.dumps(value)}'") for key, value in changed.items()]
    return Answer(result, shown)
