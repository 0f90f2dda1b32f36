"""The page of a cell: what was decided last, its history, the last night's times and flips, what it ran with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.nightly.page import charts, say
from quantkit.nightly.page.charts import Chart
from quantkit.nightly.page.data import ANSWERS, SAME, WHATS, Detail, Environment, History, parts
from quantkit.nightly.records import Result, StoredDecision
from quantkit.report.kit import words
from quantkit.stats.changes import changes

Array = Any
# nights that the table lists whatever they were, and of those before as many that were not `same`
_LATELY, _OTHERS = 30, 30


def page(history: History, at: int, detail: Detail) -> dict[str, Any]:
    """What the template is filled with."""
    key, nights = history.cells[at], history.of(at)
    cell = parts(key)
    night = history.nights[int(nights[-1])] if nights.size else None
    code = int(history.answer[at, nights[-1]]) if nights.size else 2
    tone, answer, because = _verdict(history, at, nights, code, detail)
    result = detail.results[-1] if detail.results else None
    drawn, said = _history(history, at, nights, detail)
    return {
        "cell": cell,
        "key": key,
        "title": say.cell(cell),
        "tone": tone,
        "answer": answer,
        "because": because,
        "night": night,
        "started": say.when(night) if night else "",
        "decisions": [_decision(each) for each in sorted(detail.decisions, key=lambda d: WHATS.index(d.what))],
        "days": [say.when(history.nights[i]) for i in nights],
        "reasons": _reasons([each for each in detail.decisions if each.answer not in ("same", ANSWERS[code])]),
        "charts": drawn,
        "changes": said,
        "strip": charts.answers(history.answer[at, nights]),
        "raw": _raw(detail),
        "flips": detail.flips,
        "flipped": detail.flipped,
        "scores": _scores(detail),
        "sizes": _sizes(result),
        "environment": _environment(detail.environments),
        "updates": _updates(detail.environments),
        "same_since": detail.environments[-1].night if detail.environments else "",
        "errors": detail.errors,
        "failed": detail.failed,
        "table": _table(history, at, nights),
        "flags": sorted({flag for each in detail.results for flag in each.flags}),
        "facts": _facts(history, key, night, detail),
    }


def _verdict(history: History, at: int, nights: Array, code: int, detail: Detail) -> tuple[str, str, list[str]]:
    """(tone, sentence, reasons)."""
    if not nights.size:
        return "open", "Never measured", ["No night has had this cell yet."]
    name = ANSWERS[code]
    tone = {"worse": "bad", "failed": "bad", "better": "good", "same": "good"}.get(name, "open")
    of = [each for each in detail.decisions if each.answer == name]
    told = [f"{say.TITLES[each.what]} {say.value(each.what, each.value)}" for each in of if each.value is not None]
    answer = words.sentence(name) if name == "same" or not told else f"{words.sentence(name)}: {told[0]}"
    reasons = [] if name == "same" else _reasons(of)
    if history.waits[at, int(nights[-1])]:
        reasons.append("It was measured, and nothing was decided of it yet.")
    elif not detail.results:
        reasons.append("The night has no result of this cell: it was not reached, or the night was cut off.")
    codes = history.answer[at, nights]
    other = np.flatnonzero(codes != code)
    row = len(codes) - 1 - int(other[-1]) if other.size else len(codes)
    if row > 1:
        reasons.append(f"So for {words.plural(row, 'night')} in a row.")
    return tone, answer, reasons


def _reasons(of: Sequence[StoredDecision]) -> list[str]:
    """Why each was decided as it was; the respects that share a reason in one line, all of them without their names."""
    found: dict[str, list[str]] = {}
    for each in of:
        if each.because:
            found.setdefault(each.because.rstrip("."), []).append(say.TITLES[each.what])
    alone = len(found) == 1 and len(of) > 1
    return [f"{words.sentence(why)}." if alone else f"{', '.join(names)}: {why}." for why, names in found.items()]


def _decision(each: StoredDecision) -> dict[str, Any]:
    confirmed = {True: "yes", False: "no", None: ""}[each.confirmed]
    return {
        "title": say.TITLES[each.what],
        "answer": each.answer,
        "value": say.value(each.what, each.value),
        "interval": say.interval(each.what, each.low, each.high),
        "drawn": charts.between(each.low, each.value, each.high, each.margin),
        "p": words.chance(each.p_adjusted) if each.p_adjusted is not None and np.isfinite(each.p_adjusted) else "–",
        "margin": say.margin(each.what, each.margin),
        "smallest": say.margin(each.what, each.smallest),
        "n": f"{each.n:,}" if each.n is not None else "–",
        "confirmed": confirmed,
    }


def _history(
    history: History, at: int, nights: Array, detail: Detail
) -> tuple[list[tuple[str, str, Chart]], list[str]]:
    """((title, unit, chart) of each respect, what changed in a sentence each)."""
    days = [say.when(history.nights[i]) for i in nights]
    places = {history.nights[i].night: n for n, i in enumerate(nights.tolist())}
    updates = [places[each.night] for each in detail.environments[1:] if each.night in places]
    drawn: list[tuple[str, str, Chart]] = []
    said: list[str] = []
    for what in WHATS:
        decided = history.decided.get(what)
        if decided is None:
            continue
        values, low, high = (each[at, nights] for each in (decided.value, decided.low, decided.high))
        if not np.isfinite(values).any():
            continue
        margins = decided.margin[at, nights]
        margin = float(margins[np.isfinite(margins)][-1]) if np.isfinite(margins).any() else 0.0
        # levels of a ratio, which is never zero; of what is a difference, as it is
        ratio = what in ("latency", "size", "drift")
        found = changes(1 + values if ratio else values)
        found = [type(c)(c.index, c.before - ratio, c.after - ratio, c.p) for c in found]
        codes = decided.answer[at, nights]
        chart = charts.respect(what, days, codes, values, low, high, margin, found, updates, len(said) + 1)
        drawn.append((say.TITLES[what], say.UNITS[what], chart))
        said += [
            f"{say.TITLES[what]}: from {say.value(what, each.before)} to {say.value(what, each.after)} "
            f"on {days[each.index][:10]}"
            for each in found
        ]
    return drawn, said


def _raw(detail: Detail) -> dict[str, Any] | None:
    """Drawings of the last night's times."""
    raw = detail.raw
    if raw is None or not len(raw.seconds):
        return {"times": None, "notes": [f"All {raw.dropped:,} times are broken"]} if raw and raw.dropped else None
    starts = [0, *(np.flatnonzero(np.diff(raw.round)) + 1).tolist()]
    found = raw.ratios()
    margins = [each.margin for each in detail.decisions if each.what == "latency" and each.margin]
    notes = []
    if raw.again is not None:
        notes.append(f"From round {raw.again + 1} on it is the second run, which an alarm asks for")
    if raw.dropped:
        notes.append(f"{words.plural(raw.dropped, 'time')} left out: NaN, infinite or not above zero")
    if raw.throttled:
        notes.append(f"{words.plural(raw.throttled, 'step')} ran while the device had lowered its clock")
    if raw.temperature:
        notes.append(f"between {raw.temperature[0]:.0f} and {raw.temperature[1]:.0f} °C")
    return {
        "times": charts.raw(raw.sides(), starts, len(raw.seconds)),
        "unit": words.time_unit(float(np.median(raw.seconds)))[1],
        "sides": list(raw.sides()),
        "medians": [(side, words.moment(float(np.median(seconds)))) for side, (_, seconds) in raw.sides().items()],
        "ratios": charts.ratios(found, margins[0] if margins else 0.0) if len(found) > 1 else None,
        "notes": notes,
    }


def _scores(detail: Detail) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            score.side,
            f"{score.items:,}",
            words.or_dash(score.right, lambda v: words.percent(v, 2)),
            words.or_dash(score.kl, lambda v: words.figure(v, 4)),
            words.or_dash(score.nll, lambda v: words.figure(v, 4)),
        )
        for score in sorted(detail.scores, key=lambda score: score.side != "candidate")
    ]


def _sizes(result: Result | None) -> list[tuple[str, str]]:
    if result is None:
        return []
    given = (("candidate", result.bytes), ("baseline", result.baseline_bytes))
    return [(name, f"{words.size(count)} ({count:,} bytes)") for name, count in given if count is not None]


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, before, now) of what is another; a dash for what is not there."""
    names = sorted({*before, *now})
    return [(n, before.get(n, "–"), now.get(n, "–")) for n in names if before.get(n) != now.get(n)]


def _environment(found: Sequence[Environment]) -> list[tuple[str, str]]:
    return (
        sorted(found[-1].names.items(), key=lambda each: (not each[0].startswith("device."), each[0])) if found else []
    )


def _updates(found: Sequence[Environment]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(night, what changed in it), the last first."""
    pairs = itertools.pairwise(found)
    return [(after.night, _difference(before.names, after.names)) for before, after in pairs][::-1]


def _table(history: History, at: int, nights: Array) -> dict[str, Any]:
    """Nights as rows: the last ones, and those before that were not `same`."""
    whats = [what for what in WHATS if what in history.decided and np.isfinite(history.decided[what].value[at]).any()]
    codes = history.answer[at, nights]
    older = [n for n in range(len(nights) - _LATELY) if codes[n] != SAME]
    rows = []
    for n in [*range(max(0, len(nights) - _LATELY), len(nights))][::-1] + older[::-1][:_OTHERS]:
        i = int(nights[n])
        figures = []
        for what in whats:
            decided = history.decided[what]
            between = say.interval(what, decided.low[at, i], decided.high[at, i])
            figures.append((say.value(what, decided.value[at, i]), between))
        rows.append((say.when(history.nights[i]), ANSWERS[codes[n]], figures))
    return {
        "head": [say.TITLES[what] for what in whats],
        "rows": rows,
        "lately": min(_LATELY, len(nights)),
        "left": len(nights) - len(rows),
    }


def _facts(history: History, key: str, night: Any, detail: Detail) -> list[tuple[str, str]]:
    found = [("cell", key)]
    if night is not None:
        found += [("night", night.night), ("host", night.host), ("commit", night.commit or "none")]
        found.append(("sha256 of nightly.yaml", night.config_sha256))
    for result in detail.results[-1:]:
        kinds = {"accepted": "its last night that passed", "release": "the last release", "bundle": "a named bundle"}
        if result.state == "done":
            found.append(("set against", kinds.get(result.baseline_kind or "", "nothing yet")))
        for name in ("content_sha256", "baseline_sha256", "release_sha256"):
            if value := getattr(result, name):
                found.append((name, value))
        if result.seconds is not None and np.isfinite(result.seconds):
            found.append(("took", words.duration(result.seconds)))
        found.append(("attempts", str(len(detail.results))))
    return found
