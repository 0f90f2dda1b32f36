"""Build the first page: alarms, every cell's last answer, the nights, and the health of the machine."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from quantkit.nightly.evidence import is_first
from quantkit.nightly.page import charts, say
from quantkit.nightly.page.charts import Chart
from quantkit.nightly.page.data import ANSWERS, BETTER, FAILED, MISSING, NONE, SAME, WORSE, Detail, History, parts
from quantkit.nightly.records import NightCell, What
from quantkit.report.kit import words

Array = Any
# most alarms listed above the grid
_SPELLED = 12
# fewest ratios for a range of nine in ten
_MANY = 20
FACETS = ("model", "recipe", "target", "runtime", "batch")


@dataclass(frozen=True)
class CellTile:
    """One cell in the grid.

    Args:
        answer: last answer.
        what: comparison behind the answer, unless it is latency.
        effect: its effect, as text.
        nights: number of nights in a row with this answer.
        spark: chart of its last nights.
        score: sort key, worst first.
    """

    cell: NightCell
    key: str
    href: str
    answer: str
    what: str
    effect: str
    nights: int
    spark: Markup
    score: tuple[float, float]

    @property
    def label(self) -> str:
        """Description in words."""
        summary = ", ".join(part for part in (f"{self.answer} {self.what}".strip(), self.effect.strip("–")) if part)
        return f"{say.cell(self.cell)}: {summary}"


class GridLine(NamedTuple):
    """One row of the grid: cells of one model, recipe and target; None outside of the matrix."""

    name: str
    detail: str
    tiles: Sequence[CellTile | None]
    columns: Sequence[str]


class TargetGroup(NamedTuple):
    """Rows of one target."""

    target: str
    counts: str
    lines: Sequence[GridLine]


def href(key: str) -> str:
    """Return the file name of a cell: a readable part, and a hash that keeps names unique."""
    plain = re.sub(r"[-.]{2,}", "-", re.sub(r"[^a-z0-9.]+", "-", key.lower())).strip("-.")[:80]
    return f"cells/{plain}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.html"


def page(history: History, details: Mapping[str, Detail], warnings: Sequence[str]) -> dict[str, Any]:
    """Return the values of the template."""
    places = {key: i for i, key in enumerate(history.cells)}
    tiles = [_tile(history, places[key], key) for key in history.current]
    tiles.sort(key=lambda tile: (tile.score, tile.key))
    counted = Counter(tile.answer for tile in tiles)
    alarms = _alarms(history, tiles, details)
    tone, answer, because = verdict(history, tiles, details)
    days = [say.when(night) for night in history.nights]
    shown = set(history.current)
    retired = [(say.cell(parts(key)), href(key)) for key in history.cells if key not in shown]
    return {
        "tone": tone,
        "answer": answer,
        "because": because,
        "night": history.nights[-1] if history.nights else None,
        "started": days[-1] if days else "",
        "cells": len(tiles),
        "alarms": alarms[:_SPELLED],
        "more": sum(len(alarm["tiles"]) for alarm in alarms[_SPELLED:]),
        "days": days,
        "counts": [(name, counted[name]) for name in ANSWERS],
        # sort numbers as numbers
        "facets": [(name, list(map(str, sorted({getattr(tile.cell, name) for tile in tiles})))) for name in FACETS],
        "groups": _groups(tiles),
        "nights": _nights(history, days) if history.nights else None,
        "health": health(history, days) if history.nights else None,
        "notes": [*history.notes, *warnings],
        "retired": retired,
        "short": min(charts.SHORT, len(history.nights)),
    }


def verdict(history: History, tiles: Sequence[CellTile], details: Mapping[str, Detail]) -> tuple[str, str, list[str]]:
    """Return (tone, sentence, reasons) for the top of the page."""
    if not tiles:
        return "open", "No night has run yet", ["The store is empty."] if not history.nights else []
    counted = Counter(tile.answer for tile in tiles)
    alarming = say.counts({code: counted[ANSWERS[code]] for code in (WORSE, FAILED)})
    rest = say.counts({code: counted[name] for code, name in enumerate(ANSWERS) if code not in (WORSE, FAILED)})
    of = f"{words.plural(len(tiles), 'cell')}: {rest}." if rest else ""
    if alarming:
        answer = f"{words.sentence(alarming)} of {words.plural(len(tiles), 'cell')}"
        return "bad", answer, [f"The others: {rest}."] if rest else []
    if counted["missing"] == len(tiles):
        return "open", "Nothing was measured", [of]
    first = [tile for tile in tiles if (results := details[tile.key].results) and is_first(results[-1])]
    if first and len(first) == len(tiles):
        return "good", "The first night", ["There was no baseline yet: this night becomes the baseline of the next."]
    if first:
        of += f" {words.plural(len(first), 'cell')} had no baseline yet."
    if counted["missing"] + counted["inconclusive"] == len(tiles):
        return "open", "Nothing alarming, but no cell was fully decided", [of]
    return "good", "Nothing alarming", [of]


def _tile(history: History, at: int, key: str) -> CellTile:
    nights = history.of(at)
    last = int(nights[-1]) if nights.size else -1
    code = int(history.answer[at, last]) if nights.size else MISSING
    what, effect, excess = _reason(history, at, last, code)
    latency = history.decided.get("latency")
    codes = history.answer[at, nights]
    empty = np.full(len(nights), np.nan)
    known = latency.value[at, nights] if latency else empty
    margins = latency.margin[at, nights] if latency else empty
    margins = margins[np.isfinite(margins)]
    return CellTile(
        parts(key),
        key,
        href(key),
        ANSWERS[code],
        "" if what == "latency" else what,
        say.value(what, effect) if effect is not None else "–",
        history.in_a_row(at),
        charts.spark(known, codes, float(margins[-1]) if margins.size else 0.02),
        (float(code), -excess),
    )


def _reason(history: History, at: int, night: int, code: int) -> tuple[What, float | None, float]:
    """Return (comparison behind an answer, its effect, effect over margin), for the one farthest beyond its margin."""
    candidates: list[tuple[float, What, float | None]] = []
    for what, decided in history.decided.items() if night >= 0 else ():
        own = decided.answer[at, night]
        if own == NONE or code not in (SAME, own):
            continue
        value, margin = float(decided.value[at, night]), float(decided.margin[at, night])
        excess = value / margin if np.isfinite(value) and margin > 0 else 0.0
        candidates.append((excess, what, value if np.isfinite(value) else None))
    if not candidates:
        return "latency", None, 0.0
    nothing_stands_out = code in (SAME, FAILED, MISSING)
    key = (lambda one: 0.0) if nothing_stands_out else (lambda one: -one[0] if code == BETTER else one[0])
    excess, what, effect = max(candidates, key=key)
    return what, effect, excess


def _alarms(history: History, tiles: Sequence[CellTile], details: Mapping[str, Detail]) -> list[dict[str, Any]]:
    """List worse and failed cells, one line each; batches of one build with the same text share a line."""
    places = {key: i for i, key in enumerate(history.cells)}

    def told(tile: CellTile) -> tuple[str, str, str]:
        why = _said(history, places[tile.key], tile, details[tile.key])
        return tile.answer, say.cell(replace(tile.cell, batch=0)), why

    alike = words.by((tile for tile in tiles if tile.answer in (ANSWERS[WORSE], ANSWERS[FAILED])), told)
    return [
        {"answer": answer, "name": name, "said": why, "tiles": sorted(members, key=lambda tile: tile.cell.batch)}
        for (answer, name, why), members in alike.items()
    ]


def _said(history: History, at: int, tile: CellTile, detail: Detail) -> str:
    """Describe why a cell alarms, and since when."""
    last = int(history.of(at)[-1])
    reasons = []
    for what, decided in history.decided.items():
        if decided.answer[at, last] == WORSE:
            between = say.interval(what, decided.low[at, last], decided.high[at, last])
            margin = float(decided.margin[at, last])
            name = say.TITLES[what] if what == "kl" else say.TITLES[what].lower()
            text = f"{name} {say.value(what, decided.value[at, last])}{f' (95 % {between})' if between else ''}"
            reasons.append(text + (f", allowed {say.margin(what, margin)}" if np.isfinite(margin) else ""))
    if tile.answer == ANSWERS[FAILED] and detail.errors and detail.errors[0][0] == history.nights[last].night:
        error = detail.errors[0][2]
        reasons.append(
            ": ".join(words.visible(part) for part in (error.get("code", ""), error.get("value", "")) if part)
        )
    row = f"{words.plural(tile.nights, 'night')} in a row" if tile.nights > 1 else "since this night"
    return "; ".join([*reasons, row])


def _groups(tiles: Sequence[CellTile]) -> list[TargetGroup]:
    """Group tiles by target, with the worst rows first; a row is as bad as its worst cell."""
    groups = []
    for target, members in words.by(tiles, lambda tile: tile.cell.target).items():
        columns = sorted({(tile.cell.runtime, tile.cell.batch) for tile in members})
        several = len({runtime for runtime, _ in columns}) > 1
        names = [f"{runtime} · {batch}" if several else f"batch {batch}" for runtime, batch in columns]
        lines = []
        for (model, recipe), own in words.by(members, lambda tile: (tile.cell.model, tile.cell.recipe)).items():
            row = {(tile.cell.runtime, tile.cell.batch): tile for tile in own}
            lines.append(GridLine(model, recipe, [row.get(column) for column in columns], names))
        counted = Counter(tile.answer for tile in members)
        text = say.counts({code: counted[name] for code, name in enumerate(ANSWERS)})
        runtimes = "" if several else columns[0][0]
        groups.append(TargetGroup(words.joined(target, runtimes, by=" · "), text, lines))
    return groups


def _nights(history: History, days: Sequence[str]) -> Chart:
    """Count the cells with each answer on each night, except `same`."""
    every: dict[str, Array] = {
        name: (history.answer == code).sum(axis=0) for code, name in enumerate(ANSWERS) if code != SAME
    }
    counts = {name: values for name, values in every.items() if values.any()} or {"worse": every["worse"]}
    return charts.lanes(days, counts, f"Cells by their answer on each of {words.plural(len(days), 'night')}.")


def health(history: History, days: Sequence[str]) -> dict[str, Any] | None:
    """Describe the calls on cells whose candidate and baseline are the same bundle; None without such cells."""
    decided = history.decided.get("latency")
    if decided is None or not history.itself.any():
        return None
    itself = history.itself & (decided.answer != NONE)
    called = itself & ((decided.answer == WORSE) | (decided.answer == BETTER))
    ends = np.full((3, len(days)), np.nan)
    for i in range(len(days)):
        values = decided.value[itself[:, i], i]
        values = values[np.isfinite(values)]
        if values.size:
            ends[:, i] = np.quantile(values, (0.05, 0.5, 0.95))
    measured, wrong = itself.sum(axis=0), called.sum(axis=0)
    total, all_wrong = int(measured.sum()), int(wrong.sum())
    last = len(days) - 1
    sentences = [f"Last night, cells compared with themselves: {measured[last]}; called different: {wrong[last]}."]
    if np.isfinite(ends[0, last]):
        if measured[last] >= _MANY:
            sentences.append(
                f"9 of 10 of their ratios lay within {say.interval('latency', ends[0, last], ends[2, last])}."
            )
        else:
            sentences.append(f"Their median ratio was {say.value('latency', ends[1, last])}.")
    always = f"Over {words.plural(int((measured > 0).sum()), 'night')}: {all_wrong:,} called different of {total:,}"
    sentences.append(f"{always}, {words.percent(all_wrong / total, 2)}." if total else f"{always}.")
    chart = charts.spread(days, ends[0], ends[1], ends[2], wrong > 0, measured, wrong)
    return {"said": sentences, "chart": chart, "tone": "bad" if measured[last] and wrong[last] else "good"}
