"""`quantkit compile`: make a bundle from a model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from quantkit.errors import InputError, Told

if TYPE_CHECKING:
    from quantkit.calibrate.ranks import Ranks
    from quantkit.pipeline.request import Request

# a rank's environment, as torchrun sets it
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    rank_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Under torchrun: when a silent rank counts as lost.")
    ] = 600.0,
    as_json: Json = False,
) -> Answer:
    """Quantize a model into a bundle, reload it, score it, time it."""
    from quantkit.pipeline.compile import asked, compile_model, opened
    from quantkit.pipeline.gates import failed_gate
    from quantkit.pipeline.together import by_all, joined
    from quantkit.report import terminal
    from quantkit.report.bundle.document import brief, took
    from quantkit.report.bundle.usage import here

    changes = list(set_ or ())
    changes += [f"tensorrt.build_timeout={build_timeout}"] if build_timeout is not None else []
    meeting: AbstractContextManager[tuple[Ranks | None, str]] = nullcontext((None, device))
    if all(os.environ.get(name) for name in _RANK):
        meeting = joined(rank_timeout, device)
    with meeting as (ranks, place):
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
            "device": place,
            "tf32": tf32,
            "adapters": adapter or (),
        }
        if ranks is not None and on is not None:
            rule = "ranks share one compile here; --on sends it elsewhere"
            raise InputError("usage", "quantkit compile --on", on, rule, "the same command without torchrun")
        request: Request | None = None
        if on is None or dry_run:
            asking = partial(asked, model, out=out, **how)
            request = asking() if ranks is None else by_all(ranks, asking)
        with showing(ranks is None or ranks.leads) as progress:
            progress.begin(f"opening {model}")
            if request is None:
                from quantkit.pipeline.many.batch import compile_on
                from quantkit.pipeline.many.executors import named

                compiled = compile_on(model, named(str(on), where="--on"), out, progress, **how)
            elif dry_run:
                opening = partial(opened, request, dry=True, ranks=ranks)
                subject = opening() if ranks is None else by_all(ranks, opening)
                if ranks is not None and not ranks.leads:
                    raise Told(0)
                plan = subject.planned()
                return Answer(plan, terminal.planned(plan), plan["decisions"], plan["notes"])
            else:
                compiled = compile_model(request, progress, ranks)
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
