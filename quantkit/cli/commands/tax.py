"""`quantkit tax`: measure the cost of unpacking, batch by batch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Html, Json, On, Target, Wheelhouse, batches, demand_device, listed
from quantkit.errors import Inconclusive, QuantkitError
from quantkit.pipeline.progress import Progress

# seconds of the ceilings and of the first linear's files, by the word that reports each stage
_BEFORE = {"ceilings": 6.0, "preparing": 4.0}
# seconds to make products and carry them to a device
_CARRYING = 30.0


def tax(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUNDLE|MODEL]",
            help="Bundle, folder with a config.json, or name: llama-3-8b, qwen2.5-7b, smollm2-135m, ...",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="KxN", help="Inputs x outputs of one linear instead: 4096x14336; repeatable."),
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
        typer.Option(metavar="N,N:N,…", help="Batch sizes; 1:4096 means 1,2,4,...,4096; default: the target's."),
    ] = None,
    traffic: Annotated[
        str | None, typer.Option(metavar="N:SHARE,…", help="Share of each batch in your traffic: 1:0.7,8:0.2,64:0.1.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Processor to time on; default: the target's.", show_default=False)
    ] = "",
    runtime: Annotated[
        str, typer.Option(metavar="NAME", help="Runtime: onnxruntime on a CPU, torch on a GPU.", show_default=False)
    ] = "",
    threads: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Thread counts, one run for each; default: all cores.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=604_800, metavar="S", help="Time for everything.")] = 300.0,
    target: Target = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    html: Html = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows as JSON Lines.")] = None,
    as_json: Json = False,
) -> Answer:
    """Time quantized linears against float ones and advise."""
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
    # check now, not after minutes of timing
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
        # the preparation takes the same time for any --seconds
        stages = {**({} if there is None else {"carrying": _CARRYING}), **_BEFORE, "timing": 1.6 * seconds}
        progress.begin(f"timing the linears of {model or ', '.join(shape or ())}")
        progress.plan(stages)

        def told(share: float, words: str) -> None:
            first = words.partition(",")[0].rpartition(": ")[2]
            progress.at(first if not share and first in _BEFORE else "timing", share, words)

        measured = measure_tax(plan, told, there)
    if out is not None:
        write_rows(out, measured.rows)
    tree = document(measured.reported())
    if html is not None:
        pages.write(html, pages.page(tree))
    record(measured)
    error: QuantkitError | None = None
    if measured.inconclusive:
        error = Inconclusive(
            "inconclusive",
            "quantkit tax",
            "; ".join(reason for advice in measured.advice.values() for reason in advice.because),
            "the interval, this machine's noise included, has to lie above or below 1",
            f"time it again on a quieter machine, or for longer: --seconds {3 * seconds:g}",
        )
    shown = [tree, *(Code("", str(path)) for path in (html, out) if path is not None)]
    return Answer(measured.as_dict(), shown, warnings=list(measured.notes), error=error)
