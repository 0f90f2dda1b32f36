"""`quantkit tax`: what unpacking costs, batch by batch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Html, Json, On, Target, Wheelhouse, batches, demand_device, listed
from quantkit.errors import Inconclusive, QuantkitError
from quantkit.pipeline.progress import Progress

# seconds for the machine's ceilings, and for the first linear's files: stages by the word that they are reported with
_BEFORE = {"ceilings": 6.0, "preparing": 4.0}
# to make products for a device and to carry them there
_CARRYING = 30.0


def tax(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUNDLE|MODEL]",
            help="A bundle, a folder with a config.json, or a name: llama-3-8b, qwen2.5-7b, smollm2-135m, ...",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="KxN", help="Inputs by outputs of a linear instead: 4096x14336; may be repeated."),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="F,F,…",
            help="int4, nf4, int8.dynamic, int4.g32.level0, 'int4*' or all; default: int4,int8,int8.dynamic,nf4.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,N:N,…", help="Rows of the activation; 1:4096 doubles; default: the target's batches."),
    ] = None,
    traffic: Annotated[
        str | None, typer.Option(metavar="N:SHARE,…", help="How often each batch occurs: 1:0.7,8:0.2,64:0.1.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="What to time on; default: what the target is.", show_default=False)
    ] = "",
    runtime: Annotated[
        str, typer.Option(metavar="NAME", help="onnxruntime on a CPU, torch on a GPU.", show_default=False)
    ] = "",
    threads: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Threads, one run for each; default: all cores.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=604_800, metavar="S", help="How long to time everything.")
    ] = 300.0,
    target: Target = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    html: Html = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows as JSON lines.")] = None,
    as_json: Json = False,
) -> Answer:
    """Time quantized linears against float ones, with what the machine could do at best, and say what to do."""
    from quantkit.bundle.disk import check_place
    from quantkit.measurement.rows import write_rows
    from quantkit.pipeline.tax import Question, batch_range, measure_tax, prepare, record
    from quantkit.planning.traffic import traffic_of
    from quantkit.report.kit import html as pages
    from quantkit.report.kit.tree import Code
    from quantkit.report.taxed import document

    demand_device(on, wheelhouse)
    asked = Question(
        model,
        tuple(shape or ()),
        listed(formats),
        batch_range(batch) if batch is not None else (),
        traffic_of(traffic) if traffic is not None else None,
        device,
        runtime,
        batches(threads, "--threads") or (),
        seconds,
        target,
    )
    # before minutes of timing, not after them
    for path in (html, out):
        check_place(path)
    if html is not None:
        pages.demand()
    with ExitStack() as stack:
        progress, there = Progress(), None
        if on is not None:
            from quantkit.devices.named import reach
            from quantkit.devices.tax import TaxDevice

            reached = stack.enter_context(reach(on, wheelhouse=wheelhouse))
            there = TaxDevice(reached, lambda share, words: progress.at("carrying", share, words))
        plan = prepare(asked if there is None else there.asked(asked))
        if plan.records and plan.bundle is not None:
            plan.bundle.demand_writable()
        progress = stack.enter_context(showing())
        # what comes before the first timing takes as long for two seconds of it as for three hundred
        stages = {**({} if there is None else {"carrying": _CARRYING}), **_BEFORE, "timing": 1.6 * seconds}
        progress.begin(f"timing the linears of {model or ', '.join(shape or ())}")
        progress.plan(stages)

        def told(share: float, words: str) -> None:
            first = words.partition(",")[0].rpartition(": ")[2]
            progress.at(first if not share and first in _BEFORE else "timing", share, words)

        found = measure_tax(plan, told, there)
    if out is not None:
        write_rows(out, found.rows)
    tree = document(found.reported())
    if html is not None:
        pages.write(html, pages.page(tree))
    record(found)
    error: QuantkitError | None = None
    if found.inconclusive:
        error = Inconclusive(
            "inconclusive",
            "quantkit tax",
            "; ".join(reason for advice in found.advice.values() for reason in advice.because),
            "an interval lies above or below 1",
            f"time it again on a quieter machine, or for longer: --seconds {3 * seconds:g}",
        )
    shown = [tree, *(Code("", str(path)) for path in (html, out) if path is not None)]
    return Answer(found.as_dict(), shown, warnings=list(found.notes), error=error)
