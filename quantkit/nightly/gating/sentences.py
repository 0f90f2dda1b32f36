"""Decisions in words: an effect with its interval, and what follows from it."""

from __future__ import annotations

from quantkit.nightly.gating.evidence import NightComparison, Thing
from quantkit.report.kit import words
from quantkit.stats.deciding.decision import CellDecision

_HEADS: dict[Thing, str] = {
    "latency": "time",
    "accuracy": "answers lost",
    "kl": "KL from the float model",
    "perplexity": "log-perplexity",
    "size": "bytes",
}
NOT_YET = "; not yet run again"


def because(asked: NightComparison, decision: CellDecision, confirmed: bool | None) -> str:
    """One sentence.

    Args:
        confirmed: whether a second run said the same; None where there was none.
    """
    told = f"{_HEADS[asked.thing]} {amount(asked.thing, decision.effect)}"
    if asked.thing != "size":
        low, high = (amount(asked.thing, end) for end in decision.ci95)
        told += f" ({low} to {high})"
    margin = amount(asked.thing, decision.margin).lstrip("+")
    parts = [("against the last release: " if asked.what == "drift" else "") + told]
    if decision.answer == "same":
        parts[0] += f", within {margin}"
    elif decision.answer == "inconclusive":
        parts.append(f"{amount(asked.thing, decision.detectable)} would have been called worse")
    else:
        parts[0] += f", {_beyond(decision)} {margin}"
    if decision.answer == "worse" and asked.thing == "latency" and confirmed is None:
        parts[0] += NOT_YET
    elif confirmed is not None:
        parts.append("a second run said the same" if confirmed else "a first run called it worse")
    return "; ".join([*parts, *([asked.because] if asked.because else [])])


def amount(thing: Thing, effect: float) -> str:
    """`+4.8 %`, `+0.012 nats`; nothing is without a sign."""
    if thing in ("kl", "perplexity"):
        sign = "−" if effect < 0 else "+" if effect > 0 else ""
        return f"{sign}{words.figure(abs(effect), 2)} nats"
    points = words.points(effect, 2 if abs(effect) < 0.01 else 1)
    return f"{points} %"


def _beyond(decision: CellDecision) -> str:
    low, high = decision.ci95
    shown = low > decision.margin if decision.answer == "worse" else high < -decision.margin
    return "more than" if shown else "which may be more than"
