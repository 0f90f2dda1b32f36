"""`quantkit compare`: one bundle against another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit._version import __version__
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Html, Json, On, Wheelhouse, batches, demand_device
from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError

if TYPE_CHECKING:
    from quantkit.devices.asked import DeviceTimer

_SIDE = "A bundle, or the original model of the other one."


def compare(
    a: Annotated[str, typer.Argument(metavar="[A]", help=_SIDE, show_default=False)] = "",
    b: Annotated[str, typer.Argument(metavar="[B]", help="The bundle to judge against A.", show_default=False)] = "",
    draft: Annotated[
        str | None,
        typer.Option(metavar="BUNDLE", help="Instead of A and B: the draft of --of, by acceptance and expected gain."),
    ] = None,
    of: Annotated[
        str | None, typer.Option("--of", metavar="BUNDLE", help="With --draft: the bundle that verifies its tokens.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time both in one run; default: use the recorded times.")
    ] = False,
    batch: Annotated[str | None, typer.Option(metavar="N,N,…", help="Batches to time; with --measure.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=604_800, metavar="S", help="Time for all shapes; with --measure.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Compare times.")] = True,
    runtime: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Runtime of the scores and times; default: one that both have."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The scored text, if it was a file; shows flipped words."),
    ] = None,
    examples: Annotated[int, typer.Option(min=0, metavar="N", help="Flipped words of each kind to show.")] = 5,
    accuracy_margin: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="0.01: one item in a hundred, 0.01 nats, or 1 % of perplexity. [default: what B's recipe allows]",
        ),
    ] = None,
    latency_margin: Annotated[
        float | None, typer.Option(metavar="X", help="0.05: 5 % slower. [default: 0.05, or the margin of B's verdict]")
    ] = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    size_margin: Annotated[float, typer.Option(metavar="X", help="0.01: 1 % larger.")] = 0.01,
    html: Html = None,
    as_json: Json = False,
) -> Answer:
    """Compare two bundles: by token, batch, size and layer."""
    from quantkit.bundle.disk import check_place
    from quantkit.pipeline.compare import Margins, compare_bundles
    from quantkit.report.compared import because, document
    from quantkit.report.kit import html as pages
    from quantkit.report.kit.tree import Code, Part

    demand_device(on, wheelhouse)
    if draft is not None or of is not None:
        return _drafted(draft, of, calibration, html, {"A": a, "--measure": measure, "--on": on, "--runtime": runtime})
    if not a or not b:
        raise InputError("usage", "quantkit compare", "one side is missing", "A and B, or --draft and --of")
    if on is not None and not measure:
        raise InputError("usage", "--on", "without --measure", "recorded times need no device", "add --measure")
    check_place(html)
    if html is not None:
        pages.demand()
    with showing() as progress, ExitStack() as devices:
        progress.begin(f"comparing {a} and {b}")
        timer = None
        if on is not None:
            timer = devices.enter_context(timing_on(on, timed(runtime, a, b), wheelhouse))
        comparison = compare_bundles(
            a,
            b,
            progress,
            margins=Margins(accuracy_margin, latency_margin, size_margin),
            runtime=runtime,
            calibration=calibration,
            measure=measure,
            batches=batches(batch),
            seconds=seconds,
            speed=speed,
            examples=examples,
            timer=timer,
        )
    tree = document(comparison, __version__)
    shown: list[Part] = [tree]
    if html is not None:
        pages.write(html, pages.page(tree))
        shown.append(Code("", str(html)))
    error: QuantkitError | None = None
    answer = {GateError.exit: "worse", Inconclusive.exit: "inconclusive"}.get(comparison.exit)
    named = [cell for cell in comparison.cells if cell.answer == answer and not cell.is_allowed]
    reasons = "; ".join(because(named, comparison.kind))
    if answer == "worse":
        rule = "B may be worse only within the margins or its recipe's gates"
        options = {"accuracy": "--accuracy-margin", "latency": "--latency-margin", "size": "--size-margin"}
        remedy = f"keep A, or allow more: {', '.join(dict.fromkeys(options[cell.what] for cell in named))}"
        error = GateError("worse", b, reasons, rule, remedy)
    elif answer is not None:
        rule = "the 95 % interval has to lie within the margin"
        longer = "time both for longer (--seconds)" if measure else "time both in one run (--measure)"
        remedy = f"{longer}, or score more text or samples; or compare with --no-speed"
        error = Inconclusive("inconclusive", b, reasons, rule, remedy)
    return Answer(comparison.as_dict(), shown, warnings=list(comparison.notes), error=error)


def _drafted(
    draft: str | None, of: str | None, calibration: str | None, html: Path | None, others: dict[str, object]
) -> Answer:
    """Judge a draft for a target."""
    from quantkit.bundle.disk import check_place
    from quantkit.pipeline.drafts import judge_draft
    from quantkit.report.drafted import document
    from quantkit.report.kit import html as pages
    from quantkit.report.kit.tree import Code, Part

    if draft is None or of is None:
        raise InputError("usage", "quantkit compare", "one side is missing", "--draft and --of name a bundle each")
    if strange := next((name for name, value in others.items() if value), None):
        raise InputError(
            "usage", strange, "with --draft", "a draft is judged by its acceptance", f"leave {strange} out"
        )
    check_place(html)
    if html is not None:
        pages.demand()
    with showing() as progress:
        progress.begin(f"{draft} as the draft of {of}")
        judged = judge_draft(draft, of, progress, calibration=calibration)
    tree = document(judged, __version__)
    shown: list[Part] = [tree]
    if html is not None:
        pages.write(html, pages.page(tree))
        shown.append(Code("", str(html)))
    return Answer(judged.as_dict(), shown, warnings=list(judged.notes))


@contextmanager
def timing_on(on: str, runtimes: Iterable[str], wheelhouse: Path | None = None) -> Iterator[DeviceTimer]:
    """Reach a device to time a comparison in some runtimes."""
    from quantkit.devices.asked import DeviceTimer
    from quantkit.devices.named import demand_sessions, reach

    runtimes = list(runtimes)
    demand_sessions(runtimes)
    with reach(on, wheelhouse=wheelhouse, runtimes=runtimes) as reached:
        yield DeviceTimer(reached)


def timed(runtime: str | None, *sides: str) -> list[str]:
    """List the runtimes to time bundles in; a float model is refused later, by its name."""
    from quantkit.bundle import Bundle
    from quantkit.bundle.manifest import MANIFEST
    from quantkit.pipeline.sides import timed_in

    bundles = [Path(side).expanduser() for side in sides]
    return [timed_in(Bundle.load(path), runtime) for path in bundles if (path / MANIFEST).is_file()]
