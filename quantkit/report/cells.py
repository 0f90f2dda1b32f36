"""The format-by-hardware matrix on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from quantkit.planning import matrix
from quantkit.report.kit.screen import DIM, table

_STYLES = {"native": "green", "emulated": "yellow", "absent": DIM}


def shown(found: Sequence[matrix.MatrixEntry]) -> list[RenderableType]:
    """The format-by-hardware matrix; of one target or format with the source of each cell."""
    names = matrix.columns(found)
    if len({each.target for each in found}) > 1 and len(names) > 3:
        rows = matrix.table(found)
        grid = table(["", *(name.replace(" KV cache", " cache") for name in names)], left=len(names) + 1, gap=1)
        grid.columns[0].min_width, grid.columns[0].no_wrap = max(map(len, rows)), True
        for target, row in rows.items():
            grid.add_row(Text(target, "cyan"), *(Text(row.get(name, "")) for name in names))
        return [grid, Text(matrix.legend(found), DIM)]
    lines = table(("target", "format", "runtime", "", "source"), left=5)
    for i in (0, 2, 3):
        lines.columns[i].no_wrap = True
    for each in sorted(found, key=lambda each: names.index(each.column)):
        state = f"{each.state}{', symmetric' if each.symmetric_only and each.state != 'absent' else ''}"
        cells = Text(each.column, "cyan"), each.runtime, Text(state, _STYLES[each.state]), Text(each.source, DIM)
        lines.add_row(each.target, *cells)
    return [lines]
