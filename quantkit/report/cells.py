"""The format-by-hardware matrix on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from quantkit.planning import matrix

DIM = "dim"


def shown(found: Sequence[matrix.MatrixEntry]) -> list[RenderableType]:
    """The format-by-hardware matrix; of one target or format with the source of each cell."""
    names = matrix.columns(found)
    if len({each.target for each in found}) > 1 and len(names) > 3:
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=DIM)
        rows = matrix.table(found)
        grid.add_column(min_width=max(map(len, rows)), no_wrap=True)
        for name in names:
            grid.add_column(name.replace(" KV cache", " cache"))
        for target, row in rows.items():
            grid.add_row(Text(target, "cyan"), *(Text(row.get(name, "")) for name in names))
        return [grid, Text(matrix.legend(found), DIM)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=DIM)
    for name in ("target", "format", "runtime", "", "source"):
        table.add_column(name, no_wrap=name in ("target", "runtime", ""))
    for each in sorted(found, key=lambda each: names.index(each.column)):
        state = f"{each.state}{', symmetric' if each.symmetric_only and each.state != 'absent' else ''}"
        style = {"native": "green", "emulated": "yellow", "absent": DIM}[each.state]
        table.add_row(each.target, Text(each.column, "cyan"), each.runtime, Text(state, style), Text(each.source, DIM))
    return [table]
