"""Tree of a report, as plain data: built once from a result, rendered by `screen`, `html` and `markdown`.

A text may have a tone and a link. A part may be limited to some renderers with `on`: a telephone has no room for
seventeen columns, and a page needs no command to open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Literal

from quantkit.report.kit.charts import Plot


class On(Flag):
    """Renderers that show a part."""

    SCREEN = auto()
    PAGE = auto()
    CARD = auto()
    ALL = SCREEN | PAGE | CARD


class Styled(str):
    """A text with a tone (`good`, `bad`, `open`, `inconclusive`, `dim`, `strong`, `name`), linked on a page."""

    tone: str
    href: str

    def __new__(cls, text: object, tone: str = "", href: str = "") -> Styled:
        """Style a text."""
        styled = super().__new__(cls, text)
        styled.tone, styled.href = tone, href
        return styled


# a tuple is one line, a list is several lines
Line = str | tuple[str, ...]
Cell = Line | list[Line] | list[str]
Kind = Literal["text", "note", "caution", "caption", "reason"]
# marks for passed, failed and not judged
MARK = {True: Styled("✓", "good"), False: Styled("✗", "bad"), None: Styled("–", "inconclusive")}


def spans(line: Line) -> tuple[str, ...]:
    """Return the texts of a line."""
    return (line,) if isinstance(line, str) else line


class Part:
    """Part of a report; `on` names the renderers that show it."""

    on: On


@dataclass(frozen=True)
class Remark(Part):
    """Line of text; a `note` is important for the reader, a `caution` limits the trust in a figure."""

    text: Line
    kind: Kind = "text"
    on: On = On.ALL


@dataclass(frozen=True)
class Facts(Part):
    """Labels with their values, of one line or several."""

    rows: Sequence[tuple[Line, Cell]]
    title: str = ""
    on: On = On.ALL


@dataclass(frozen=True)
class Sheet(Part):
    """Table of texts.

    Args:
        head: names of the columns; a screen breaks them at newlines.
        remarks: number of trailing columns with words.
        words: number of leading columns with words; the others are numbers.
        title: title for screen readers, and summary of a folded table.
        folded: True if a page hides the table until it is opened.
        stacked: True if a narrow page shows each row as lines.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    remarks: int = 0
    words: int = 1
    title: str = ""
    folded: bool = False
    stacked: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class Exhibit(Part):
    """Charts that belong together, with their data.

    Args:
        sentences: results, one sentence each.
        captions: method of measurement, one sentence each; a page folds them together with the data.
        table: the data.
        cautions: limits to the trust in the figures.
        keys: (colour of the page, its meaning).
        folded: True if a page hides the charts until they are opened.
    """

    sentences: Sequence[str]
    charts: Sequence[Plot]
    captions: Sequence[str]
    table: Sheet
    cautions: Sequence[str] = ()
    keys: Sequence[tuple[str, str]] = ()
    title: str = ""
    folded: bool = False
    on: On = On.PAGE


@dataclass(frozen=True)
class Code(Part):
    """Text to copy; a label without a text is a line above the next part."""

    label: str
    text: str
    language: str = "bash"
    folded: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class FigureTile:
    """Large number with its label and detail; `tone` is `bad` for a loss.

    An undecided result has the tone `inconclusive` and words for a value: a large number would be remembered.
    """

    value: str
    label: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class Tiles(Part):
    """Large numbers, side by side."""

    tiles: Sequence[FigureTile]
    on: On = On.PAGE


@dataclass(frozen=True)
class Conclusion(Part):
    """Answer of a report, without a final period, with a tone and reasons.

    Args:
        label: label before the answer, on a screen and a card.
        aside: text after the answer.
        commands: commands that would confirm or decide it.
    """

    answer: str
    tone: str
    because: Sequence[str] = ()
    label: str = ""
    aside: str = ""
    commands: Sequence[Code] = ()
    on: On = On.ALL


@dataclass(frozen=True)
class Section(Part):
    """Parts under a title.

    Args:
        place: anchor of a chapter, for the links at the head of the page; empty inside a chapter.
        folded: True if a page hides the section until it is opened.
        tab: True for one of several tabs.
    """

    title: str
    parts: Sequence[Part]
    place: str = ""
    folded: bool = False
    tab: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class Document(Part):
    """Whole report of one result.

    Args:
        about: description of the subject, a line each.
        head: answer and important notes, on top.
        parts: chapters.
        facts: origin of the result.
        footer: text at the foot of a page.
        provenance: parts below the facts.
    """

    title: Line
    about: Sequence[Line]
    head: Sequence[Part]
    parts: Sequence[Part]
    facts: Sequence[tuple[str, str]] = ()
    footer: str = ""
    provenance: Sequence[Part] = ()
    on: On = On.ALL


def only(parts: Iterable[Part], on: On) -> list[Part]:
    """Keep the parts for a renderer; drop sections without any."""
    kept = (part for part in parts if part.on & on)
    return [part for part in kept if not isinstance(part, Section) or only(part.parts, on)]
