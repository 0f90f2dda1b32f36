"""What screens are made of: tables, notes, lines to copy. Text from outside never passes through rich's markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from quantkit.errors import in_line, printable

# columns
_NARROWEST = 20
DIM, WARNING = "dim", "bold yellow"
# of what holds, what does not, and what was not judged
MARK = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("–", "yellow")}
# of what is good, bad or open
STYLES = {"good": "green", "bad": "bold red", "inconclusive": "yellow"}


def write(renderables: Iterable[RenderableType], file: IO[str]) -> None:
    """Print renderables: in colour on a terminal, plain elsewhere."""
    console = readable(Console(file=file, highlight=False, markup=False, emoji=False))
    with console.capture() as captured:
        for renderable in map(_in_line, renderables):
            # text that must not be wrapped is to be copied: it may run over the edge
            soft = isinstance(renderable, Text) and bool(renderable.no_wrap)
            options = console.options.update(no_wrap=True, overflow="ignore") if soft else console.options
            shown = (
                part if part.control else part._replace(text=printable(part.text))
                for part in console.render(renderable, options)
            )
            console.print(Segments(shown), soft_wrap=soft, end="")
    # tables fill their lines up with spaces
    file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().split("\n")[:-1]))


def readable(console: Console) -> Console:
    """The same, no narrower than can be read, whatever `COLUMNS` says; 0 says nothing."""
    if console.width < _NARROWEST:
        console.width = _NARROWEST if console.width > 0 else 80
    return console


def _in_line(shown: Any) -> Any:
    """Texts and cells in one line each, whatever somebody's name or note holds."""
    if isinstance(shown, Text) and "\n" in shown.plain:
        shown.plain = in_line(shown.plain)
    if isinstance(shown, Padding):
        _in_line(shown.renderable)
    if isinstance(shown, Group):
        for each in shown.renderables:
            _in_line(each)
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
    """A table without lines.

    Args:
        left: so many first columns are words.
        gap: spaces between columns.
        numbers: so many columns after those are numbers; None: all of them.
        whole: whether numbers are never broken.
        fold: what is too long goes on in the next line; else it is cut.
    """
    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style=DIM)
    for i, name in enumerate(head):
        number = i >= left and (numbers is None or i < left + numbers)
        made.add_column(name, justify="right" if number else "left", no_wrap=number and whole)
        made.columns[-1].overflow = "fold" if fold else "ellipsis"
    for row in rows:
        made.add_row(*map(_in_line, row))
    return made


def pairs(rows: Iterable[tuple[RenderableType, RenderableType]] = (), *, style: str = DIM) -> Table:
    """What is said, and of what."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style=style, no_wrap=True)
    made.add_column()
    for row in rows:
        made.add_row(*map(_in_line, row))
    return made


def grid(rows: Iterable[Sequence[RenderableType]], gap: int = 2) -> Table:
    """Cells without a head, or with `gap` 0 just lines."""
    made = Table.grid(padding=(0, gap, 0, 0))
    for row in rows:
        made.add_row(*map(_in_line, row))
    return made


def lines(texts: Iterable[RenderableType]) -> Table:
    """One under the other."""
    return grid(([text] for text in texts), 0)


def marked(text: str, mark: str = "!", style: str = WARNING) -> Table:
    """What a reader must know: its lines go on behind the mark."""
    return grid([(Text(mark, style), Text(text))], 1)


def indented(*shown: RenderableType, by: int = 2) -> list[RenderableType]:
    """Each below what it belongs to."""
    return [Padding(each, (0, 0, 0, by)) for each in shown]


def titled(title: str, *shown: RenderableType, by: int = 2) -> list[RenderableType]:
    """A line without words, a title, and what stands under it."""
    return [Text(), Text(title, "bold"), *indented(*shown, by=by)]


def copied(text: object) -> Text:
    """What is there to be copied, and never broken."""
    return Text(str(text), no_wrap=True)
