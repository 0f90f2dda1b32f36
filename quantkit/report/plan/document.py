"""A plan as a tree: which recipe and why, does it fit, how long it takes, what it gives and costs, under the roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe
from quantkit.report.kit import words
from quantkit.report.kit.tree import (
    MARK,
    Cell,
    Code,
    Conclusion,
    Document,
    Exhibit,
    Facts,
    Line,
    On,
    Part,
    Remark,
    Section,
    Sheet,
    Styled,
)
from quantkit.report.plan import costs as plan_costs
from quantkit.report.plan import figures
from quantkit.report.plan import words as say

_RINGS = "Rings on dotted lines are bounds, which no runtime beats; full points are forecasts with their intervals."
_TONES = {"native": "good", "emulated": "open", "absent": "bad", "cannot run": "bad"}


def document(outlook: Outlook, version: str = "") -> Document:
    """Build the tree of a plan."""
    assumed, notes = say.notes(outlook)
    several = len(outlook.candidates) > 1
    cautions = [
        Remark((Styled(f"{', '.join(labels)}: ", "strong"), text) if several else text, "note")
        for text, labels in say.every_caution(outlook).items()
    ]
    money = plan_costs.currency(outlook)
    runs = [each for each in outlook.candidates if each.problem is None]
    chapters: list[tuple[str, str, list[Part]]] = [
        ("fit", "Does it fit", _fit(outlook, runs)),
        ("time", "How long it takes", _times(outlook, runs)),
        ("rate", "What it gives and costs" if money else "What it gives", _rates(outlook, runs)),
        ("load", "Under the load", _load(outlook)),
        ("compile", "The compile itself", _compiling(outlook)),
        ("roofline", "Under the roofs", _roofline(outlook)),
        ("operations", "Operation by operation", _operations(outlook)),
        ("stands", "What times stand on", _stands(outlook, runs)),
    ]
    return Document(
        (Styled(outlook.architecture.name, "strong"), " on ", Styled(outlook.target.name, "strong"), ": a plan"),
        [say.model(outlook.architecture), say.target(outlook), say.workload(outlook.workload, outlook.architecture)],
        [
            _answer(outlook),
            *([Remark(f"Assumed: {'; '.join(assumed)}", "note")] if assumed else []),
            *(Remark(note, "note") for note in [*notes, *plan_costs.warnings(outlook)]),
            *cautions,
        ],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        made=f"Made by quantkit {version} from sizes and figures; nothing was run.",
        provenance=_provenance(outlook),
    )


def _stands(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    reasons: list[tuple[Line, Cell]] = list(say.because(outlook.candidates))
    legend = say.legend(outlook) if runs else ""
    return [*([Remark(legend, "caption")] if legend else []), *([Facts(reasons)] if reasons else [])]


def _answer(outlook: Outlook) -> Conclusion:
    commands = "\n".join(say.confirm(outlook))
    about = f"only a measurement decides; on {outlook.target.name} this would confirm it:"
    return Conclusion(
        say.answer(outlook),
        "good" if outlook.recommendation.label is not None else "bad",
        say.reasons(outlook),
        label=say.standing(outlook),
        aside=f" {words.sentence(say.standing(outlook))}: only a measurement decides.",
        commands=[Code(about, commands)] if commands else [],
    )


def _fit(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    tokens = f", {outlook.workload.context:,} tokens each" if _decodes(outlook) else ""
    about = f"At the largest batch asked for that does{tokens}."
    head = ("recipe", "runtime", "stored", "bits", "weights", "batch", "takes", "of", "largest\nbatch")
    rows: list[list[Line]] = []
    for each in outlook.candidates:
        state, memory = say.state(each), each.memory
        cells: list[Line] = [Styled(each.label, "name"), each.runtime or say.NONE]
        cells.append(Styled(state, _TONES.get(state, "")))
        if memory is not None:
            fits = say.fits(memory)
            mark = MARK[fits] if fits is not None else " "
            cells += [words.or_dash(each.bits, lambda bits: words.figure(bits, 3)), words.size(each.bytes)]
            cells += [f"{memory.batch:,}", (mark, " ", say.takes(memory))]
            cells += [words.or_dash(memory.capacity, words.size), say.largest(memory.largest_batch, memory)]
        rows.append([*cells, *[say.NONE] * (len(head) - len(cells))])
    parts: list[Part] = [Remark(about, "caption"), Sheet(head, rows, words=3)]
    if len(runs) == 1 and (memory := runs[0].memory) is not None:
        known: list[tuple[Line, Cell]] = [(name, words.size(size)) for name, size in memory.parts.items() if size]
        if _decodes(outlook):
            known.append(("a token of cache", words.size(memory.cache_per_token)))
            known.append(("largest context", say.largest(memory.largest_context, memory)))
        parts.append(Facts(known, on=On.SCREEN))
    charts = [chart for chart in (figures.memory_bars(outlook), figures.memory_lines(outlook)) if chart is not None]
    if charts:
        shades = figures.parts(outlook.candidates)
        said = ["What one device holds, against what a runtime uses of it."]
        keys = [(shade, name) for name, shade in shades.items()]
        parts.append(Exhibit(said, charts, [], _memory(outlook, list(shades)), keys=keys))
    return parts


def _memory(outlook: Outlook, names: Sequence[str]) -> Sheet:
    decodes = _decodes(outlook)
    head = ["recipe", "batch", *names, "in all", "capacity", "fits", "largest batch"]
    head += ["a token of cache", "largest context"] if decodes else []
    body = [
        [
            each.label,
            f"{row.batch:,}",
            *(words.or_dash(row.parts.get(name), words.size) for name in names),
            words.size(sum(row.parts.values())),
            words.or_dash(memory.capacity, words.size),
            say.FITS[row.fits],
            say.largest(memory.largest_batch, memory),
            *([words.size(memory.cache_per_token), say.largest(memory.largest_context, memory)] if decodes else []),
        ]
        for each in outlook.candidates
        if (memory := each.memory) is not None
        for row in each.rows
    ]
    return Sheet(head, body)


def _times(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    if not say.timed(outlook) or not runs:
        return []
    step, decodes = say.step(outlook.architecture), _decodes(outlook)
    parts: list[Part] = [Remark(f"{words.sentence(_lengths(outlook))}.", "caption")]
    if len(runs) == 1:
        parts.append(_batches(outlook, runs[0]))
    else:
        batches = list(dict.fromkeys((outlook.workload.batches[0], outlook.workload.batches[-1])))
        first = (
            [f"first token,\nbatch {batches[0]:,}"] if any(row.prefill for each in runs for row in each.rows) else []
        )
        body: list[list[Line]] = []
        for each in runs:
            rows = {row.batch: row for row in each.rows}
            cells = [_time(rows.get(batches[0]), prefill=True)] if first else []
            cells += [_time(rows.get(batch)) for batch in batches]
            body.append([(Styled(each.label, "name"), Styled(say.several(each), "dim")), *cells])
        parts.append(Sheet(["recipe", *first, *(f"{step},\nbatch {batch:,}" for batch in batches)], body))
    head = ["recipe", "batch", *(["prompts, at best", "prompts, forecast"] if decodes else [])]
    head += [f"{step}, at best", f"{step}, forecast", "limit", "fits"]
    full = []
    for each in outlook.candidates:
        for row in each.rows:
            prompts = [say.bound(row.prefill), say.forecast(row.prefill)] if decodes else []
            own = [say.bound(row.step), say.forecast(row.step), say.limit(row.step), say.FITS[row.fits]]
            full.append([each.label, f"{row.batch:,}", *prompts, *own])
    charts = figures.times(outlook)
    fits = any(say.fitting(each) for each in outlook.candidates)
    captions = [_RINGS] if charts else [] if fits else ["No batch fits."]
    if any(row.fits is False for each in outlook.candidates for row in each.rows) and charts:
        captions.append("Batches that do not fit are in the table alone.")
    return [*parts, Exhibit([], charts, captions, Sheet(head, full, 1), keys=figures.keys(outlook))]


def _time(row: PlannedBatch | None, *, prefill: bool = False) -> str:
    return Styled(say.at(row, prefill=prefill), "bad" if row is not None and row.fits is False else "")


def _batches(outlook: Outlook, candidate: PlannedRecipe) -> Sheet:
    """Build a line a batch; columns that nothing is in are left out."""
    step = say.step(outlook.architecture)
    columns: dict[str, list[str]] = {"batch": [f"{row.batch:,}" for row in candidate.rows]}
    for name, of in (("prefill", [row.prefill for row in candidate.rows]), (step, [r.step for r in candidate.rows])):
        columns[f"{name},\nat best"] = [say.bound(timed) for timed in of]
        columns[f"{name},\nforecast"] = [say.forecast(timed) for timed in of]
    columns[f"{step}\nlimit"] = [say.limit(row.step) for row in candidate.rows]
    rates = [say.rate(candidate, row, outlook.workload) for row in candidate.rows]
    columns[say.per_second(outlook).replace(" ", "\n", 1)] = [
        say.expected(rate).partition(" ")[0] if rate.forecast is not None else say.most(rate) for rate in rates
    ]
    columns["fits"] = [MARK[row.fits] if row.fits is not None else "" for row in candidate.rows]
    kept = {name: cells for name, cells in columns.items() if any(cell not in ("", say.NONE) for cell in cells)}
    return Sheet(list(kept), list(zip(*kept.values(), strict=True)))


def _rates(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    if not runs or not any(say.fitting(each) for each in outlook.candidates):
        return []
    unit, names = say.unit(outlook.architecture), plan_costs.head(outlook)
    parts: list[Part] = []
    if say.timed(outlook):
        rows: list[Sequence[Line]] = []
        if len(runs) == 1:
            candidate = runs[0]
            rows = [[f"{row.batch:,}", *plan_costs.amounts(outlook, row)] for row in say.fitting(candidate)]
            parts += [Sheet(["batch", *names], rows)] if names else []
        else:
            for each in runs:
                best = say.best(each, outlook.workload)
                cells = [say.given(best[1]), f"{best[0].batch:,}"] if best is not None else [say.NONE, ""]
                amounts = plan_costs.amounts(outlook, best[0]) if best is not None else [say.NONE] * len(names)
                rows.append([Styled(each.label, "name"), *cells, *amounts])
            parts.append(Remark("At the batch that gives the most of those that fit.", "caption"))
            parts.append(Sheet(["recipe", say.per_second(outlook), "at batch", *names], rows))
    parts += [Remark(f"by {basis}", "caption", On.SCREEN) for basis, _ in plan_costs.bases(outlook)]
    cost = figures.costs(outlook)
    charts = [chart for chart in (figures.rates(outlook, wide=cost is None), cost) if chart is not None]
    body = []
    for each in outlook.candidates:
        for row in say.fitting(each):
            rate = say.rate(each, row, outlook.workload)
            at_most = words.or_dash(rate.most, lambda value: words.figure(value, 3))
            body.append([each.label, f"{row.batch:,}", at_most, say.expected(rate), *plan_costs.amounts(outlook, row)])
    head = ["recipe", "batch", f"{say.per_second(outlook)}, at most", "forecast", *names]
    said = ["Requests that all begin together: their prompts first, then every token."] if unit == "tokens" else []
    captions = [_RINGS] if charts else []
    if plan_costs.currency(outlook):
        captions.append(
            f"Amounts are for a million {unit} on a machine that always works, paid for in the cheapest way."
        )
    if any(name.startswith("J ") for name in names):
        captions.append("Energy is for boards that draw all they may, without the machine around them.")
    return [*parts, Exhibit(said, charts, captions, Sheet(head, body), keys=figures.keys(outlook))]


def _load(outlook: Outlook) -> list[Part]:
    full, brief = plan_costs.loads(outlook, ("mean", "p50", "p90", "p99")), plan_costs.loads(outlook)
    rate = outlook.workload.rate
    if full is None or brief is None or rate is None:
        return []
    about = f"{rate:g} requests/s, in a simulation of continuous batching. {plan_costs.WAITS}"
    lines = [about, *(f"{line}." for line in plan_costs.carried(outlook))]
    return [replace(brief, on=On.SCREEN), replace(full, on=On.PAGE), *(Remark(line, "caption") for line in lines)]


def _compiling(outlook: Outlook) -> list[Part]:
    table, notes = say.compiling(outlook.candidates)
    return [table, *(Remark(f"{words.sentence(line)}.", "caption") for line in notes)] if table.rows else []


def _roofline(outlook: Outlook) -> list[Part]:
    chart = figures.roofline(outlook)
    if chart is None:
        return []
    read = outlook.target.memory.read_bandwidth
    body = [
        [each.label, name, f"{row.batch:,}", *_lies(timed)]
        for each in outlook.candidates
        for row in say.fitting(each)
        for name, timed in (("prompts", row.prefill), (say.step(outlook.architecture), row.step))
        if timed is not None
    ]
    head = ["recipe", "what", "batch", "bytes", "operations", "operations/byte", "operations/s, at most", "forecast"]
    symbols = "The first and the last batch stand beside their points."
    if _decodes(outlook):
        symbols = "Circles are steps, with the first and the last batch beside them; diamonds are prompts."
    said = [
        f"Left of a roof's corner reading at {words.rate(read.number or 0, read.unit)} is what limits, right of it "
        f"computing. {symbols}",
        "Each is many operations, some under each roof, one after the other: so its own bound lies below the roofs.",
    ]
    return [Exhibit(said, [chart], [_RINGS], Sheet(head, body), keys=figures.keys(outlook))]


def _lies(timed: TimedStep) -> list[str]:
    bound = timed.bound
    intensity = words.figure(bound.operations / bound.bytes, 3) if bound.bytes else say.NONE
    rates = [
        words.rate(bound.operations / seconds, "op/s") if seconds else say.NONE
        for seconds in (timed.least, timed.forecast)
    ]
    return [words.size(bound.bytes), words.rate(bound.operations, "op"), intensity, *rates]


def _operations(outlook: Outlook) -> list[Part]:
    """Build a folded table a candidate: every operation of the smallest and the largest batch."""
    head = ["of", "operation", "format", "times", "bytes", "operations", "at best", "all, at best", "in", "limit"]
    parts: list[Part] = []
    for each in (each for each in outlook.candidates if each.rows):
        body = []
        for row in {row.batch: row for row in (each.rows[0], each.rows[-1])}.values():
            for name, timed in (("prompts", row.prefill), ("step", row.step)):
                for op in timed.bound.ops if timed is not None else ():
                    whole = op.seconds * op.times if op.seconds is not None else None
                    cells = [f"{name}, batch {row.batch:,}", op.name, op.format, f"{op.times:,}", words.size(op.bytes)]
                    cells += [words.rate(op.operations, "op")]
                    cells += [words.or_dash(seconds, words.moment) for seconds in (op.seconds, whole)]
                    body.append([*cells, op.compute, op.limit or say.NONE])
        parts.append(Sheet(head, body, 2, title=each.label, folded=True, on=On.PAGE))
    about = (
        "Operations that are alike are one line. What stands at “at best” is the larger of reading its bytes and "
        "computing, on the target's own figures."
    )
    return [Remark(about, "caption", On.PAGE), *parts] if parts else []


def _provenance(outlook: Outlook) -> list[Part]:
    """Build the target's figures, every way to pay, and how runtimes take what is stored, with their sources."""
    targeted = [
        [place, words.or_dash(figure.number, lambda v, u=figure.unit: words.rate(v, u)), figure.state, figure.source]  # type: ignore[misc]
        for place, figure in outlook.target.figures().items()
    ]
    money = plan_costs.currency(outlook)
    ways = [line for each in outlook.candidates for line in plan_costs.ways(each)]
    paid = ["recipe", "price", "an hour", f"{money} a million", f"{money} a request", "used", "source"]
    taken = [
        [each.label, cell.what, each.runtime, cell.state, cell.source]
        for each in outlook.candidates
        for cell in each.cells
    ]
    tables = [
        Sheet(["figure", "value", "state", "source"], targeted, 2, title="Every figure of the target, with its source"),
        Sheet(paid, ways, 1, title="Every way to pay, at the batch where a request takes least"),
        Sheet(
            ["recipe", "what", "runtime", "state", "source"],
            taken,
            4,
            title="What is stored, and how the runtime takes it",
        ),
    ]
    return [Section(table.title, [table], folded=True, on=On.PAGE) for table in tables if table.rows]


def rehearsed(block: str, seconds: float, findings: Sequence[tuple[str, bool]]) -> list[Part]:
    """Build what a rehearsal found: (line, whether the compile would end with it)."""
    what = f"rehearsed on {block} in {words.duration(seconds)}" if block else "rehearsed; no block was run"
    if not findings:
        return [Remark(f"{what}: nothing that would fail was found")]
    marks = {True: Styled("✗ ", "bad"), False: Styled("! ", "open")}
    return [Remark(f"{what}:"), *(Remark(("  ", marks[fails], line)) for line, fails in findings)]


def _lengths(outlook: Outlook) -> str:
    work = outlook.workload
    if _decodes(outlook):
        return f"prompts of {work.prompt:,}, a token more halfway through {work.output:,}"
    return f"sequences of {work.prompt:,}" if outlook.architecture.kind == "encoder" else "a whole image"


def _decodes(outlook: Outlook) -> bool:
    return outlook.architecture.kind == "decoder"
