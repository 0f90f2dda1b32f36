"""Terminal renderer: turns a tree into lines and tables. Foreign text is never parsed as rich's markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from quantkit.errors import in_line, printable
from quantkit.report.kit import tree
from quantkit.report.kit.tree import Line, On, Part

# columns
_NARROWEST = 20
DIM, WARNING = "dim", "bold yellow"
# styles of tones
STYLES = {"good": "green", "bad": "bold red", "inconclusive": "yellow"}
_TONES = {**STYLES, "open": "bold", "dim": DIM, "strong": "bold", "name": "cyan", "warning": WARNING}
_KINDS = {"note": ("!", WARNING), "caution": ("!", WARNING), "reason": ("·", DIM)}


def write(renderables: Iterable[RenderableType | Part], file: IO[str]) -> None:
    """Print parts or renderables: in colour on a terminal, plain elsewhere."""
    console = readable(Console(file=file, highlight=False, markup=False, emoji=False))
    with console.capture() as captured:
        for renderable in map(_in_line, shown(renderables)):
            # text to copy is never wrapped: it may exceed the width
            soft = isinstance(renderable, Text) and bool(renderable.no_wrap)
            options = console.options.update(no_wrap=True, overflow="ignore") if soft else console.options
            segments = (
                part if part.control else part._replace(text=printable(part.text))
                for part in console.render(renderable, options)
            )
            console.print(Segments(segments), soft_wrap=soft, end="")
    # tables pad their lines with spaces
    file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().split("\n")[:-1]))


def shown(parts: Iterable[RenderableType | Part], by: int = 0) -> list[RenderableType]:
    """Render parts, indented by `by` columns; rich renderables stay as they are."""
    rendered: list[RenderableType] = []
    for part in parts:
        if isinstance(part, tree.Document):
            rendered += [Text(), styled(part.title), *(styled(line) for line in part.about)]
            rendered += shown([*part.head, *part.parts], by + 2)
        elif not isinstance(part, Part):
            rendered.append(part)
        elif tree.only([part], On.SCREEN):
            rendered += _part(part, by)
    return rendered


def styled(line: Line, style: str = "") -> Text:
    """Style a line by the tones of its texts."""
    return Text.assemble(*((in_line(text), _TONES.get(getattr(text, "tone", ""), style)) for text in tree.spans(line)))


def _part(part: Part, by: int) -> list[RenderableType]:
    match part:
        case tree.Remark(text, kind):
            if kind in _KINDS:
                mark, style = _KINDS[kind]
                return indented(grid([(Text(mark, style), styled(text))], 1), by=by)
            return indented(styled(text, DIM if kind == "caption" else ""), by=by)
        case tree.Facts(rows, title):
            head = [Text(), *indented(Text(title, "bold"), by=by)] if title else []
            return [*head, *indented(pairs((styled(label), _cell(value)) for label, value in rows), by=by)]
        case tree.Sheet():
            # labels are wrapped, numbers are not; many columns have less space between them
            gap, whole = (1, False) if len(part.head) > 6 else (2, True)
            numbers = max(len(part.head) - part.words - part.remarks, 0)
            cells = (map(_cell, row) for row in part.rows)
            sheet = table(part.head, cells, left=part.words, gap=gap, numbers=numbers, whole=whole, fold=True)
            return indented(_Stacked(sheet, part) if part.stacked else sheet, by=by)
        case tree.Exhibit():
            cautions = (tree.Remark(text, "caution") for text in part.cautions)
            parts = [tree.Remark(" ".join(part.sentences)), part.table, *cautions]
            return shown([tree.Section(part.title, parts)] if part.title else parts, by)
        case tree.Code(label, text):
            head = indented(Text(label, DIM), by=by) if label else []
            return [*head, *(copied(f"{' ' * by}{line}") for line in text.splitlines())]
        case tree.Tiles(tiles):
            return shown([tree.Facts([(tile.label, f"{tile.value}, {tile.detail}") for tile in tiles])], by)
        case tree.Conclusion():
            style = f"bold {STYLES.get(part.tone, '')}".strip() if part.tone else ""
            before = (f"{part.label}: ", DIM) if part.label else ""
            line = Text.assemble(before, (part.answer, style), "" if part.label else part.aside)
            reasons = [tree.Remark(reason, "reason") for reason in part.because]
            return [*indented(line, by=by), *shown([*reasons, *part.commands], by + 2)]
        case tree.Section():
            over = indented(Text(part.title, "bold"), by=by) if part.title else []
            return [Text(), *over, *shown(part.parts, by + 2 if part.title else by)]
    raise TypeError(type(part).__name__)


@dataclass(frozen=True)
class _Stacked:
    """A table; where it would break words, its rows as lines, each with the name of its column."""

    whole: Table
    part: tree.Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.measure(self.whole, options=options.update(max_width=1000)).minimum <= options.max_width:
            yield self.whole
            return
        for first, *others in self.part.rows:
            yield _cell(first)
            known = ((Text(name), _cell(cell)) for name, cell in zip(self.part.head[1:], others, strict=True) if cell)
            yield from indented(pairs(known))


def _cell(value: tree.Cell) -> RenderableType:
    return grid(([styled(line)] for line in value), 0) if isinstance(value, list) else styled(value)


def readable(console: Console) -> Console:
    """Set a console's least width, whatever `COLUMNS` is; 80 if it is 0."""
    if console.width < _NARROWEST:
        console.width = _NARROWEST if console.width > 0 else 80
    return console


def _in_line(shown: Any) -> Any:
    """Replace line breaks in texts and cells, which may come from foreign names."""
    if isinstance(shown, Text) and "\n" in shown.plain:
        shown.plain = in_line(shown.plain)
    if isinstance(shown, Padding):
        _in_line(shown.renderable)
    return in_line(shown) if isinstance(shown, str) else shown


def table(
    head: Iterable[str | Text],
    rows: Iterable[Iterable[RenderableType]] = (),
    *,
    left: int = 1,
    gap: int = 2,
    numbers: int | None = None,
    whole: bool = True,
    fold: bool = False,
) -> Table:
    """Make a table without lines.

    Args:
        left: number of leading columns with words.
        gap: spaces between columns.
        numbers: number of columns with numbers after those; None for all others.
        whole: True to never break a number.
        fold: True to continue a long text in the next line; else it is cut.
    """
    result = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style=DIM)
    for i, name in enumerate(head):
        number = i >= left and (numbers is None or i < left + numbers)
        result.add_column(name, justify="right" if number else "left", no_wrap=number and whole)
        result.columns[-1].overflow = "fold" if fold else "ellipsis"
    for row in rows:
        result.add_row(*map(_in_line, row))
    return result


def pairs(rows: Iterable[tuple[RenderableType, RenderableType]] = ()) -> Table:
    """Lay out labels beside their values."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_column(style=DIM, no_wrap=True)
    for row in rows:
        result.add_row(*map(_in_line, row))
    return result


def grid(rows: Iterable[Sequence[RenderableType]], gap: int = 2) -> Table:
    """Lay out cells without a head."""
    result = Table.grid(padding=(0, gap, 0, 0))
    for row in rows:
        result.add_row(*map(_in_line, row))
    return result


def indented(*shown: RenderableType, by: int = 2) -> list[RenderableType]:
    """Indent parts below their heading."""
    return [Padding(renderable, (0, 0, 0, by)) for renderable in shown]


def copied(text: object) -> Text:
    """Mark text to copy; it is never wrapped."""
    return Text(str(text), no_wrap=True)
