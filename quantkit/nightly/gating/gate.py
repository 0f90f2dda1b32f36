"""Whether a night passes, and what the places where people read it are told.

    1   something is worse, or a cell failed
    3   nothing is, but something is inconclusive or missing
    0   otherwise; a cell's first night, which had nothing to be set against, is said and passes

Reads the store alone. A night that has begun and was never decided has no answer for any cell: they are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError
from quantkit.nightly.gating.evidence import is_first
from quantkit.nightly.records import Answer, Night, NightCell, Result, StoredDecision
from quantkit.nightly.store import Store, plain
from quantkit.report.kit import words

ALARMS: tuple[Answer, ...] = ("failed", "worse")
OPEN: tuple[Answer, ...] = ("missing", "inconclusive")
_UNDECIDED = "the night was not decided: `quantkit nightly run --resume` goes on"
# that the one line of an error names
_NAMED = 3


@dataclass(frozen=True)
class Gated:
    """A night at the gate.

    Args:
        night: which.
        decisions: of all its cells, in the order of the matrix; a cell without any is missing.
        first: keys of cells that had nothing yet to be set against.
        seconds: that each cell took, where known.
    """

    night: Night
    decisions: Sequence[StoredDecision]
    first: frozenset[str]
    seconds: dict[str, float]

    @property
    def alarms(self) -> list[StoredDecision]:
        """What is worse or failed."""
        return [each for each in self.decisions if each.answer in ALARMS]

    @property
    def open(self) -> list[StoredDecision]:
        """What is inconclusive or missing, first nights apart."""
        return [each for each in self.decisions if each.answer in OPEN and not self.is_first(each)]

    @property
    def exit(self) -> int:
        """See the module."""
        return 1 if self.alarms else 3 if self.open else 0

    @property
    def counts(self) -> Counter[str]:
        """Answer -> how many; `first` for those of first nights."""
        return Counter("first" if self.is_first(each) else each.answer for each in self.decisions)

    def is_first(self, decision: StoredDecision) -> bool:
        """Whether it is inconclusive because there was nothing yet to compare with."""
        first = decision.cell in self.first and decision.what != "drift"
        return first and decision.answer == "inconclusive"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has neither NaN nor infinity: they are null."""

        def told(rows: Sequence[StoredDecision]) -> list[dict[str, Any]]:
            kept = ("cell", "what", "answer", "value", "low", "high", "margin", "smallest", "confirmed", "because")
            return [{name: plain(getattr(row, name)) for name in kept} for row in rows]

        return {
            "night": self.night.night,
            "exit": self.exit,
            "counts": dict(self.counts),
            "alarms": told(self.alarms),
            "open": told(self.open),
            "first": sorted(self.first),
        }


def gate(store: Store, night: str | None = None) -> Gated:
    """Read a night.

    Args:
        night: its name; None is the last that has begun.

    Raises:
        InputError: `night-missing`, `night-damaged`.
    """
    begun = {each.night: each for each in store.nights()}
    lost = {name for (name,) in store.query("SELECT DISTINCT night FROM results").rows} - begun.keys()
    if night in lost or (night is None and lost and max(lost) > max(begun, default="")):
        value = f"{night or max(lost)} has results, but the row that says what it was to measure is gone"
        raise InputError("night-damaged", where=str(store.path), value=value, remedy="run again, or --night ID")
    if not begun or night not in (None, *begun):
        value = f"no night {night}" if night else "no night has begun"
        remedy = f"the last is {max(begun)}" if begun else "run one first: `quantkit nightly run`"
        raise InputError("night-missing", where=str(store.path), value=value, remedy=remedy)
    chosen = begun[night or max(begun)]
    last: dict[str, Result] = {each.cell: each for each in store.results(chosen.night)}  # the second attempt wins
    decided: dict[str, list[StoredDecision]] = {}
    for each in store.decisions(chosen.night):
        decided.setdefault(each.cell, []).append(each)
    rows: list[StoredDecision] = []
    for key in chosen.matrix:
        missing = StoredDecision(chosen.night, key, "latency", "missing", because=_UNDECIDED)
        rows += decided.get(key, [missing])
    return Gated(
        night=chosen,
        decisions=rows,
        first=frozenset(key for key, result in last.items() if is_first(result)),
        seconds={key: result.seconds for key, result in last.items() if result.seconds is not None},
    )


def title(decision: StoredDecision) -> str:
    """`latency of smollm2-135m, awq-int4, cpu-x86, onnxruntime, batch 8`."""
    cell = NightCell.of(decision.cell)
    return f"{decision.what} of {cell.model}, {cell.recipe}, {cell.target}, {cell.runtime}, batch {cell.batch}"


def count(gated: Gated) -> str:
    """`2 worse, 1 failed, 37 same`, the gravest first."""
    order = ("failed", "worse", "missing", "inconclusive", "first", "better", "same")
    names = {"first": "of a first night"}
    return ", ".join(f"{gated.counts[each]} {names.get(each, each)}" for each in order if gated.counts[each])


def warnings(gated: Gated) -> list[str]:
    """What must be known of a night that passes."""
    if not gated.counts["first"]:
        return []
    cells = words.plural(len(gated.first), "cell")
    return [
        f"{cells} had no baseline yet: nothing was compared there, and this night becomes what the next is set against"
    ]


def error(gated: Gated, *, allow_inconclusive: bool = False) -> QuantkitError | None:
    """What the gate says of a night that does not pass."""
    rows = gated.alarms or gated.open
    if not rows or (allow_inconclusive and not gated.alarms):
        return None
    more = f"; and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    said = "; ".join(f"{each.answer}: {title(each)}: {words.visible(each.because)}" for each in rows[:_NAMED]) + more
    if gated.alarms:
        return GateError("worse", where=gated.night.night, value=said, remedy="`quantkit nightly page` shows all of it")
    remedy = "measure longer (`budget`), or let it pass: --allow-inconclusive"
    return Inconclusive("inconclusive", where=gated.night.night, value=said, remedy=remedy)
