"""`quantkit tune`: choose a format for every layer."""

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
    Target,
    TrustRemoteCode,
    batches,
    listed,
)
from quantkit.errors import GateError, InputError


def tune(
    model: Model,
    budget: Annotated[
        list[str],
        typer.Option(metavar="KIND=N", help="Limit: bits=4.25, bytes=100MB, kl=0.05 or latency=12ms; repeatable."),
    ],
    recipe: Annotated[str, typer.Option(metavar="NAME|PATH", help="Recipe to start from.")] = "gptq-int4",
    formats: Annotated[
        str | None,
        typer.Option(metavar="F,F,…", help="Formats to choose from; default: int3,int4,int8,float."),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", metavar="YAML", help="Additional candidate: '{format: int4, group: 32}'."),
    ] = None,
    target: Target = None,
    batch: Annotated[str | None, typer.Option(metavar="N,N,…", help="Batch sizes of the timings to use.")] = None,
    timings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measurements with `latency.op` rows, for a latency budget.")
    ] = None,
    calibration: Calibration = None,
    adapter: Adapters = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences of 128 tokens to measure each layer's harm on.")
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write; default: ./MODEL--tuned, then -2, ...")
    ] = None,
    set_: Changes = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Measure every candidate at the output; default: estimate most."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compile and score the choice, and the best single scheme."),
    ] = True,
    trust_remote_code: TrustRemoteCode = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> Answer:
    """Choose a format for every layer within a budget; write a recipe."""
    from quantkit.measurement.rows import read_rows
    from quantkit.report.kit.tree import Code
    from quantkit.report.tune import document
    from quantkit.tuning import search
    from quantkit.tuning.front import Budget

    allowed = Budget.parse(budget)
    request = search.asked(
        model,
        recipe=recipe,
        target=target,
        calibration=calibration,
        out=out,
        changes=set_ or (),
        trust_remote_code=trust_remote_code,
        allow_code=allow_code,
        adapters=adapter or (),
    )
    question = search.TuneQuestion(
        request,
        allowed,
        formats=None if formats is None else listed(formats),
        schemes=[_scheme(text) for text in scheme or ()],
        samples=samples,
        exact=exact,
        check=check,
        timings=read_rows(timings) if timings else (),
        batches=batches(batch) or (),
    )
    with showing() as progress:
        progress.begin(f"opening {model}")
        tuned = search.tune(question, progress)
    taken = [decision.as_dict() for decision in tuned.decisions]
    error = None
    limit, measured = allowed.kl, tuned.front["chosen"]["measured"]
    if limit is not None and measured is not None and measured > limit:
        error = GateError(
            "budget-missed",
            "--budget",
            f"KL {measured:.4g} measured",
            f"at most {limit:g}",
            "allow more, or add candidates (--formats, --scheme)",
        )
    shown = [document(tuned.front), *(Code("", f"{tuned.out}/{name}") for name in ("tuned.yaml", "report.html"))]
    return Answer(tuned.as_dict(), shown, taken, tuned.warnings, error)


def _scheme(text: str) -> dict[str, Any]:
    from quantkit.content import parse_yaml

    fields = parse_yaml(text, where="--scheme")
    if not isinstance(fields, dict):
        raise InputError("usage", "--scheme", text, "a scheme is a YAML mapping", "'{format: int4, group: 32}'")
    return fields
