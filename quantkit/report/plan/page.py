"""The page of `quantkit plan`: one offline file with the roofline, memory against the card, time and cost by batch."""

from __future__ import annotations

from quantkit.planning.bound.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedRecipe
from quantkit.report.bundle.usage import Command
from quantkit.report.kit import shell, words
from quantkit.report.kit.parts import Section, Sheet
from quantkit.report.plan import costs as plan_costs
from quantkit.report.plan import figures
from quantkit.report.plan import words as say

_RINGS = "Rings on dotted lines are bounds, which no runtime beats; full points are forecasts with their intervals."


def page(outlook: Outlook, version: str = "") -> str:
    """The page as HTML. Raises MissingDependency: plotly, extra `report`."""
    assumed, notes = say.notes(outlook)
    money = plan_costs.currency(outlook)
    good = outlook.recommendation.label is not None
    ways = [line for each in outlook.candidates for line in plan_costs.ways(each)]
    commands = [Command("What would confirm it", "\n".join(say.confirm(outlook)))] if good else []
    sections = [
        ("fit", "Does it fit", _memory(outlook)),
        ("time", "How long it takes", _times(outlook)),
        ("rate", "What it gives and costs" if money else "What it gives", _rates(outlook)),
        ("load", "Under the load", _load(outlook)),
        ("compile", "The compile itself", _compiling(outlook)),
        ("roofline", "Under the roofs", _roofline(outlook)),
    ]
    return shell.rendered(
        "plan.html.j2",
        title=f"{outlook.architecture.name} on {outlook.target.name}: a plan",
        about=[
            say.model(outlook.architecture),
            say.target(outlook),
            say.workload(outlook.workload, outlook.architecture),
        ],
        assumed=assumed,
        tone="good" if good else "bad",
        answer=words.sentence(say.answer(outlook)),
        standing="A forecast" if say.standing(outlook) == "forecast" else "By bounds",
        because=say.reasons(outlook),
        commands=commands,
        notes=[*notes, *plan_costs.warnings(outlook)],
        side=_side(outlook),
        cautions=[(", ".join(labels), text) for text, labels in say.every_caution(outlook).items()],
        sections=[(place, title, section) for place, title, section in sections if section is not None],
        operations=[(each.label, _operations(each)) for each in outlook.candidates if each.rows],
        figures=_figures(outlook),
        cells=_cells(outlook),
        prices=Sheet(
            ["recipe", "price", "an hour", f"{money} a million", f"{money} a request", "used", "source"], ways, 1
        ),
        stands=say.because(outlook.candidates),
        legend=say.legend(outlook),
        version=version,
    )


def _side(outlook: Outlook) -> Sheet:
    """Every candidate in one line; what cannot run has its reason beside the table."""
    step = say.step(outlook.architecture)
    first, last = outlook.workload.batches[0], outlook.workload.batches[-1]
    decodes = outlook.architecture.kind == "decoder"
    head = ["recipe", "runtime", "stored", "bits", "weights", "memory", "largest batch"]
    head += [f"first token, batch {first:,}"] if decodes else []
    head += [f"{step}, batch {batch:,}" for batch in dict.fromkeys((first, last))]
    head += [f"most {say.per_second(outlook)}", "at batch"]
    body = []
    for each in outlook.candidates:
        memory, rows = each.memory, {row.batch: row for row in each.rows}
        line = [each.label, each.runtime or say.NONE, say.state(each)]
        line += [words.or_dash(each.bits, lambda bits: words.figure(bits, 3))]
        if memory is None:
            line += [say.NONE] * 3
        else:
            verdict = {True: ", fits", False: ", does not fit", None: ""}[say.fits(memory)]
            line += [words.size(each.bytes), say.takes(memory) + verdict, say.largest(memory.largest_batch, memory)]
        line += [say.at(rows.get(first), prefill=True)] if decodes else []
        line += [say.at(rows.get(batch)) for batch in dict.fromkeys((first, last))]
        best = say.best(each, outlook.workload)
        body.append([*line, *([say.given(best[1]), f"{best[0].batch:,}"] if best is not None else [say.NONE] * 2)])
    return Sheet(head, body)


def _memory(outlook: Outlook) -> Section | None:
    panels = [panel for panel in (figures.memory_bars(outlook), figures.memory_lines(outlook)) if panel is not None]
    if not panels:
        return None
    found = [(each, each.memory) for each in outlook.candidates if each.memory is not None]
    shades = figures.parts(outlook.candidates)
    decodes = outlook.architecture.kind == "decoder"
    head = ["recipe", "batch", *shades, "in all", "capacity", "fits", "largest batch"]
    head += ["a token of cache", "largest context"] if decodes else []
    body = [
        [
            each.label,
            f"{row.batch:,}",
            *(words.or_dash(row.parts.get(name), words.size) for name in shades),
            words.size(sum(row.parts.values())),
            words.or_dash(memory.capacity, words.size),
            say.FITS[row.fits],
            say.largest(memory.largest_batch, memory),
            *([words.size(memory.cache_per_token), say.largest(memory.largest_context, memory)] if decodes else []),
        ]
        for each, memory in found
        for row in each.rows
    ]
    work = outlook.workload
    tokens = f" with {work.context:,} tokens each" if decodes else ""
    said = [f"What one device holds{tokens}, against what a runtime uses of it."]
    return Section(said, panels, [], Sheet(head, body), keys=[(shade, name) for name, shade in shades.items()])


def _times(outlook: Outlook) -> Section | None:
    panels = figures.times(outlook)
    if not say.timed(outlook):
        return None
    work, step = outlook.workload, say.step(outlook.architecture)
    decodes = outlook.architecture.kind == "decoder"
    head = ["recipe", "batch", *(["prompts, at best", "prompts, forecast"] if decodes else [])]
    head += [f"{step}, at best", f"{step}, forecast", "limit", "fits"]
    body = []
    for each in outlook.candidates:
        for row in each.rows:
            line = [each.label, f"{row.batch:,}"]
            line += [say.bound(row.prefill), say.forecast(row.prefill)] if decodes else []
            line += [say.bound(row.step), say.forecast(row.step), say.limit(row.step)]
            body.append([*line, say.FITS[row.fits]])
    said = []
    if decodes:
        said = [
            f"Prompts of {work.prompt:,} tokens; a step gives each sequence a token, halfway through {work.output:,}."
        ]
    fits = any(say.fitting(each) for each in outlook.candidates)
    captions = [_RINGS] if panels else [] if fits else ["No batch fits."]
    if any(row.fits is False for each in outlook.candidates for row in each.rows) and panels:
        captions.append("Batches that do not fit are in the table alone.")
    return Section(said, panels, captions, Sheet(head, body, 1), keys=figures.keys(outlook))


def _rates(outlook: Outlook) -> Section | None:
    costs = figures.costs(outlook)
    panels = [panel for panel in (figures.rates(outlook, wide=costs is None), costs) if panel is not None]
    if not any(say.fitting(each) for each in outlook.candidates):
        return None
    unit, names = say.unit(outlook.architecture), plan_costs.head(outlook)
    body = []
    for each in outlook.candidates:
        for row in say.fitting(each):
            rate = say.rate(each, row, outlook.workload)
            at_most = words.or_dash(rate.most, lambda value: words.figure(value, 3))
            amounts = plan_costs.amounts(outlook, row)
            body.append([each.label, f"{row.batch:,}", at_most, say.expected(rate), *amounts])
    head = ["recipe", "batch", f"{say.per_second(outlook)}, at most", "forecast", *names]
    said = ["Requests that all begin together: their prompts first, then every token."] if unit == "tokens" else []
    captions = [_RINGS] if panels else []
    if plan_costs.currency(outlook):
        captions.append(
            f"Amounts are for a million {unit} on a machine that always works, paid for in the cheapest way."
        )
    if any(name.startswith("J ") for name in names):
        captions.append("Energy is for boards that draw all they may, without the machine around them.")
    return Section(said, panels, captions, Sheet(head, body), keys=figures.keys(outlook))


def _load(outlook: Outlook) -> Section | None:
    sheet, rate = plan_costs.loads(outlook, ("mean", "p50", "p90", "p99")), outlook.workload.rate
    if sheet is None or rate is None:
        return None
    said = [f"{rate:g} requests/s, in a simulation of continuous batching. {plan_costs.WAITS}"]
    return Section(said, [], [f"{line}." for line in plan_costs.carried(outlook)], sheet)


def _compiling(outlook: Outlook) -> Section | None:
    found = say.compiling(outlook.candidates)
    if found is None:
        return None
    return Section(
        ["What it takes to make each of them."], [], [f"{words.sentence(line)}." for line in found[1]], found[0]
    )


def _roofline(outlook: Outlook) -> Section | None:
    panel = figures.roofline(outlook)
    if panel is None:
        return None
    read = outlook.target.memory.read_bandwidth
    body = []
    for each in outlook.candidates:
        for row in say.fitting(each):
            for name, timed in (("prompts", row.prefill), (say.step(outlook.architecture), row.step)):
                if timed is not None:
                    body.append([each.label, name, f"{row.batch:,}", *_lies(timed)])
    head = ["recipe", "what", "batch", "bytes", "operations", "operations/byte", "operations/s, at most", "forecast"]
    symbols = "The first and the last batch stand beside their points."
    if outlook.architecture.kind == "decoder":
        symbols = "Circles are steps, with the first and the last batch beside them; diamonds are prompts."
    said = [
        f"Left of a roof's corner reading at {words.rate(read.number or 0, read.unit)} is what limits, right of it "
        f"computing. {symbols}",
        "Each is many operations, some under each roof, one after the other: so its own bound lies below the roofs.",
    ]
    return Section(said, [panel], [_RINGS], Sheet(head, body), keys=figures.keys(outlook))


def _lies(timed: TimedStep) -> list[str]:
    bound = timed.bound

    def rate(seconds: float | None) -> str:
        return words.rate(bound.operations / seconds, "op/s") if seconds else say.NONE

    intensity = words.figure(bound.operations / bound.bytes, 3) if bound.bytes else say.NONE
    return [words.size(bound.bytes), _giga(bound.operations), intensity, rate(timed.least), rate(timed.forecast)]


def _operations(candidate: PlannedRecipe) -> Sheet:
    """Operation by operation, of the smallest and the largest batch."""
    head = ["of", "operation", "format", "times", "bytes", "operations", "at best", "all, at best", "in", "limit"]
    body = []
    for row in {row.batch: row for row in (candidate.rows[0], candidate.rows[-1])}.values():
        for name, timed in (("prompts", row.prefill), ("step", row.step)):
            for op in timed.bound.ops if timed is not None else ():
                cells = [f"{name}, batch {row.batch:,}", op.name, op.format, f"{op.times:,}", words.size(op.bytes)]
                whole = op.seconds * op.times if op.seconds is not None else None
                cells += [
                    _giga(op.operations),
                    words.or_dash(op.seconds, words.moment),
                    words.or_dash(whole, words.moment),
                ]
                body.append([*cells, op.compute, op.limit or say.NONE])
    return Sheet(head, body, 2)


def _giga(operations: float) -> str:
    return words.rate(operations, "op")


def _figures(outlook: Outlook) -> Sheet:
    """All figures of the target, with where they are from."""
    body = [
        [place, words.or_dash(figure.number, lambda v, u=figure.unit: words.rate(v, u)), figure.state, figure.source]  # type: ignore[misc]
        for place, figure in outlook.target.figures().items()
    ]
    return Sheet(["figure", "value", "state", "source"], body, 2)


def _cells(outlook: Outlook) -> Sheet:
    """How the runtimes take what is stored, with where that is from."""
    body = [
        [each.label, cell.what, each.runtime, cell.state, cell.source]
        for each in outlook.candidates
        for cell in each.cells
    ]
    return Sheet(["recipe", "what", "runtime", "state", "source"], body, 4)
