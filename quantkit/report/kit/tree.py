"""What people read, as a tree of plain data: made once from a result, shown by `screen`, `html` and `markdown`.

A text may have a tone and a link. What only some of the renderers show says so with `on`: a telephone has no room for
seventeen columns, and a page needs no command that opens it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Literal

from quantkit.report.kit.charts import Plot


class On(Flag):
    """The renderers that show a part."""

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
        made = super().__new__(cls, text)
        made.tone, made.href = tone, href
        return made


# a tuple is read as one line, a list as several
Line = str | tuple[str, ...]
Cell = Line | list[Line] | list[str]
Kind = Literal["text", "note", "caution", "caption", "reason"]
# of what holds, what does not, and what was not judged
MARK = {True: Styled("✓", "good"), False: Styled("✗", "bad"), None: Styled("–", "inconclusive")}


def spans(line: Line) -> tuple[str, ...]:
    """Split a line into its texts."""
    return (line,) if isinstance(line, str) else line


class Part:
    """Part of a tree; `on` are the renderers that show it."""

    on: On


@dataclass(frozen=True)
class Remark(Part):
    """A line; of kind `note` what a reader must know, `caution` what to know before trusting a figure."""

    text: Line
    kind: Kind = "text"
    on: On = On.ALL


@dataclass(frozen=True)
class Facts(Part):
    """Labels, and what is known of each: one line or several."""

    rows: Sequence[tuple[Line, Cell]]
    title: str = ""
    on: On = On.ALL


@dataclass(frozen=True)
class Sheet(Part):
    """Rows of text.

    Args:
        head: names of the columns; a screen breaks them at newlines.
        remarks: how many of the last columns are words.
        words: how many of the first columns are; the others are numbers.
        title: for those who cannot see it; summary of a folded table.
        folded: whether a page shows it only when it is asked for.
        stacked: whether a narrow page shows each row as lines.
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
    """Charts that belong together.

    Args:
        said: what they show, a sentence each.
        captions: how it was measured, a sentence each; folded, with the data.
        table: the data.
        cautions: what to know before trusting them.
        keys: (colour of the page, what it stands for).
        folded: whether the figures are shown only when they are asked for.
    """

    said: Sequence[str]
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
    """What is there to be copied; a label without a text is a line over what follows."""

    label: str
    text: str
    language: str = "bash"
    folded: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class FigureTile:
    """A number that a reader remembers, what it is, and how sure it is; `tone` is `bad` for a loss.

    What was not decided has the tone `inconclusive` and no number for a value: a large one would be remembered.
    """

    value: str
    label: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class Tiles(Part):
    """Numbers to remember, side by side."""

    tiles: Sequence[FigureTile]
    on: On = On.PAGE


@dataclass(frozen=True)
class Conclusion(Part):
    """What follows from it all: the answer, without a period, in a tone, and its reasons.

    Args:
        label: in front of the answer on a screen and a card.
        aside: behind the answer.
        commands: what would confirm or decide it.
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
        place: name of a chapter of a page, which its head links to; empty for a part of a chapter.
        folded: whether a page shows it only when it is asked for.
        tab: whether it is one of several of which a page shows one at a time.
    """

    title: str
    parts: Sequence[Part]
    place: str = ""
    folded: bool = False
    tab: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class Document(Part):
    """All that a command has to say of one result.

    Args:
        about: what it is about, a line each.
        head: the answer and what a reader must know, over everything else.
        parts: the chapters.
        facts: where it is from.
        made: by what it was made, for the foot of a page.
        provenance: what stands below the facts.
    """

    title: Line
    about: Sequence[Line]
    head: Sequence[Part]
    parts: Sequence[Part]
    facts: Sequence[tuple[str, str]] = ()
    made: str = ""
    provenance: Sequence[Part] = ()
    on: On = On.ALL


def only(parts: Iterable[Part], on: On) -> list[Part]:
    """Drop parts of other renderers, and empty sections."""
    kept = (part for part in parts if part.on & on)
    return [part for part in kept if not isinstance(part, Section) or only(part.parts, on)]
