"""What a store has to say, for a terminal."""

from __future__ import annotations

import json
import shutil
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.nightly.gating.gate import Gated, count, title
from quantkit.nightly.store.parquet import Rows
from quantkit.nightly.store.records import Decision, Result, What
from quantkit.nightly.store.write import plain
from quantkit.report.kit import words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# rows that are shown; `--out` and `--json` have all
MOST = 100
_GAP = 2


def rows(found: Rows) -> list[RenderableType]:
    """A table; where it is wider than the terminal, each row as lines `column  value`."""
    from rich.table import Table
    from rich.text import Text

    cells = [[words.visible(_said(value)) for value in row] for row in found.rows[:MOST]]
    widths = [max(map(len, column)) for column in zip(found.columns, *cells, strict=True)]
    fits = sum(widths) + _GAP * len(widths) <= shutil.get_terminal_size().columns
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", show_header=fits)
    if fits:
        for name in found.columns:
            table.add_column(Text(name), no_wrap=True)
        for row in cells:
            table.add_row(*map(Text, row))
    else:
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for number, row in enumerate(cells):
            if number:
                table.add_row()
            for name, value in zip(found.columns, row, strict=True):
                table.add_row(Text(name), Text(value))
    count = words.plural(len(found.rows), "row")
    said = count if len(found.rows) <= MOST else f"the first {MOST} of {count}; --out FILE and --json have all"
    return [*([table] if found.rows else []), Text(said, "dim")]


def warnings(said: Sequence[str]) -> list[RenderableType]:
    """What a reader must know about an answer: what was passed over, what is odd."""
    from rich.text import Text

    return [Text.assemble(("! ", "bold yellow"), warning) for warning in said]


def night(found: Gated, results: Sequence[Result]) -> list[RenderableType]:
    """A row a cell: what was answered of each thing, and by how much. What all cells share is said once."""
    from rich.table import Table
    from rich.text import Text

    names = ("model", "recipe", "target", "runtime", "batch")
    parts = {name: [str(getattr(each, name)) for each in results] for name in names}
    apart = [name for name in names if len(set(parts[name])) > 1] or ["recipe"]
    shared = ", ".join(f"{name} {parts[name][0]}" for name in names if name not in apart)
    things = [what for what in typing.get_args(What) if any(each.what == what for each in found.decisions)]
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in (*apart, *things, "took"):
        table.add_column(name, justify="right" if name in ("batch", "took") else "left")
    answers = {(each.cell, each.what): each for each in found.decisions}
    for each in results:
        cells = [_answer(answers.get((each.cell, what)), found) for what in things]
        took = "–" if each.seconds is None else words.duration(each.seconds)
        table.add_row(*(str(getattr(each, name)) for name in apart), *cells, took)
    return [*([Text(shared, "dim")] if shared else []), table, Text("")]


def _answer(decision: Decision | None, found: Gated) -> Text:
    from rich.text import Text

    if decision is None:
        return Text("–")
    if found.is_first(decision):
        return Text("first")
    value = ""
    if decision.value is not None:
        value = f" {decision.value:+.4f}" if decision.what == "kl" else f" {decision.value:+.1%}"
    style = {"better": "green", "worse": "bold red", "failed": "bold red", "inconclusive": "yellow"}
    return Text(f"{decision.answer}{value}", style.get(decision.answer, ""))


def gated(found: Gated) -> list[RenderableType]:
    """A night at the gate: how many of what, and what is not fine."""
    from rich.padding import Padding
    from rich.text import Text

    mark, style = {0: ("✓", "green"), 1: ("✗", "bold red"), 3: ("?", "bold yellow")}[found.exit]
    lines: list[RenderableType] = [Text.assemble((f"{mark} ", style), (found.night.night, "bold"), f": {count(found)}")]
    for each in [*found.alarms, *found.open]:
        said = Text.assemble((each.answer, "bold"), f" {title(each)}: {words.visible(each.because)}")
        lines.append(Padding(said, (0, 0, 0, 2)))
    return lines


def _said(value: Any) -> str:
    if value is None:
        return "–"
    found = plain(value)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict | list) else str(value)
