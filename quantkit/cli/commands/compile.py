"""`quantkit compile`: make a bundle from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import (
    Adapters,
    AllowCode,
    Calibration,
    Changes,
    Json,
    Model,
    OnCluster,
    Target,
    TrustRemoteCode,
)


def compile(  # noqa: A001 (the word of the command line)
    model: Model = "smollm2-135m",
    recipe: Annotated[str, typer.Option(metavar="NAME|PATH", help="A shipped recipe or a file.")] = "awq-int4",
    target: Target = None,
    calibration: Calibration = None,
    adapter: Adapters = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the bundle; default: ./MODEL--RECIPE, then -2, ...")
    ] = None,
    set_: Changes = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix; `rtn` weighs errors by it.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted compile.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on any decision beyond the recipe.")] = False,
    build_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time limit for building an engine.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    allow_code: AllowCode = False,
    speed: Annotated[
        bool,
        typer.Option("--speed/--no-speed", help="Time the result against the float model, if the target is here."),
    ] = True,
    vllm: Annotated[
        bool, typer.Option("--vllm/--no-vllm", help="Run the checkpoint in vLLM too, where the target and you have it.")
    ] = True,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda[:N]|auto", help="Device to compute on; auto: the GPU, if a block fits.")
    ] = "cpu",
    tf32: Annotated[bool, typer.Option("--tf32", help="Let a GPU round the inputs of float32 products.")] = False,
    on: OnCluster = None,
    as_json: Json = False,
) -> Answer:
    """Quantize a model into a bundle, reload it, score it, time it."""
    from quantkit.pipeline.compile import asked, compile_model, opened
    from quantkit.pipeline.gates import failed_gate
    from quantkit.report import terminal
    from quantkit.report.bundle.document import brief, took
    from quantkit.report.bundle.usage import here

    changes = list(set_ or ())
    changes += [f"tensorrt.build_timeout={build_timeout}"] if build_timeout is not None else []
    how: dict[str, Any] = {
        "recipe": recipe,
        "target": target,
        "calibration": calibration,
        "changes": changes,
        "imatrix": imatrix,
        "resume": resume,
        "strict": strict,
        "trust_remote_code": trust_remote_code,
        "allow_code": allow_code,
        "speed": speed,
        "vllm": vllm,
        "device": device,
        "tf32": tf32,
        "adapters": adapter or (),
    }
    request = asked(model, out=out, **how) if on is None or dry_run else None
    with showing() as progress:
        progress.begin(f"opening {model}")
        if request is None:
            from quantkit.pipeline.many.batch import compile_on
            from quantkit.pipeline.many.executors import named

            compiled = compile_on(model, named(str(on), where="--on"), out, progress, **how)
        elif dry_run:
            plan = opened(request, dry=True).planned()
            return Answer(plan, terminal.planned(plan), plan["decisions"], plan["notes"])
        else:
            compiled = compile_model(request, progress)
    manifest = compiled.bundle.manifest
    shown = brief(
        manifest,
        compiled.rows,
        compiled.warnings,
        path=compiled.bundle.path,
        files=here(manifest, model, calibration),
        took=took(compiled.seconds, compiled.memory_peak_bytes),
    )
    taken = [decision.as_dict() for decision in compiled.decisions]
    return Answer(compiled.as_dict(), [shown], taken, compiled.warnings, failed_gate(manifest))
