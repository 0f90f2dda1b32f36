"""Section of a bundle's report about tasks: scores, recovery and flips, beside the original."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.rows import Row
from quantkit.report.kit import words
from quantkit.report.kit.tree import Part, Remark, Sheet

_FIGURES = ("recovery", "95 % interval", "lost, gained", "p", "items", "items for\n1 point")


def parts(rows: Sequence[Row], other: str = "the original", this: str = "this model") -> list[Part]:
    """Build the section of two named sides; nothing without rows of tasks."""
    head = ("task", other, this, *_FIGURES)
    scored = [row for row in rows if row.name == "task.score" and row.value is not None and row.baseline is not None]
    open_ = [row for row in rows if row.name == "task.departs" and row.value is not None]
    if not scored:
        return _departures(open_)
    own = [row for row in scored if not row.settings.get("floor")]
    floor = [row for row in scored if row.settings.get("floor")]
    text = f"Both answered the same items. Recovery is the score over that of {other}. Lost and gained are items that "
    text += (
        "one side alone has right, with McNemar's exact test. The last column counts the items that would show a loss "
    )
    text += "of one point at as many flips."
    tables: list[Part] = [Sheet(head, [_line(row) for row in own])] if own else []
    if floor:
        title = f"Noise floor: the float model in {floor[0].runtime}, against itself in torch"
        tables.append(Sheet(head, [_line(row) for row in floor], title=title))
    told = sorted({flag.replace("-", " ") for row in scored for flag in row.flags if not flag.startswith("ci95-by-")})
    tables += _departures(open_)
    return [*tables, Remark(text, "caption"), *(Remark(f"{words.sentence(flag)}.", "caution") for flag in told)]


def _line(row: Row) -> list[str]:
    base, shape = row.baseline, row.shape or {}
    assert base is not None and row.value is not None
    name = f"{row.settings.get('task')} {row.settings.get('metric')}"
    shots = row.settings.get("shots")
    several = words.joined(
        row.runtime or "", f"{shots}-shot" if shots else "", "chat" if row.settings.get("chat") else ""
    )
    between = words.between(base.ratio_ci95, words.percent) or "–"
    return [
        f"{name} ({several})",
        words.percent(base.value),
        words.percent(row.value),
        "–" if base.ratio is None else words.percent(base.ratio),
        between,
        f"{shape['lost']:,}, {shape['gained']:,}" if "lost" in shape else "–",
        "–" if base.p_value is None else words.chance(base.p_value),
        f"{row.n or 0:,}",
        f"{shape['for_a_point']:,}" if "for_a_point" in shape else "–",
    ]


def _departures(rows: Sequence[Row]) -> list[Part]:
    """Build the table of texts after open prompts."""
    head = ("prompts", "runtime", "texts", "the same", "tokens before they differ, median")
    body = []
    for row in rows:
        shape = row.shape or {}
        name = f"{row.settings.get('task')}{', noise floor' if row.settings.get('floor') else ''}"
        same = f"{shape.get('same', 0)} of {row.n}"
        body.append([name, row.runtime or "", f"{shape.get('tokens')} tokens", same, f"{row.value or 0:g}"])
    text = "Both texts of every prompt stand side by side in tasks-RUNTIME.jsonl."
    return [Sheet(head, body, words=2), Remark(text, "caption")] if rows else []
