"""Build the page of a cell: last decisions, history, times and flips of the last night, environment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.nightly.page import charts, say
from quantkit.nightly.page.charts import Chart
from quantkit.nightly.page.data import ANSWERS, SAME, WHATS, Detail, Environment, History, parts
from quantkit.nightly.records import StoredDecision
from quantkit.report.kit import words
from quantkit.stats.changes import changes

Array = Any
# last nights in the table, and most earlier nights with an answer other than `same`
_LATELY, _OTHERS = 30, 30
_KINDS = {"accepted": "its last night that passed", "release": "the last release", "bundle": "a named bundle"}


def page(history: History, at: int, detail: Detail) -> dict[str, Any]:
    """Return the values of the template."""
    key, nights = history.cells[at], history.of(at)
    night = history.nights[int(nights[-1])] if nights.size else None
    code = int(history.answer[at, nights[-1]]) if nights.size else 2
    tone, answer, because = _verdict(history, at, nights, code, detail)
    drawn, level_changes = _history(history, at, nights, detail)
    environments = detail.environments
    return {
        "title": say.cell(parts(key)),
        "tone": tone,
        "answer": answer,
        "because": because,
        "night": night,
        "started": say.when(night) if night else "",
        "decisions": [_decision(row) for row in sorted(detail.decisions, key=lambda row: WHATS.index(row.what))],
        "days": [say.when(history.nights[i]) for i in nights],
        "reasons": _reasons([row for row in detail.decisions if row.answer not in ("same", ANSWERS[code])]),
        "charts": drawn,
        "changes": level_changes,
        "strip": charts.answers(history.answer[at, nights]),
        "raw": _raw(detail),
        "flips": detail.flips,
        "flipped": detail.flipped,
        "scores": _scores(detail),
        "sizes": _sizes(detail),
        "environment": _environment(environments),
        "updates": [(now.night, _difference(old.names, now.names)) for old, now in itertools.pairwise(environments)][
            ::-1
        ],
        "same_since": environments[-1].night if environments else "",
        "errors": detail.errors,
        "failed": detail.failed,
        "table": _table(history, at, nights),
        "flags": sorted({flag for result in detail.results for flag in result.flags}),
        "facts": _facts(key, night, detail),
    }


def _verdict(history: History, at: int, nights: Array, code: int, detail: Detail) -> tuple[str, str, list[str]]:
    """Return (tone, sentence, reasons)."""
    if not nights.size:
        return "open", "Never measured", ["No night has measured this cell yet."]
    name = ANSWERS[code]
    tone = {"worse": "bad", "failed": "bad", "better": "good", "same": "good"}.get(name, "open")
    of = [row for row in detail.decisions if row.answer == name]
    told = [f"{say.TITLES[row.what]} {say.value(row.what, row.value)}" for row in of if row.value is not None]
    answer = words.sentence(name) if name == "same" or not told else f"{words.sentence(name)}: {told[0]}"
    reasons = [] if name == "same" else _reasons(of)
    if history.waits[at, int(nights[-1])]:
        reasons.append("The cell was measured, but not decided yet.")
    elif not detail.results:
        reasons.append("The night has no result for this cell: the night ended before it.")
    if (row := history.in_a_row(at)) > 1:
        reasons.append(f"The same for {words.plural(row, 'night')} in a row.")
    return tone, answer, reasons


def _reasons(of: Sequence[StoredDecision]) -> list[str]:
    """Return the reasons, one line each; comparisons with the same reason share a line."""
    told = words.by((row for row in of if row.because), lambda row: row.because.rstrip("."))
    if len(told) == 1 and len(of) > 1:
        return [f"{words.sentence(why)}." for why in told]
    return [f"{', '.join(say.TITLES[row.what] for row in rows)}: {why}." for why, rows in told.items()]


def _decision(row: StoredDecision) -> dict[str, Any]:
    known = row.p_adjusted is not None and np.isfinite(row.p_adjusted)
    return {
        "title": say.TITLES[row.what],
        "answer": row.answer,
        "value": say.value(row.what, row.value),
        "interval": say.interval(row.what, row.low, row.high),
        "drawn": charts.between(row.low, row.value, row.high, row.margin),
        "p": words.chance(row.p_adjusted or 0.0) if known else "–",
        "margin": say.margin(row.what, row.margin),
        "smallest": say.margin(row.what, row.smallest),
        "n": f"{row.n:,}" if row.n is not None else "–",
        "confirmed": {True: "yes", False: "no", None: ""}[row.confirmed],
    }


def _history(
    history: History, at: int, nights: Array, detail: Detail
) -> tuple[list[tuple[str, str, Chart]], list[str]]:
    """Return ((title, unit, chart) of each comparison, a sentence for each change of level)."""
    days = [say.when(history.nights[i]) for i in nights]
    places = {history.nights[i].night: n for n, i in enumerate(nights.tolist())}
    updates = [places[later.night] for later in detail.environments[1:] if later.night in places]
    drawn: list[tuple[str, str, Chart]] = []
    sentences: list[str] = []
    for what, decided in history.decided.items():
        values, low, high, margins = (
            column[at, nights] for column in (decided.value, decided.low, decided.high, decided.margin)
        )
        if not np.isfinite(values).any():
            continue
        margin = float(margins[np.isfinite(margins)][-1]) if np.isfinite(margins).any() else 0.0
        # a ratio's level is never zero; a difference stays as it is
        ratio = what in ("latency", "size", "drift")
        levels = changes(1 + values if ratio else values)
        levels = [type(c)(c.index, c.before - ratio, c.after - ratio, c.p) for c in levels]
        codes = decided.answer[at, nights]
        chart = charts.respect(what, days, codes, values, low, high, margin, levels, updates, len(sentences) + 1)
        drawn.append((say.TITLES[what], say.UNITS[what], chart))
        for level in levels:
            ends = f"from {say.value(what, level.before)} to {say.value(what, level.after)}"
            sentences.append(f"{say.TITLES[what]}: {ends} on {days[level.index][:10]}")
    return drawn, sentences


def _raw(detail: Detail) -> dict[str, Any] | None:
    """Draw the times of the last night."""
    raw = detail.raw
    if raw is None or not len(raw.seconds):
        return {"times": None, "notes": [f"All {raw.dropped:,} times are invalid"]} if raw and raw.dropped else None
    starts = [0, *(np.flatnonzero(np.diff(raw.round)) + 1).tolist()]
    ratios, sides = raw.ratios(), raw.sides()
    margins = [row.margin for row in detail.decisions if row.what == "latency" and row.margin]
    notes = []
    if raw.again is not None:
        notes.append(f"Rounds from {raw.again + 1} on belong to the second run, after an alarm")
    if raw.dropped:
        notes.append(f"{words.plural(raw.dropped, 'time')} left out: NaN, infinite or not positive")
    if raw.throttled:
        notes.append(f"{words.plural(raw.throttled, 'step')} ran while the device lowered its clock")
    if raw.temperature:
        notes.append(f"between {raw.temperature[0]:.0f} and {raw.temperature[1]:.0f} °C")
    return {
        "times": charts.raw(sides, starts, len(raw.seconds)),
        "medians": [(side, words.moment(float(np.median(seconds)))) for side, (_, seconds) in sides.items()],
        "ratios": charts.ratios(ratios, margins[0] if margins else 0.0) if len(ratios) > 1 else None,
        "notes": notes,
    }


def _scores(detail: Detail) -> list[tuple[str, ...]]:
    def line(side: str, items: int, right: float | None, *losses: float | None) -> tuple[str, ...]:
        share = words.or_dash(right, lambda value: words.percent(value, 2))
        return side, f"{items:,}", share, *(words.or_dash(loss, words.figure) for loss in losses)

    return [line(*score) for score in sorted(detail.scores, key=lambda score: score[0] != "candidate")]


def _sizes(detail: Detail) -> list[tuple[str, str]]:
    last = detail.results[-1] if detail.results else None
    sizes = {} if last is None else {"candidate": last.bytes, "baseline": last.baseline_bytes}
    return [(name, f"{words.size(count)} ({count:,} bytes)") for name, count in sizes.items() if count is not None]


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """List (name, before, now) of changed entries; a dash for an absent one."""
    names = sorted({*before, *now})
    return [(n, before.get(n, "–"), now.get(n, "–")) for n in names if before.get(n) != now.get(n)]


def _environment(known: Sequence[Environment]) -> list[tuple[str, str]]:
    names = known[-1].names if known else {}
    return sorted(names.items(), key=lambda entry: (not entry[0].startswith("device."), entry[0]))


def _table(history: History, at: int, nights: Array) -> dict[str, Any]:
    """List nights as rows: the last ones, and earlier ones with an answer other than `same`."""
    shown = {what: row for what, row in history.decided.items() if np.isfinite(row.value[at]).any()}
    codes = history.answer[at, nights]
    older = [n for n in range(len(nights) - _LATELY) if codes[n] != SAME]
    rows = []
    for n in [*range(max(0, len(nights) - _LATELY), len(nights))][::-1] + older[::-1][:_OTHERS]:
        i = int(nights[n])
        figures = [
            (say.value(what, row.value[at, i]), say.interval(what, row.low[at, i], row.high[at, i]))
            for what, row in shown.items()
        ]
        rows.append((say.when(history.nights[i]), ANSWERS[codes[n]], figures))
    head, lately = [say.TITLES[what] for what in shown], min(_LATELY, len(nights))
    return {"head": head, "rows": rows, "lately": lately, "left": len(nights) - len(rows)}


def _facts(key: str, night: Any, detail: Detail) -> list[tuple[str, str]]:
    facts = [("cell", key)]
    if night is not None:
        facts += [("night", night.night), ("host", night.host), ("commit", night.commit or "none")]
        facts.append(("sha256 of nightly.yaml", night.config_sha256))
    for result in detail.results[-1:]:
        if result.state == "done":
            facts.append(("compared with", _KINDS.get(result.baseline_kind or "", "nothing yet")))
        hashes = ("content_sha256", "baseline_sha256", "release_sha256")
        facts += [(name, value) for name in hashes if (value := getattr(result, name))]
        if result.seconds is not None and np.isfinite(result.seconds):
            facts.append(("took", words.duration(result.seconds)))
        facts.append(("attempts", str(len(detail.results))))
    return facts
