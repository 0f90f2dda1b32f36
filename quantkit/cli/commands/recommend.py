"""`quantkit recommend`: rank the recipes to try, from sizes and figures alone."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.answer import Answer
from quantkit.cli.options import Adapters, Json, Target, batches


def recommend(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name (llama-3-8b, qwen3-30b-a3b, …), a folder or a config.json (./config.json).",
        ),
    ] = "smollm2-135m",
    target: Target = None,
    adapter: Adapters = None,
    batch: Annotated[str, typer.Option(metavar="N", help="Sequences at once, a batch.")] = "1",
    prompt: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Prompt tokens of a request; default: 1,024.")
    ] = None,
    output: Annotated[int | None, typer.Option(metavar="TOKENS", help="Output tokens; default: 256.")] = None,
    as_json: Json = False,
) -> Answer:
    """Rank the recipes for a model on a target by speed, size and KL. Nothing is run."""
    import quantkit
    from quantkit.pipeline.plan import PlanQuestion, demand_ranked, every
    from quantkit.pipeline.plan import plan as answer
    from quantkit.planning.ranking import rank
    from quantkit.report.plan.as_json import ranked_as_dict
    from quantkit.report.plan.document import ranking

    demand_ranked(model)
    sizes = tuple(batches(batch) or ())
    asked = PlanQuestion(model, (), target, batches=sizes, prompt=prompt, output=output, adapters=tuple(adapter or ()))
    outlook, ranked = rank(answer(every(asked)))
    tree = ranking(outlook, ranked, quantkit.__version__)
    return Answer(ranked_as_dict(outlook, ranked), [tree], warnings=list(outlook.notes))
