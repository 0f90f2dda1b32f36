"""Plan as a tree: recommendation, memory, times, rates and costs, load, roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe
from quantkit.planning.ranking import Losses, Ranked
from quantkit.report.kit import tree, words
from quantkit.report.kit.tree import MARK, Cell, Exhibit, Line, On, Part, Remark, Section, Sheet, Styled
from quantkit.report.plan import figures
from quantkit.report.plan import words as say

_RINGS = "Rings on dotted lines are bounds: no runtime is faster. Full points are forecasts with their intervals."
_TONES = {"native": "good", "emulated": "open", "absent": "bad", "cannot run": "bad"}


def document(outlook: Outlook, version: str = "") -> tree.Document:
    """Build the report of a plan."""
    assumed, notes = say.notes(outlook)
    several = len(outlook.candidates) > 1
    cautions = [
        Remark((Styled(f"{', '.join(labels)}: ", "strong"), text) if several else text, "note")
        for text, labels in say.cautions(outlook).items()
    ]
    runs = [candidate for candidate in outlook.candidates if candidate.problem is None]
    chapters: list[tuple[str, str, list[Part]]] = [
        ("fit", "Does it fit", _fit(outlook, runs)),
        ("time", "How long it takes", _times(outlook, runs)),
        ("rate", "Output and cost" if say.currency(outlook) else "Output", _rates(outlook, runs)),
        ("load", "Under load", _load(outlook)),
        ("held", "Against the measured load", _held(outlook)),
        ("compile", "The compile itself", _compiling(outlook)),
        ("roofline", "Roofline", _roofline(outlook)),
        ("operations", "Operation by operation", _operations(outlook)),
        ("stands", "Where the times come from", _stands(outlook, runs)),
    ]
    return tree.Document(
        (Styled(outlook.architecture.name, "strong"), " on ", Styled(outlook.target.name, "strong"), ": a plan"),
        [say.model(outlook.architecture), say.target(outlook), say.workload(outlook.workload, outlook.architecture)],
        [
            _answer(outlook),
            *([Remark(f"Assumed: {'; '.join(assumed)}", "note")] if assumed else []),
            *(Remark(note, "note") for note in [*notes, *say.price_warnings(outlook)]),
            *cautions,
        ],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        footer=f"Made by quantkit {version} from sizes and figures; nothing was run.",
        provenance=_provenance(outlook),
    )


def ranking(outlook: Outlook, ranked: Sequence[Ranked], version: str = "") -> tree.Document:
    """Build the report of a ranking: the recommendation, a line for each recipe, and the next commands."""
    batch, timed, decodes = outlook.workload.batches[0], say.timed(outlook), say.decodes(outlook)
    losses = Losses.shipped()
    head = ["recipe", "runtime", "native", "weights", "memory", f"{say.step(outlook)},\nbatch {batch:,}"]
    head = [*(head if timed else head[:-1]), *(["KL"] if decodes else [])]
    rows: list[list[Line]] = []
    for entry in ranked:
        one, loss, fits = entry.candidate, entry.loss, entry.row.fits is not False
        devices = f"{one.devices} × " if one.devices > 1 else ""
        takes = f"{devices}{words.size(sum(entry.row.parts.values()))}"
        native = Styled("yes", "good") if entry.native else Styled("no", "open")
        cells: list[Line] = [Styled(one.label, "name"), one.runtime, native, words.size(one.bytes)]
        cells.append(takes if fits else (MARK[False], " ", takes))
        cells += [say.at(entry.row) if fits else say.NONE] if timed else []
        lost = say.NONE if loss is None else f"{loss.kl:.3f} ± {loss.half:.3f}" if loss.half else f"{loss.kl:.3f}"
        rows.append([*cells, *([lost] if decodes else [])])
    label = outlook.target.name

    about = ["native: yes, if the runtime computes with the weights as stored; no, if they first become floats."]
    if decodes:
        about.append(f"KL: nats a token, measured on {losses.model}; 0.02 is tiny, 0.1 small, – not measured.")
        about.append("It orders the recipes: your model loses more or less.")
    about.append(say.legend(outlook))
    about += [f"left out: {one.label}: {one.problem}" for one in outlook.candidates if one.problem is not None]
    measures = f"To know times: `quantkit doctor --write --target {outlook.aimed or label}` on that machine."
    missing = [Remark(measures, "note")] if outlook.target.unmeasured() else []
    first = f"To try the first on {label}; `measure` gives the verdict:"
    return tree.Document(
        (Styled(outlook.architecture.name, "strong"), " on ", Styled(label, "strong"), ": which recipe to try first"),
        [say.model(outlook.architecture), say.target(outlook), say.workload(outlook.workload, outlook.architecture)],
        [replace(_answer(outlook), because=outlook.recommendation.because, commands=[]), *missing],
        [
            Sheet(head, rows, 0, 3),
            *(Remark(line, "caption") for line in about if line),
            *(tree.Code(first, "\n".join(commands)) for commands in [say.confirm(outlook)] if commands),
        ],
        footer=f"Made by quantkit {version} from sizes and figures; nothing was run.",
    )


def _stands(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    reasons: list[tuple[Line, Cell]] = list(say.because(outlook.candidates))
    legend = say.legend(outlook) if runs else ""
    return [*([Remark(legend, "caption")] if legend else []), *([tree.Facts(reasons)] if reasons else [])]


def _answer(outlook: Outlook) -> tree.Conclusion:
    commands, standing = "\n".join(say.confirm(outlook)), say.standing(outlook)
    about = f"only a measurement decides; to confirm it on {outlook.target.name}:"
    tone = "good" if outlook.recommendation.label is not None else "bad"
    confirm = [tree.Code(about, commands)] if commands else []
    aside = f" {words.sentence(standing)}: only a measurement decides."
    return tree.Conclusion(say.answer(outlook), tone, say.reasons(outlook), standing, aside, confirm)


def _fit(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    decodes = say.decodes(outlook)
    tokens = f", {outlook.workload.context:,} tokens each" if decodes else ""
    head = ("recipe", "runtime", "stored", "bits", "weights", "batch", "takes", "of", "largest\nbatch")
    rows: list[list[Line]] = []
    for candidate in outlook.candidates:
        state, memory = say.state(candidate), candidate.memory
        cells: list[Line] = [Styled(candidate.label, "name"), candidate.runtime or say.NONE]
        cells.append(Styled(state, _TONES.get(state, "")))
        if memory is not None:
            fits = say.fits(memory)
            cells += [words.or_dash(candidate.bits, words.short), words.size(candidate.bytes), f"{memory.batch:,}"]
            cells += [(MARK[fits] if fits is not None else " ", " ", say.takes(memory))]
            cells += [words.or_dash(memory.capacity, words.size), say.largest(memory.largest_batch, memory)]
        rows.append([*cells, *[say.NONE] * (len(head) - len(cells))])
    about = f"At the largest requested batch that fits{tokens}."
    parts: list[Part] = [Remark(about, "caption"), Sheet(head, rows, words=3)]
    if len(runs) == 1 and (memory := runs[0].memory) is not None:
        known: list[tuple[Line, Cell]] = [(name, words.size(size)) for name, size in memory.parts.items() if size]
        if decodes:
            known.append(("cache for a token", words.size(memory.cache_per_token)))
            known.append(("largest context", say.largest(memory.largest_context, memory)))
        parts.append(tree.Facts(known, on=On.SCREEN))
    charts = [chart for chart in (figures.memory_bars(outlook), figures.memory_lines(outlook)) if chart is not None]
    if charts:
        shades = figures.parts(outlook.candidates)
        sentences = ["Memory of one device, against the capacity that a runtime uses."]
        keys = [(shade, name) for name, shade in shades.items()]
        parts.append(Exhibit(sentences, charts, [], _memory(outlook, list(shades)), keys=keys))
    return parts


def _memory(outlook: Outlook, names: Sequence[str]) -> Sheet:
    decodes = say.decodes(outlook)
    head = ["recipe", "batch", *names, "in all", "capacity", "fits", "largest batch"]
    head += ["cache for a token", "largest context"] if decodes else []
    body = []
    for candidate in outlook.candidates:
        for row in candidate.rows if candidate.memory is not None else ():
            memory, whole = candidate.memory, sum(row.parts.values())
            assert memory is not None
            sizes = (words.or_dash(row.parts.get(name), words.size) for name in names)
            line = [candidate.label, f"{row.batch:,}", *sizes]
            line += [words.size(whole), words.or_dash(memory.capacity, words.size), say.FITS[row.fits]]
            line.append(say.largest(memory.largest_batch, memory))
            cache = [words.size(memory.cache_per_token), say.largest(memory.largest_context, memory)]
            body.append([*line, *(cache if decodes else [])])
    return Sheet(head, body)


def _times(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    if not say.timed(outlook) or not runs:
        return []
    step, decodes, work = say.step(outlook), say.decodes(outlook), outlook.workload
    lengths = f"Sequences of {work.prompt:,}" if outlook.architecture.kind == "encoder" else "A whole image"
    if decodes:
        lengths = f"Prompts of {work.prompt:,} tokens; a step halfway through {work.output:,} output tokens"
    brief = _batches(outlook, runs[0])
    if len(runs) > 1:
        batches = list(dict.fromkeys((work.batches[0], work.batches[-1])))
        prompts = any(row.prefill for candidate in runs for row in candidate.rows)
        body: list[list[Line]] = []
        for candidate in runs:
            rows = {row.batch: row for row in candidate.rows}
            devices = candidate.memory.devices if candidate.memory is not None else 1
            name = (Styled(candidate.label, "name"), Styled(f" ({devices}×)" if devices > 1 else "", "dim"))
            first = [_time(rows.get(batches[0]), prefill=True)] if prompts else []
            body.append([name, *first, *(_time(rows.get(batch)) for batch in batches)])
        head = ["recipe", *([f"first token,\nbatch {batches[0]:,}"] if prompts else [])]
        brief = Sheet([*head, *(f"{step},\nbatch {batch:,}" for batch in batches)], body)
    head = ["recipe", "batch", *(["prompts, at best", "prompts, forecast"] if decodes else [])]
    head += [f"{step}, at best", f"{step}, forecast", "limit", "fits"]
    full, every = [], [(candidate, row) for candidate in outlook.candidates for row in candidate.rows]
    for candidate, row in every:
        before = [say.bound(row.prefill), say.forecast(row.prefill)] if decodes else []
        own = [say.bound(row.step), say.forecast(row.step), say.limit(row.step), say.FITS[row.fits]]
        full.append([candidate.label, f"{row.batch:,}", *before, *own])
    charts = figures.times(outlook)
    fits = any(say.fitting(candidate) for candidate in outlook.candidates)
    captions = [_RINGS] if charts else [] if fits else ["No batch fits."]
    if charts and any(row.fits is False for _, row in every):
        captions.append("Batches that do not fit are in the table only.")
    exhibit = Exhibit([], charts, captions, Sheet(head, full, 1), keys=figures.keys(outlook))
    return [Remark(f"{lengths}.", "caption"), brief, exhibit]


def _time(row: PlannedBatch | None, *, prefill: bool = False) -> str:
    return Styled(say.at(row, prefill=prefill), "bad" if row is not None and row.fits is False else "")


def _batches(outlook: Outlook, candidate: PlannedRecipe) -> Sheet:
    step, rows = say.step(outlook), candidate.rows
    columns: dict[str, list[str]] = {"batch": [f"{row.batch:,}" for row in rows]}
    for name, of in (("prefill", [row.prefill for row in rows]), (step, [row.step for row in rows])):
        columns[f"{name},\nat best"] = [say.bound(timed) for timed in of]
        columns[f"{name},\nforecast"] = [say.forecast(timed) for timed in of]
    columns[f"{step}\nlimit"] = [say.limit(row.step) for row in rows]
    rates = [say.rate(candidate, row, outlook.workload) for row in rows]
    columns[say.per_second(outlook).replace(" ", "\n", 1)] = [
        say.expected(rate).partition(" ")[0] if rate.forecast is not None else say.most(rate) for rate in rates
    ]
    columns["fits"] = [MARK[row.fits] if row.fits is not None else "" for row in rows]
    kept = {name: cells for name, cells in columns.items() if any(cell not in ("", say.NONE) for cell in cells)}
    return Sheet(list(kept), list(zip(*kept.values(), strict=True)))


def _rates(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> list[Part]:
    if not runs or not any(say.fitting(candidate) for candidate in outlook.candidates):
        return []
    names, per_second = say.amounts_head(outlook), say.per_second(outlook)
    parts: list[Part] = []
    rows: list[Sequence[Line]] = []
    if say.timed(outlook) and len(runs) == 1:
        rows = [[f"{row.batch:,}", *say.amounts(outlook, row)] for row in say.fitting(runs[0])]
        parts += [Sheet(["batch", *names], rows)] if names else []
    elif say.timed(outlook):
        for candidate in runs:
            cells = [say.NONE, "", *[say.NONE] * len(names)]
            if (best := say.best(candidate, outlook.workload)) is not None:
                row, rate = best
                shown = say.expected(rate) if rate.forecast is not None else say.most(rate)
                cells = [shown, f"{row.batch:,}", *say.amounts(outlook, row)]
            rows.append([Styled(candidate.label, "name"), *cells])
        parts.append(Remark("At the fitting batch with the most output.", "caption"))
        parts.append(Sheet(["recipe", per_second, "at batch", *names], rows))
    parts += [Remark(f"by {basis}", "caption", On.SCREEN) for basis in say.bases(outlook)]
    cost = figures.costs(outlook)
    charts = [chart for chart in (figures.rates(outlook, wide=cost is None), cost) if chart is not None]
    body = []
    for candidate in outlook.candidates:
        for row in say.fitting(candidate):
            rate = say.rate(candidate, row, outlook.workload)
            line = [candidate.label, f"{row.batch:,}", words.or_dash(rate.most, words.short), say.expected(rate)]
            body.append([*line, *say.amounts(outlook, row)])
    sentences = ["All requests start together: first their prompts, then every token."]
    captions = [_RINGS] if charts else []
    if say.currency(outlook):
        amounts = f"Amounts are for a million {say.unit(outlook)} on a machine without idle time"
        captions.append(f"{amounts}, at the cheapest price.")
    if any(name.startswith("J ") for name in names):
        captions.append("Energy is for the boards at full power, without the rest of the machine.")
    table = Sheet(["recipe", "batch", f"{per_second}, at most", "forecast", *names], body)
    sentences = sentences if say.decodes(outlook) else []
    return [*parts, Exhibit(sentences, charts, captions, table, keys=figures.keys(outlook))]


def _load(outlook: Outlook) -> list[Part]:
    full, brief = say.loads(outlook, ("mean", "p50", "p90", "p99")), say.loads(outlook)
    rate = outlook.workload.rate
    if full is None or brief is None or rate is None:
        return []
    about = f"{rate:g} requests/s, in a simulation of continuous batching. {say.WAITS}"
    lines = [about, *(f"{line}." for line in say.carried(outlook))]
    return [replace(brief, on=On.SCREEN), replace(full, on=On.PAGE), *(Remark(line, "caption") for line in lines)]


def _held(outlook: Outlook) -> list[Part]:
    rows: list[list[Line]] = []
    for one in outlook.held:
        planned, measured = (say.NONE if x is None else _shown(x, one.unit) for x in (one.planned, one.measured))
        ratio = Styled(words.or_dash(one.ratio, words.short), "" if one.near else "open")
        cells = [Styled(one.subject, "name"), one.what.removeprefix("load."), words.or_dash(one.rate, words.short)]
        rows.append([*cells, planned, measured, ratio])
    head = ["model", "figure", "requests/s", "planned", "measured", "planned /\nmeasured"]
    about = "The plan of the load that was measured of this bundle, in the same runtime on this machine."
    return [Remark(about, "caption"), Sheet(head, rows, words=2)] if rows else []


def _shown(value: float, unit: str) -> str:
    return words.moment(value) if unit == "s" else f"{value:,.0f}" if unit == "1" else f"{value:.3g} {unit}"


def _compiling(outlook: Outlook) -> list[Part]:
    table, notes = say.compiling(outlook.candidates)
    return [table, *(Remark(f"{words.sentence(line)}.", "caption") for line in notes)] if table.rows else []


def _roofline(outlook: Outlook) -> list[Part]:
    chart = figures.roofline(outlook)
    if chart is None:
        return []
    read, body = outlook.target.memory.read_bandwidth, []
    for candidate in outlook.candidates:
        for row in say.fitting(candidate):
            for name, timed in (("prompts", row.prefill), (say.step(outlook), row.step)):
                if timed is not None:
                    body.append([candidate.label, name, f"{row.batch:,}", *_lies(timed)])
    head = ["recipe", "what", "batch", "bytes", "operations", "operations/byte", "operations/s, at most", "forecast"]
    symbols = "Labels name the first and the last batch."
    if say.decodes(outlook):
        symbols = "Circles are steps, labelled with the first and the last batch; diamonds are prompts."
    sentences = [
        f"Left of a roof's corner, reading at {words.rate(read.number or 0, read.unit)} is the limit; right of it, "
        f"computing. {symbols}",
        "Every point is a sequence of many operations with different limits, so its bound is below the roofs.",
    ]
    return [Exhibit(sentences, [chart], [_RINGS], Sheet(head, body), keys=figures.keys(outlook))]


def _lies(timed: TimedStep) -> list[str]:
    work, size = timed.bound.operations, timed.bound.bytes
    rates = [words.rate(work / s, "op/s") if s else say.NONE for s in (timed.least, timed.forecast)]
    return [words.size(size), words.rate(work, "op"), words.short(work / size) if size else say.NONE, *rates]


def _operations(outlook: Outlook) -> list[Part]:
    head = ["phase", "operation", "format", "times", "bytes", "operations", "at best", "all, at best", "in", "limit"]
    parts: list[Part] = []
    for candidate in (candidate for candidate in outlook.candidates if candidate.rows):
        body = []
        for row in {row.batch: row for row in (candidate.rows[0], candidate.rows[-1])}.values():
            for name, timed in (("prompts", row.prefill), ("step", row.step)):
                for op in timed.bound.ops if timed is not None else ():
                    whole = op.seconds * op.times if op.seconds is not None else None
                    cells = [f"{name}, batch {row.batch:,}", op.name, op.format, f"{op.times:,}", words.size(op.bytes)]
                    cells += [words.rate(op.operations, "op")]
                    cells += [words.or_dash(seconds, words.moment) for seconds in (op.seconds, whole)]
                    body.append([*cells, op.compute, op.limit or say.NONE])
        parts.append(Sheet(head, body, 2, title=candidate.label, folded=True, on=On.PAGE))
    about = (
        "Equal operations share a line. “At best” is the larger of two times, reading the bytes and computing, by the "
        "target's own figures."
    )
    return [Remark(about, "caption", On.PAGE), *parts] if parts else []


def _provenance(outlook: Outlook) -> list[Part]:
    targeted = [
        [place, say.NONE if f.number is None else words.rate(f.number, f.unit), f.state, f.source]
        for place, f in outlook.target.figures().items()
    ]
    money = say.currency(outlook)
    ways = [line for candidate in outlook.candidates for line in say.ways(candidate)]
    cells = [(candidate, cell) for candidate in outlook.candidates for cell in candidate.cells]
    taken = [[candidate.label, cell.what, candidate.runtime, cell.state, cell.source] for candidate, cell in cells]
    paid = ["recipe", "price", "an hour", f"{money} a million", f"{money} a request", "used", "source"]
    stored = ["recipe", "what", "runtime", "state", "source"]
    tables = {
        "All figures of the target, with sources": Sheet(["figure", "value", "state", "source"], targeted, 2),
        "All prices, at the batch with the cheapest request": Sheet(paid, ways, 1),
        "Stored formats, and the runtime's support": Sheet(stored, taken, 4),
    }
    known = {title: replace(table, title=title) for title, table in tables.items() if table.rows}
    return [Section(title, [table], folded=True, on=On.PAGE) for title, table in known.items()]


def rehearsed(block: str, seconds: float, findings: Sequence[tuple[str, bool]]) -> list[Part]:
    """Build the result of a rehearsal; a finding is (line, True if it would end the compile)."""
    what = f"rehearsed on {block} in {words.duration(seconds)}" if block else "rehearsed without running a block"
    if not findings:
        return [Remark(f"{what}: no failure to expect")]
    marks = {True: Styled("✗ ", "bad"), False: Styled("! ", "open")}
    return [Remark(f"{what}:"), *(Remark(("  ", marks[fails], line)) for line, fails in findings)]
