"""Two versions of one model on one screen: the verdict, accuracy, flipped words, times, layers. B is set against A."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantkit.measurement.compared import Cell, Compared, Flip, Flips, LayerPair, Named
from quantkit.report.compare import words as say
from quantkit.report.kit import words

_DIM = "dim"
_STYLES = {"better": "green", "worse": "bold red", "same": "", "inconclusive": "yellow"}
_VERDICTS = {
    "A better": "bold red",
    "B better": "green",
    "same": "green",
    "mixed": "bold red",
    "inconclusive": "yellow",
}
# layers that a screen has
_LAYERS = 5


def terminal(data: Compared, page: Path | None = None) -> list[RenderableType]:
    """All of it on one screen, and where the page is."""
    answer = Text.assemble(("verdict: ", _DIM), (data.verdict, _VERDICTS[data.verdict]))
    found: list[RenderableType] = [Text(data.model, "bold"), Padding(_sides(data.a, data.b), (0, 0, 0, 2))]
    found += [Text(), Padding(answer, (0, 0, 0, 2))]
    found += [Padding(_marked("·", _DIM, reason), (0, 0, 0, 4)) for reason in data.because]
    found += [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in data.notes]
    for heading, what in (("accuracy", ("accuracy",)), ("time and size", ("latency", "size"))):
        cells, about = say.group(data, what)
        if cells:
            found += [Text(), Padding(Text.assemble((heading, "bold"), (f"  {about}", _DIM)), (0, 0, 0, 2))]
            found.append(Padding(_table(cells, data.kind), (0, 0, 0, 4)))
    found += _flips(data.flips) if data.flips is not None else []
    found += _layers(data.layers)
    return found if page is None else [*found, Text(), Text(f"  page: {page}")]


def _sides(a: Named, b: Named) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for letter, side in (("A", a), ("B", b)):
        table.add_row(Text(letter, "bold"), Text(side.name), Text(say.about(side), _DIM))
    return table


def _table(cells: Sequence[Cell], kind: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("")
    for name in ("A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("B against A")
    table.add_column("")
    title = say.titles(cells, kind)
    for cell in cells:
        table.add_row(
            title(cell),
            *("–" if value is None else say.value(cell, value) for value in (cell.a, cell.b)),
            say.difference(cell, margin=False),
            Text(say.answered(cell), _STYLES[cell.answer]),
        )
    return table


def _flips(flips: Flips) -> list[RenderableType]:
    found: list[RenderableType] = [Text(), Text("  flipped", "bold"), Padding(Text(say.flipped(flips)), (0, 0, 0, 4))]
    for side in ("A", "B"):
        those = [flip for flip in flips.examples if flip.right == side]
        if those:
            found.append(Padding(Text(f"{side} alone is right", _DIM), (0, 0, 0, 4)))
            found += [Padding(_flip(flip), (0, 0, 0, 6)) for flip in those]
    return found


def _flip(flip: Flip) -> Text:
    """`… tasks of the [war]  A ·war 61 %, B ·day 22 %`; the text of a model never reaches the terminal as it is."""
    text = Text()
    if flip.before is not None and flip.follows is not None:
        text.append(f"… {words.visible(flip.before)}")
        text.append(f" [{words.visible(flip.follows)}]", "bold")
    else:
        text.append(f"sequence {flip.sequence}, position {flip.position}")
    for side, guess, chance in (("A", flip.a, flip.a_chance), ("B", flip.b, flip.b_chance)):
        text.append(f"  {side}: {words.visible(guess)} {words.percent(chance, 0)}", _DIM)
    return text


def _layers(pairs: Sequence[LayerPair]) -> list[RenderableType]:
    if not pairs:
        return []
    found: list[RenderableType] = [Text(), Text("  layers", "bold")]
    found += [Padding(Text(line), (0, 0, 0, 4)) for line in say.layer_sentences(pairs)]
    moved = say.worst(pairs)[:_LAYERS]
    if not moved:
        return found
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    by_output = say.by_output(pairs)
    table.add_column(f"largest rises, {'outputs' if by_output else 'weights'}", overflow="fold")
    for name in ("A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for pair in moved:
        shown = [words.share(error) for error in (pair.outputs if by_output else pair.errors) or ()]
        table.add_row(
            Text(pair.name), *shown, f"{say.format_of(pair.a)} → {say.format_of(pair.b)}" if pair.differs else ""
        )
    return [*found, Padding(table, (0, 0, 0, 4))]


def _marked(mark: str, style: str, text: str) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text(mark, style), Text(text))
    return table
