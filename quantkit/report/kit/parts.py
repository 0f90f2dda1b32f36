"""What pages are made of: figures that belong together, what they show in words, and their data as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.report.kit.charts import Figure


@dataclass(frozen=True)
class Sheet:
    """The data behind figures: a head, rows of text, and how many of the last columns are words, not numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: int = 0


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
class Panel:
    """One figure with its title, and what it shows for those who cannot see it."""

    title: str
    alt: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Figures that belong together.

    Args:
        said: what they show, a sentence each.
        panels: the figures.
        captions: how it was measured, a sentence each; folded, with the data.
        sheet: the data.
        cautions: what to know before trusting them.
        keys: (colour of the page, what it stands for).
        title: over them; empty where the page has said it.
        folded: whether the figures are shown only when they are asked for.
    """

    said: Sequence[str]
    panels: Sequence[Panel]
    captions: Sequence[str]
    sheet: Sheet
    cautions: Sequence[str] = ()
    keys: Sequence[tuple[str, str]] = ()
    title: str = ""
    folded: bool = False
