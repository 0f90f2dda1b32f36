"""What a store has to say, for a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.nightly._write import plain
from quantkit.nightly.gate import Gated, count, title
from quantkit.nightly.store import Rows
from quantkit.report import words

if TYPE_CHECKING:
    from rich.console import RenderableType

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
