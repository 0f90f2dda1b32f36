"""`quantkit plan`: predict cost and gain of a recipe from the model's sizes alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Adapters, AllowCode, Changes, Json, Target, batches, listed
from quantkit.content import is_path
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.pipeline.plan import PlanQuestion
    from quantkit.pipeline.rehearsal import Rehearsal
    from quantkit.planning.outlook import Outlook


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name (llama-3-8b, qwen3-30b-a3b, …), a folder, a config.json (./config.json) or a bundle.",
        ),
    ] = "smollm2-135m",
    recipe: Annotated[
        list[str] | None, typer.Option(metavar="NAME|PATH", help="A recipe, or a format: int4, fp8_e4m3, bf16.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="R,R,…", help="Recipes or formats to compare; default: the usual ones.")
    ] = None,
    target: Target = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="Runtime to plan for; default: one that computes natively.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Batch sizes: 1,8,64; the best is judged. Default: 1 is judged.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Prompt tokens of a request; default: 1,024.")
    ] = None,
    output: Annotated[int | None, typer.Option(metavar="TOKENS", help="Output tokens; default: 256.")] = None,
    requests: Annotated[
        str | None, typer.Option(metavar="PxO:SHARE,…", help="Mixed lengths with shares: 2000x300:0.7,8000x500:0.3.")
    ] = None,
    variation: Annotated[
        float, typer.Option(metavar="SHARE", help="Relative spread of the lengths: 0 none, about 1 for chats.")
    ] = 0.0,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Context to reserve memory for; default: the longest request.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="REQUESTS/S", help="Simulate this load, with continuous batching.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", help="Devices that share the model; default: as few as hold it.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of prices; default: the shipped ones, with their date.")
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="BUNDLE|FILE", help="Measurements to learn efficiencies from.")
    ] = None,
    adapter: Adapters = None,
    set_: Changes = None,
    allow_code: AllowCode = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run the recipe on the largest block, with real weights: half a minute.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda[:N]|auto", help="Device of the compile; the plan says whether it fits.")
    ] = "cpu",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with charts.")] = None,
    as_json: Json = False,
) -> Answer:
    """Predict memory, speed, cost and compile time before compiling."""
    import quantkit
    from quantkit.bundle.disk import check_place
    from quantkit.model.device import demand_name
    from quantkit.pipeline.plan import PlanQuestion
    from quantkit.pipeline.plan import plan as answer
    from quantkit.report.kit import html as pages
    from quantkit.report.kit.tree import Code, Part
    from quantkit.report.plan.as_json import as_dict
    from quantkit.report.plan.document import document, rehearsed

    asked = [*(recipe or ()), *listed(compare)]
    question = PlanQuestion(
        model,
        tuple(asked),
        target,
        runtime,
        tuple(batches(batch) or ()),
        prompt,
        output,
        requests,
        variation,
        context,
        rate,
        devices,
        prices,
        tuple(measured or ()),
        tuple(set_ or ()),
        allow_code,
        demand_name(device),
        tuple(adapter or ()),
    )
    check_place(html)
    if html is not None:
        pages.demand()
    outlook = answer(question)
    rehearsal = _rehearsed(question, outlook) if rehearse else None
    if rehearsal is not None and rehearsal.compiling is not None:
        outlook = replace(outlook, candidates=[replace(outlook.candidates[0], compiling=rehearsal.compiling)])
    tree = document(outlook, quantkit.__version__)
    shown: list[Part] = [tree]
    if html is not None:
        pages.write(html, pages.page(tree))
        shown.append(Code("", str(html)))
    result = as_dict(outlook)
    if rehearsal is None:
        return Answer(result, shown, warnings=list(outlook.notes))
    result["rehearsal"] = rehearsal.as_dict()
    lines = [(finding.line, finding.fails) for finding in rehearsal.findings]
    shown += rehearsed(rehearsal.block, rehearsal.seconds, lines)
    failing = next((finding for finding in rehearsal.findings if finding.fails), None)
    error = None
    if failing is not None:
        line = failing.line.removeprefix(f"[{failing.code}] ")
        error = InputError(failing.code, "the rehearsal", line)
    return Answer(result, shown, warnings=list(outlook.notes), error=error)


def _rehearsed(question: PlanQuestion, outlook: Outlook) -> Rehearsal:
    """Run the recipe of the only candidate on the model's largest block."""
    from quantkit.pipeline.rehearsal import rehearse
    from quantkit.pipeline.request import Request, demand_model

    if len(outlook.candidates) != 1:
        raise InputError("usage", "--rehearse", f"{len(outlook.candidates)} recipes", "a rehearsal runs one recipe")
    chosen = outlook.candidates[0]
    request = Request.of(
        question.model,
        recipe=chosen.label if is_path(chosen.label) else chosen.recipe,
        target=outlook.target,
        changes=question.changes,
        allow_code=question.allow_code,
        speed=False,
        adapters=question.adapters,
    )
    demand_model(question.model, question.adapters)
    with showing() as progress:
        progress.begin(f"rehearsing {question.model}")
        return rehearse(request, progress)
