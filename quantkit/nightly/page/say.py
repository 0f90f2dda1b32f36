"""Words and numbers of the site. Stored effects above zero are worse; here a loss of answers has a minus."""

from __future__ import annotations

import math
from datetime import UTC

from quantkit.nightly.page.data import ANSWERS
from quantkit.nightly.records import NIGHT_ID, Night, NightCell, What
from quantkit.report.kit import words

TITLES: dict[What, str] = {
    "latency": "Latency",
    "accuracy": "Right answers",
    "kl": "KL from the float model",
    "tasks": "Recovery in tasks",
    "size": "Size of the weights",
    "drift": "Drift from the last release",
}
# meaning of values above zero in a chart
UNITS: dict[What, str] = {
    "latency": "% slower",
    "accuracy": "points lost",
    "kl": "nats more",
    "tasks": "% of the score lost",
    "size": "% larger",
    "drift": "% worse",
}


def value(what: What, effect: float | None, *, bare: bool = False) -> str:
    """Format an effect: `+5.2 %`, `−0.80 pt`, `+0.0120 nats`, with non-breaking spaces; a dash for None.

    Args:
        effect: stored effect.
        bare: True to leave out the unit.
    """
    if effect is None or not math.isfinite(effect):
        return "–"
    if what == "kl":
        return words.signed(effect, 4) + ("" if bare else "\u00a0nats")
    if what == "accuracy":
        return words.signed(-100 * effect, 2) + ("" if bare else "\u00a0pt")
    return words.signed(100 * effect, 1 if abs(effect) < 1 else 0) + ("" if bare else "\u00a0%")


def tick(what: What, effect: float) -> str:
    """Format a number beside an axis, in `UNITS`."""
    number = effect if what == "kl" else 100 * effect
    return f"{round(number, 6):g}".replace("-", "−")


def interval(what: What, low: float | None, high: float | None) -> str:
    """Format `−0.3 % to +1.2 %`; "" without an interval."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    ends = (high, low) if what == "accuracy" else (low, high)
    return f"{value(what, ends[0], bare=True)} to {value(what, ends[1])}"


def margin(what: What, share: float | None) -> str:
    """Format a margin, without a sign."""
    return value(what, share).lstrip("+−")


def when(night: Night) -> str:
    """Return `2026-01-02 03:04` in UTC."""
    return f"{night.started.astimezone(UTC):%Y-%m-%d %H:%M}"


def date(name: str) -> str:
    """Return the start of a night, read from its name."""
    return f"{name[:4]}-{name[4:6]}-{name[6:8]} {name[9:11]}:{name[11:13]}" if NIGHT_ID.fullmatch(name) else name


def cell(of: NightCell) -> str:
    """Describe a cell in one line."""
    batch = f"batch {of.batch}" if of.batch else ""
    return words.joined(of.model, of.recipe, of.target, of.runtime, batch, by=" · ")


def counts(numbers: dict[int, int]) -> str:
    """Return `2 worse, 5 failed`."""
    return ", ".join(f"{count:,} {ANSWERS[code]}" for code, count in numbers.items() if count)
