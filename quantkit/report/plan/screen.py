"""A plan on a screen: does it fit, how long it takes, what it gives, which recipe, and what would confirm it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedMemory, PlannedRecipe
from quantkit.report.kit import words
from quantkit.report.kit.parts import Sheet
from quantkit.report.kit.screen import DIM, MARK, copied, indented, marked, pairs, titled
from quantkit.report.kit.screen import table as made_table
from quantkit.report.plan import costs as plan_costs
from quantkit.report.plan import words as say
from quantkit.report.plan.as_json import as_dict

__all__ = ["as_dict", "terminal"]

_FITS: dict[bool | None, tuple[str, str]] = {None: (" ", ""), True: MARK[True], False: MARK[False]}
_STATES = {"native": "green", "emulated": "yellow", "absent": "bold red", "cannot run": "bold red"}


def terminal(outlook: Outlook, html: Path | None = None) -> list[RenderableType]:
    """All of it in 80 columns: candidates side by side; of a single one every batch, and what memory goes into."""
    shown: list[RenderableType] = [Text(), *_head(outlook)]
    runs = [each for each in outlook.candidates if each.problem is None]
    if runs:
        shown += titled(_fit_title(outlook), _fit(outlook))
        if len(runs) == 1:
            shown += _single(outlook, runs[0])
        elif say.timed(outlook):
            shown += titled(f"how long, {_lengths(outlook)}", _times(outlook, runs))
            fitting = " of those that fit" if any(row.fits is False for each in runs for row in each.rows) else ""
            shown += titled(f"what it gives, at the batch that gives the most{fitting}", _rates(outlook, runs))
            shown += _costs(outlook, plan_costs.costs(outlook))
        shown += [*_load(outlook), *_compiling(runs), Text()]
        shown += indented(Text(say.legend(outlook), DIM)) if say.legend(outlook) else []
    shown += _said(outlook)
    shown += _recommended(outlook)
    shown += [Text(), copied(f"  {html}")] if html is not None else []
    return shown


def rehearsed(block: str, seconds: float, findings: Sequence[tuple[str, bool]]) -> list[RenderableType]:
    """What a rehearsal found: (line, whether the compile would end with it)."""
    what = f"rehearsed on {block} in {words.duration(seconds)}" if block else "rehearsed; no block was run"
    if not findings:
        return [Text(f"{what}: nothing that would fail was found")]
    shown: list[RenderableType] = [Text(f"{what}:")]
    for line, fails in findings:
        mark = Text("✗ " if fails else "! ", "bold red" if fails else "yellow")
        shown += indented(mark + Text(line))
    return shown


def _head(outlook: Outlook) -> list[RenderableType]:
    name, _, rest = say.model(outlook.architecture).partition(": ")
    on, _, figures = say.target(outlook).partition(": ")
    found: list[RenderableType] = [
        Text.assemble((name, "bold"), f": {rest}"),
        Text.assemble((on, "bold"), f": {figures}"),
        Text(say.workload(outlook.workload, outlook.architecture)),
    ]
    assumed, others = say.notes(outlook)
    found += indented(Text(f"assumed: {'; '.join(assumed)}", DIM)) if assumed else []
    return found + list(map(marked, others))


def _fit_title(outlook: Outlook) -> str:
    work = outlook.workload
    tokens = f", {work.context:,} tokens each" if outlook.architecture.kind == "decoder" else ""
    return f"does it fit, at the largest batch asked for that does{tokens}"


def _fit(outlook: Outlook) -> RenderableType:
    head = ("recipe", "runtime", "stored", "bits", "weights", "batch", "takes", "of", "largest\nbatch")
    rows = []
    for each in outlook.candidates:
        state, memory = say.state(each), each.memory
        cells: list[RenderableType] = [Text(each.label, "cyan"), each.runtime or say.NONE]
        cells.append(Text(state, _STATES.get(state, "")))
        if memory is not None:
            mark, style = _FITS[say.fits(memory)]
            cells += [words.or_dash(each.bits, lambda bits: words.figure(bits, 3)), words.size(each.bytes)]
            cells += [f"{memory.batch:,}", Text.assemble((f"{mark} ", style), say.takes(memory))]
            cells += [words.or_dash(memory.capacity, words.size), say.largest(memory.largest_batch, memory)]
        rows.append(cells)
    return _table(head, rows, left=3)


def _times(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> RenderableType:
    step = say.step(outlook.architecture)
    batches = list(dict.fromkeys((outlook.workload.batches[0], outlook.workload.batches[-1])))
    first = [f"first token,\nbatch {batches[0]:,}"] if any(row.prefill for each in runs for row in each.rows) else []
    table = _table(["recipe", *first, *(f"{step},\nbatch {batch:,}" for batch in batches)])
    for each in runs:
        rows = {row.batch: row for row in each.rows}
        cells = [_time(rows.get(batches[0]), prefill=True)] if first else []
        cells += [_time(rows.get(batch)) for batch in batches]
        table.add_row(Text(each.label, "cyan") + Text(say.several(each), DIM), *cells)
    return table


def _time(row: PlannedBatch | None, *, prefill: bool = False) -> Text:
    return Text(say.at(row, prefill=prefill), "red" if row is not None and row.fits is False else "")


def _rates(outlook: Outlook, runs: Sequence[PlannedRecipe]) -> RenderableType:
    best = {each.label: say.best(each, outlook.workload) for each in runs}
    rows = [(say.given(found[1]), f"{found[0].batch:,}") if found else (say.NONE, "") for found in best.values()]
    labels = (Text(label, "cyan") for label in best)
    return _table(["recipe", say.per_second(outlook), "at batch"], zip(labels, *zip(*rows, strict=True), strict=True))


def _costs(outlook: Outlook, sheet: Sheet | None) -> list[RenderableType]:
    """What tokens cost and take, by the cheapest way that the prices know."""
    if sheet is None:
        return []
    unit = say.unit(outlook.architecture)
    what = f"a million {unit} cost" if plan_costs.currency(outlook) else f"{unit} take at full power"
    found = titled(f"what {what}", _sheet(sheet))
    return found + indented(*(Text(f"by {basis}", DIM) for basis, _ in plan_costs.bases(outlook)))


def _load(outlook: Outlook) -> list[RenderableType]:
    """What requests wait for under the load, and what the servers do."""
    sheet, rate = plan_costs.loads(outlook), outlook.workload.rate
    if sheet is None or rate is None:
        return []
    found = titled(f"under {rate:g} requests/s, in a simulation of continuous batching", _sheet(sheet))
    return found + indented(*(Text(line, DIM) for line in (plan_costs.WAITS, *plan_costs.carried(outlook))))


def _compiling(runs: Sequence[PlannedRecipe]) -> list[RenderableType]:
    """What compiling takes, where it is known."""
    found = say.compiling(runs)
    if found is None:
        return []
    return titled("the compile itself", _sheet(found[0])) + indented(*(Text(line, DIM) for line in found[1]))


def _sheet(sheet: Sheet) -> RenderableType:
    return _table(sheet.head, ((Text(label, "cyan"), *cells) for label, *cells in sheet.rows))


def _single(outlook: Outlook, candidate: PlannedRecipe) -> list[RenderableType]:
    found: list[RenderableType] = []
    if candidate.memory is not None:
        found += indented(_parts(candidate.memory, decodes=outlook.architecture.kind == "decoder"))
    if candidate.rows and say.timed(outlook):
        found += titled(f"how long, {_lengths(outlook)}", _batches(outlook, candidate))
        names = plan_costs.head(outlook)
        lines = [[f"{row.batch:,}", *plan_costs.amounts(outlook, row)] for row in say.fitting(candidate)]
        found += _costs(outlook, Sheet(["batch", *names], lines) if names and lines else None)
    return found


def _parts(memory: PlannedMemory, *, decodes: bool) -> RenderableType:
    known = [(name, words.size(size)) for name, size in memory.parts.items() if size]
    if decodes:
        known.append(("a token of cache", words.size(memory.cache_per_token)))
        known.append(("largest context", say.largest(memory.largest_context, memory)))
    made = pairs(known)
    made.columns[1].justify = "right"
    return made


def _batches(outlook: Outlook, candidate: PlannedRecipe) -> RenderableType:
    """A line a batch; columns that nothing is in are left out."""
    step = say.step(outlook.architecture)
    columns: dict[str, list[str]] = {"batch": [f"{row.batch:,}" for row in candidate.rows]}
    for name, of in (("prefill", [row.prefill for row in candidate.rows]), (step, [r.step for r in candidate.rows])):
        columns[f"{name},\nat best"] = [say.bound(each) for each in of]
        columns[f"{name},\nforecast"] = [say.forecast(each) for each in of]
    columns[f"{step}\nlimit"] = [say.limit(row.step) for row in candidate.rows]
    rates = [say.rate(candidate, row, outlook.workload) for row in candidate.rows]
    columns[say.per_second(outlook).replace(" ", "\n", 1)] = [
        say.expected(each).partition(" ")[0] if each.forecast is not None else say.most(each) for each in rates
    ]
    columns["fits"] = [_FITS[row.fits][0].strip() for row in candidate.rows]
    kept = {name: cells for name, cells in columns.items() if any(cell not in ("", say.NONE) for cell in cells)}
    return _table(kept, zip(*kept.values(), strict=True))


def _said(outlook: Outlook) -> list[RenderableType]:
    """What times stand on, then what a reader must know of each candidate and of all."""
    found = indented(*(Text(f"{what}: {reason}", DIM) for what, reason in say.because(outlook.candidates)))
    several = len(outlook.candidates) > 1
    cautions = [
        f"{', '.join(labels)}: {text}" if several else text for text, labels in say.every_caution(outlook).items()
    ]
    return [*found, *map(marked, [*cautions, *plan_costs.warnings(outlook)])]


def _recommended(outlook: Outlook) -> list[RenderableType]:
    style = "bold green" if outlook.recommendation.label is not None else "bold red"
    found: list[RenderableType] = [Text(), Text.assemble(f"{say.standing(outlook)}: ", (say.answer(outlook), style))]
    found += indented(*(Text(f"· {reason}") for reason in say.reasons(outlook)))
    commands = say.confirm(outlook)
    if commands:
        about = f"only a measurement decides; on {outlook.target.name} this would confirm it:"
        found += indented(Text(about, DIM))
    return found + [copied(f"    {command}") for command in commands]


def _lengths(outlook: Outlook) -> str:
    work = outlook.workload
    if outlook.architecture.kind == "decoder":
        return f"prompts of {work.prompt:,}, a token more halfway through {work.output:,}"
    return f"sequences of {work.prompt:,}" if outlook.architecture.kind == "encoder" else "a whole image"


def _table(head: Iterable[str], rows: Iterable[Sequence[RenderableType]] = (), *, left: int = 1) -> Table:
    """Labels are wrapped, figures are not; columns close up where there are many."""
    head = list(head)
    return made_table(head, rows, left=left, gap=1 if len(head) > 6 else 2, fold=True)
