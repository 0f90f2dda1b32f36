"""Markdown renderer, for model cards. Foreign names may occur anywhere, so every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quantkit.report.kit import tree
from quantkit.report.kit.tree import Line, On, Part

# characters with a meaning in Markdown; `&`, `<` and `>` are escaped as HTML
_SPECIAL = re.compile(r"([\\`*_#\[\]|~])")
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def card(parts: Iterable[Part], depth: int = 2) -> str:
    """Render parts with an empty line between them; `depth` is the level of the next heading."""
    return "\n\n".join(text for part in tree.only(parts, On.CARD) if (text := _part(part, depth)))


def document(whole: tree.Document) -> str:
    """Render a document, with its title on top."""
    about = [_line(line) for line in whole.about]
    return "\n\n".join([f"# {_line(whole.title, ())}", *about, card(whole.head), card(whole.parts)])


def escape(value: object) -> str:
    """Escape text for Markdown, on one line.

    >>> escape("a_b|<i>")
    'a\\\\_b\\\\|&lt;i&gt;'
    """
    text = on_one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", text)


def on_one_line(value: object) -> str:
    """Replace unprintable characters by spaces."""
    return _NOT_SHOWN.sub(" ", str(value))


def fenced(text: str, language: str = "") -> str:
    """Fence a code block with more backticks than any run in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _line(line: Line, bold: tuple[str, ...] = ("strong", "bad")) -> str:
    shown = []
    for text in tree.spans(line):
        strong = getattr(text, "tone", "") in bold
        href = getattr(text, "href", "")
        inner = f"[{escape(text)}]({href})" if href else escape(text)
        shown.append(f"**{inner}**" if strong else inner)
    return "".join(shown)


def _part(part: Part, depth: int) -> str:
    match part:
        case tree.Remark(text, "note"):
            return f"> **Note.** {_line(text)}."
        case tree.Remark(text, "caution"):
            return f"> **Beware,** {_line(text)}."
        case tree.Remark(text):
            return _line(text)
        case tree.Facts(rows):
            return _rows(["", ""], ["---", "---"], [[_line(label), _cell(value)] for label, value in rows])
        case tree.Sheet():
            names = len(part.head)
            rules = ["---:" if part.words <= i < names - part.remarks else "---" for i in range(names)]
            body = [[f"**{_cell(row[0])}**"] if len(row) == 1 else [*map(_cell, row)] for row in part.rows]
            body = [[*row, *[""] * (names - len(row))] for row in body]
            return _rows([escape(head.replace("\n", " ")) for head in part.head], rules, body)
        case tree.Exhibit():
            return card([tree.Remark(" ".join(part.sentences)), part.table], depth)
        case tree.Code(label, text, language):
            return "\n\n".join([*([f"**{escape(label)}**"] if label else []), fenced(text, language)])
        case tree.Tiles(tiles):
            return "\n".join(f"- {escape(tile.label)}: {escape(tile.value)}, {escape(tile.detail)}" for tile in tiles)
        case tree.Conclusion():
            label = f"**{escape(part.label).capitalize()}:** " if part.label else ""
            because = [f"- {escape(reason)}" for reason in part.because]
            return "\n".join([f"{label}{escape(part.answer)}{escape(part.aside)}.", *because])
        case tree.Section():
            title = f"{'#' * depth} {escape(part.title)}\n\n" if part.title else ""
            return f"{title}{card(part.parts, depth + 1)}"
    raise TypeError(type(part).__name__)


def _cell(value: tree.Cell) -> str:
    bold = ("bad",)  # not `strong`: a column of bold figures emphasizes nothing
    return "; ".join(_line(line, bold) for line in value) if isinstance(value, list) else _line(value, bold)


def _rows(head: list[str], rules: list[str], body: list[list[str]]) -> str:
    rows = ["".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *body)]
    return "\n".join(f"|{row}" for row in [rows[0], f"{'|'.join(rules)}|", *rows[1:]])
