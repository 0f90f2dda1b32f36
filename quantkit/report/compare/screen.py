"""Two versions of one model on one screen: the verdict, accuracy, flipped words, times, layers. B is set against A."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from quantkit.measurement.compared import Compared, LayerPair, WordFlip, WordFlips
from quantkit.report.compare import words as say
from quantkit.report.kit import words
from quantkit.report.kit.screen import DIM, copied, grid, indented, marked, table, titled

_STYLES = {"better": "green", "worse": "bold red", "same": "", "inconclusive": "yellow"}
_VERDICTS = {**dict.fromkeys(("A better", "mixed"), "bold red"), **dict.fromkeys(("B better", "same"), "green")}
# layers that a screen has
_LAYERS = 5


def terminal(data: Compared, page: Path | None = None) -> list[RenderableType]:
    """All of it on one screen, and where the page is."""
    sides = grid(
        (Text(letter, "bold"), Text(side.name), Text(say.about(side), DIM))
        for letter, side in (("A", data.a), ("B", data.b))
    )
    style = _VERDICTS.get(data.verdict, "yellow") if data.exit else "green"
    answer = Text.assemble(("verdict: ", DIM), (say.headline(data), style))
    found: list[RenderableType] = [Text(data.model, "bold"), *indented(sides), Text(), *indented(answer)]
    found += indented(*(marked(reason, "·", DIM) for reason in data.because), by=4)
    found += indented(*map(marked, data.notes))
    for heading, what in (("accuracy", ("accuracy",)), ("time and size", ("latency", "size"))):
        cells, about = say.group(data, what)
        if cells:
            found += [Text(), *indented(Text.assemble((heading, "bold"), (f"  {about}", DIM)))]
            sheet = say.sheet(cells, data.kind, margin=False)
            rows: list[list[RenderableType]] = [
                [*line[:-1], Text(line[-1], _STYLES[cell.answer])] for cell, line in zip(cells, sheet.rows, strict=True)
            ]
            found += indented(table([*sheet.head[:-1], ""], rows, numbers=2), by=4)
    found += _flips(data.flips) if data.flips is not None else []
    found += _layers(data.layers)
    return found if page is None else [*found, Text(), copied(f"  page: {page}")]


def _flips(flips: WordFlips) -> list[RenderableType]:
    found = titled("  flipped", Text(say.flipped(flips)), by=4)
    for side in ("A", "B"):
        those = [_flip(flip) for flip in flips.examples if flip.right == side]
        found += indented(Text(f"{side} alone is right", DIM), by=4) + indented(*those, by=6) if those else []
    return found


def _flip(flip: WordFlip) -> Text:
    """`… tasks of the [war]  A ·war 61 %, B ·day 22 %`; the text of a model never reaches the terminal as it is."""
    text = Text()
    if flip.before is not None and flip.follows is not None:
        text.append(f"… {words.visible(flip.before)}")
        text.append(f" [{words.visible(flip.follows)}]", "bold")
    else:
        text.append(f"sequence {flip.sequence}, position {flip.position}")
    for side, guess, chance in (("A", flip.a, flip.a_chance), ("B", flip.b, flip.b_chance)):
        text.append(f"  {side}: {words.visible(guess)} {words.percent(chance, 0)}", DIM)
    return text


def _layers(pairs: Sequence[LayerPair]) -> list[RenderableType]:
    if not pairs:
        return []
    found, moved = titled("  layers", *map(Text, say.layer_sentences(pairs)), by=4), say.worst(pairs)[:_LAYERS]
    if not moved:
        return found
    by_output = say.by_output(pairs)
    rows: list[list[RenderableType]] = []
    for pair in moved:
        errors = map(words.share, (pair.outputs if by_output else pair.errors) or ())
        stored = f"{say.format_of(pair.a)} → {say.format_of(pair.b)}" if pair.differs else ""
        rows.append([Text(pair.name), *errors, stored])
    head = (f"largest rises, {'outputs' if by_output else 'weights'}", "A", "B", "")
    return found + indented(table(head, rows, numbers=2, fold=True), by=4)
