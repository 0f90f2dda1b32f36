"""A plan on a screen: does it fit, how long it takes, what it gives, which recipe, and what would confirm it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantkit.planning.outlook import Candidate, Memory, Outlook, Row
from quantkit.report.kit import words
from quantkit.report.kit.parts import Sheet
from quantkit.report.plan import costs as plan_costs
from quantkit.report.plan import words as say
from quantkit.report.plan.as_json import as_dict

__all__ = ["as_dict", "terminal"]

_DIM = "dim"
_FITS = {True: ("✓", "green"), False: ("✗", "bold red"), None: (" ", "")}
_STATES = {"native": "green", "emulated": "yellow", "absent": "bold red", "cannot run": "bold red"}


def terminal(outlook: Outlook, html: Path | None = None) -> list[RenderableType]:
    """All of it in 80 columns: candidates side by side; of a single one every batch, and what memory goes into."""
    shown: list[RenderableType] = [Text(), *_head(outlook)]
    runs = [each for each in outlook.candidates if each.problem is None]
    if runs:
        shown += _section(_fit_title(outlook), _fit(outlook))
        if len(runs) == 1:
            shown += _single(outlook, runs[0])
        elif say.timed(outlook):
            shown += _section(f"how long, {_lengths(outlook)}", _times(outlook, runs))
            shown += _section(
                f"what it gives, at the batch that gives the most{_that_fit(runs)}", _rates(outlook, runs)
            )
            shown += _costs(outlook, plan_costs.costs(outlook))
        shown += [*_load(outlook), *_compiling(runs), Text()]
        shown += [_indented(Text(say.legend(outlook), _DIM))] if say.legend(outlook) else []
    shown += _said(outlook)
    shown += _recommended(outlook)
    shown += [Text(), Text(f"  {html}", no_wrap=True)] if html is not None else []
    return shown


def rehearsed(block: str, seconds: float, findings: Sequence[tuple[str, bool]]) -> list[RenderableType]:
    """What a rehearsal found: (line, whether the compile would end with it)."""
    what = f"rehearsed on {block} in {words.duration(seconds)}" if block else "rehearsed; no block was run"
    if not findings:
        return [Text(f"{what}: nothing that would fail was found")]
    shown: list[RenderableType] = [Text(f"{what}:")]
    for line, fails in findings:
        mark = Text("✗ " if fails else "! ", "bold red" if fails else "yellow")
        shown.append(Padding(mark + Text(line), (0, 0, 0, 2)))
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
    found += [_indented(Text(f"assumed: {'; '.join(assumed)}", _DIM))] if assumed else []
    return found + [_marked(note) for note in others]


def _fit_title(outlook: Outlook) -> str:
    work = outlook.workload
    tokens = f", {work.context:,} tokens each" if outlook.architecture.kind == "decoder" else ""
    return f"does it fit, at the largest batch asked for that does{tokens}"


def _fit(outlook: Outlook) -> Table:
    head = ("recipe", "runtime", "stored", "bits", "weights", "batch", "takes", "of", "largest\nbatch")
    table = _table(head, left=3, tight=True)
    for each in outlook.candidates:
        state = say.state(each)
        cells: list[RenderableType] = [
            Text(each.label, "cyan"),
            each.runtime or say.NONE,
            Text(state, _STATES.get(state, "")),
        ]
        memory = each.memory
        if memory is None:
            table.add_row(*cells)
            continue
        mark, style = _FITS[say.fits(memory)]
        table.add_row(
            *cells,
            words.or_dash(each.bits, lambda bits: words.figure(bits, 3)),
            words.size(each.bytes),
            f"{memory.batch:,}",
            Text.assemble((f"{mark} ", style), say.takes(memory)),
            words.or_dash(memory.capacity, words.size),
            say.largest(memory.largest_batch, memory),
        )
    return table


def _times(outlook: Outlook, runs: Sequence[Candidate]) -> Table:
    step, batches = say.step(outlook.architecture), _ends(outlook.workload.batches)
    first = [f"first token,\nbatch {batches[0]:,}"] if any(row.prefill for each in runs for row in each.rows) else []
    table = _table(["recipe", *first, *(f"{step},\nbatch {batch:,}" for batch in batches)])
    for each in runs:
        rows = {row.batch: row for row in each.rows}
        cells = [_time(rows.get(batches[0]), prefill=True)] if first else []
        cells += [_time(rows.get(batch)) for batch in batches]
        table.add_row(Text(each.label, "cyan") + Text(say.several(each), _DIM), *cells)
    return table


def _time(row: Row | None, *, prefill: bool = False) -> Text:
    if row is None:
        return Text(say.NONE)
    return (
        Text(say.time(row.prefill if prefill else row.step)) if row.fits is not False else Text("does not fit", "red")
    )


def _rates(outlook: Outlook, runs: Sequence[Candidate]) -> Table:
    table = _table(["recipe", say.per_second(outlook), "at batch"])
    for each in runs:
        found = say.best(each, outlook.workload)
        cells = [say.given(found[1]), f"{found[0].batch:,}"] if found is not None else [say.NONE, ""]
        table.add_row(Text(each.label, "cyan"), *cells)
    return table


def _costs(outlook: Outlook, sheet: Sheet | None) -> list[RenderableType]:
    """What tokens cost and take, by the cheapest way that the prices know."""
    if sheet is None:
        return []
    unit = say.unit(outlook.architecture)
    what = f"a million {unit} cost" if plan_costs.currency(outlook) else f"{unit} take at full power"
    found = _section(f"what {what}", _sheet(sheet))
    return found + [_indented(Text(f"by {basis}", _DIM)) for basis, _ in plan_costs.bases(outlook)]


def _load(outlook: Outlook) -> list[RenderableType]:
    """What requests wait for under the load, and what the servers do."""
    sheet, rate = plan_costs.loads(outlook), outlook.workload.rate
    if sheet is None or rate is None:
        return []
    found = _section(f"under {rate:g} requests/s, in a simulation of continuous batching", _sheet(sheet))
    return found + [_indented(Text(line, _DIM)) for line in (plan_costs.WAITS, *plan_costs.carried(outlook))]


def _compiling(runs: Sequence[Candidate]) -> list[RenderableType]:
    """What compiling takes, where it is known."""
    found = say.compiling(runs)
    if found is None:
        return []
    return _section("the compile itself", _sheet(found[0])) + [_indented(Text(line, _DIM)) for line in found[1]]


def _sheet(sheet: Sheet) -> Table:
    table = _table(sheet.head, tight=len(sheet.head) > 6)
    for label, *cells in sheet.rows:
        table.add_row(Text(label, "cyan"), *cells)
    return table


def _single(outlook: Outlook, candidate: Candidate) -> list[RenderableType]:
    found: list[RenderableType] = []
    if candidate.memory is not None:
        found.append(_indented(_parts(candidate.memory, decodes=outlook.architecture.kind == "decoder")))
    if candidate.rows:
        found += _section(f"how long, {_lengths(outlook)}", _batches(outlook, candidate))
        names = plan_costs.head(outlook)
        lines = [[f"{row.batch:,}", *plan_costs.amounts(outlook, row)] for row in say.fitting(candidate)]
        found += _costs(outlook, Sheet(["batch", *names], lines) if names and lines else None)
    return found


def _parts(memory: Memory, *, decodes: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for name, size in ((name, size) for name, size in memory.parts.items() if size):
        table.add_row(Text(name, _DIM), words.size(size))
    if decodes:
        table.add_row(Text("a token of cache", _DIM), words.size(memory.cache_per_token))
        table.add_row(Text("largest context", _DIM), say.largest(memory.largest_context, memory))
    return table


def _batches(outlook: Outlook, candidate: Candidate) -> Table:
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
    table = _table(kept, tight=len(kept) > 6)
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*cells)
    return table


def _said(outlook: Outlook) -> list[RenderableType]:
    """What times stand on, then what a reader must know of each candidate and of all."""
    found: list[RenderableType] = [
        _indented(Text(f"{what}: {reason}", _DIM)) for what, reason in say.because(outlook.candidates)
    ]
    found += [
        _marked(f"{', '.join(labels)}: {text}" if len(outlook.candidates) > 1 else text)
        for text, labels in say.every_caution(outlook).items()
    ]
    return found + [_marked(text) for text in plan_costs.warnings(outlook)]


def _recommended(outlook: Outlook) -> list[RenderableType]:
    good = outlook.recommendation.label is not None
    found: list[RenderableType] = [
        Text(),
        Text.assemble(f"{say.standing(outlook)}: ", (say.answer(outlook), "bold green" if good else "bold red")),
    ]
    found += [_indented(Text(f"· {reason}")) for reason in outlook.recommendation.because]
    chosen = [each for each in outlook.candidates if each.label == outlook.recommendation.label]
    found += [_indented(Text(f"· {text}")) for each in chosen for text in plan_costs.even(each)]
    commands = say.confirm(outlook)
    if commands:
        found.append(
            _indented(Text(f"only a measurement decides; on {outlook.target.name} this would confirm it:", _DIM))
        )
        found += [Text(f"    {command}", no_wrap=True) for command in commands]
    return found


def _lengths(outlook: Outlook) -> str:
    work = outlook.workload
    if outlook.architecture.kind == "decoder":
        return f"prompts of {work.prompt:,}, a token more halfway through {work.output:,}"
    return f"sequences of {work.prompt:,}" if outlook.architecture.kind == "encoder" else "a whole image"


def _that_fit(runs: Sequence[Candidate]) -> str:
    return " of those that fit" if any(row.fits is False for each in runs for row in each.rows) else ""


def _ends(batches: Sequence[int]) -> list[int]:
    """The first and the last, once where they are one."""
    return list(dict.fromkeys((batches[0], batches[-1])))


def _section(title: str, table: Table) -> list[RenderableType]:
    return [Text(), Text(title, "bold"), _indented(table)]


def _table(head: Iterable[str], *, left: int = 1, tight: bool = False) -> Table:
    table = Table(box=None, padding=(0, 1 if tight else 2, 0, 0), pad_edge=False, header_style=_DIM)
    for i, name in enumerate(head):
        # labels are wrapped, figures are not
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left)
    return table


def _marked(text: str) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text("!", "bold yellow"), Text(text))
    return table


def _indented(shown: RenderableType) -> Padding:
    return Padding(shown, (0, 0, 0, 2))
