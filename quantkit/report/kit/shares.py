"""Shares of items in words: right answers and agreement, with as many digits as the items have, and what was lost."""

from __future__ import annotations

from quantkit.measurement.rows import Row
from quantkit.report.kit import words

# shares of right answers, whose difference to the original is paired
RECALL = {f"accuracy.recall_at_{k}": f"recall at {k}" for k in (1, 5, 10)}
NAMES = {"accuracy.top1": "top-1 accuracy", "accuracy.top5": "top-5 accuracy", **RECALL}


def agreement(row: Row) -> str:
    """What a row of agreement counts: words, classes, or classes where the original is sure."""
    if not of_classes(row):
        return "same most likely word"
    sure = row.settings.get("surer_than")
    if not isinstance(sure, float):
        return "same class as the original"
    return f"same class, original over {words.percent(sure, 0)} sure"


def of_classes(row: Row) -> bool:
    """Whether a row is about a classifier's answers."""
    return "classes" in (row.shape or {})


def form(row: Row) -> words.Form:
    """Percent to a tenth, of a thousand items and more to a hundredth: a single one shows."""
    places = 2 if (of_classes(row) or row.name in RECALL) and (row.n or 0) >= 1000 else 1
    return lambda value: words.percent(value, places)


def points_form(row: Row) -> words.Form:
    """Points of percent, with as many digits as `form` has."""
    places = 2 if (row.n or 0) >= 1000 else 1
    return lambda value: words.points(value, places)


def changed(row: Row) -> str:
    """What a share lost against the original: `−0.2 points (−0.5 to 0.1), McNemar p 0.30`; empty where unknown."""
    base = row.baseline
    if base is None or base.difference is None:
        return ""
    sure = words.between(base.difference_ci95, points_form(row))
    text = f"{points_form(row)(base.difference)} points"
    test = f", McNemar p {words.chance(base.p_value)}" if base.p_value is not None else ""
    return f"{text}{f' ({sure})' if sure else ''}{test}"
