"""What a store has to say, for a terminal."""

from __future__ import annotations

import json
import shutil
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.nightly.gating.gate import Gated, count, title
from quantkit.nightly.records import Result, StoredDecision, What
from quantkit.nightly.store import QueryRows, plain
from quantkit.report.kit import words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# rows that are shown; `--out` and `--json` have all
MOST = 100
_GAP = 2


def rows(found: QueryRows) -> list[RenderableType]:
    """A table; where it is wider than the terminal, each row as lines `column  value`."""
    from rich.text import Text

    from quantkit.report.kit.screen import pairs, table

    cells = [[words.visible(_said(value)) for value in row] for row in found.rows[:MOST]]
    widths = [max(map(len, column)) for column in zip(found.columns, *cells, strict=True)]
    fits = sum(widths) + _GAP * len(widths) <= shutil.get_terminal_size().columns
    shown: RenderableType
    if fits:
        shown = table([Text(name) for name in found.columns], (map(Text, row) for row in cells), left=len(widths))
    else:
        lines: list[tuple[Text, Text]] = []
        for row in cells:
            lines += [(Text(), Text())] if lines else []
            lines += [(Text(name), Text(value)) for name, value in zip(found.columns, row, strict=True)]
        shown = pairs(lines)
        shown.columns[1].overflow = "fold"
    count = words.plural(len(found.rows), "row")
    said = count if len(found.rows) <= MOST else f"the first {MOST} of {count}; --out FILE and --json have all"
    return [*([shown] if found.rows else []), Text(said, "dim")]


def warnings(said: Sequence[str]) -> list[RenderableType]:
    """What a reader must know about an answer: what was passed over, what is odd."""
    from rich.text import Text

    return [Text.assemble(("! ", "bold yellow"), warning) for warning in said]


def night(found: Gated, results: Sequence[Result]) -> list[RenderableType]:
    """A row a cell: what was answered of each thing, and by how much. What all cells share is said once."""
    from rich.text import Text

    from quantkit.report.kit.screen import table

    names = ("model", "recipe", "target", "runtime", "batch")
    parts = {name: [str(getattr(each, name)) for each in results] for name in names}
    apart = [name for name in names if len(set(parts[name])) > 1] or ["recipe"]
    shared = ", ".join(f"{name} {parts[name][0]}" for name in names if name not in apart)
    things = [what for what in typing.get_args(What) if any(each.what == what for each in found.decisions)]
    shown = table((*apart, *things, "took"), left=len(apart) + len(things), whole=False)
    if apart[-1] == "batch":
        shown.columns[len(apart) - 1].justify = "right"
    answers = {(each.cell, each.what): each for each in found.decisions}
    for each in results:
        cells = [_answer(answers.get((each.cell, what)), found) for what in things]
        took = "–" if each.seconds is None else words.duration(each.seconds)
        shown.add_row(*(str(getattr(each, name)) for name in apart), *cells, took)
    return [*([Text(shared, "dim")] if shared else []), shown, Text("")]


def _answer(decision: StoredDecision | None, found: Gated) -> Text:
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
    from rich.text import Text

    from quantkit.report.kit.screen import indented

    mark, style = {0: ("✓", "green"), 1: ("✗", "bold red"), 3: ("?", "bold yellow")}[found.exit]
    lines: list[RenderableType] = [Text.assemble((f"{mark} ", style), (found.night.night, "bold"), f": {count(found)}")]
    for each in [*found.alarms, *found.open]:
        said = Text.assemble((each.answer, "bold"), f" {title(each)}: {words.visible(each.because)}")
        lines += indented(said)
    return lines


def _said(value: Any) -> str:
    if value is None:
        return "–"
    found = plain(value)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict | list) else str(value)
