"""What ends a compile: a check that failed, or with `--strict` a decision that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantkit.bundle import Check, Decision
from quantkit.errors import GateError
from quantkit.passes import NOTE
from quantkit.planning.model.assigned import ASKED


def demand(checks: Iterable[Check], remedy: str, *, of: str = "") -> None:
    """Refuse what failed a check.

    Args:
        of: what the checks are of, where that is not what was asked for.

    Raises:
        GateError: `check-failed`, with the first that failed.
    """
    failed = next((check for check in checks if not check.ok), None)
    if failed is None:
        return
    value = "not known" if failed.value is None else f"{failed.value:.4g}"
    raise GateError(
        "check-failed",
        where=": ".join(part for part in (of, failed.where or failed.name) if part),
        value=f"{failed.name} is {value}",
        rule=failed.rule,
        remedy=remedy,
    )


def refuse(decisions: Sequence[Decision]) -> None:
    """Raise GateError for the first decision that the recipe did not ask for, if there is any."""
    unasked = [found for found in decisions if found.code not in {*ASKED, NOTE}]
    if unasked:
        first = unasked[0]
        raise GateError(
            "strict",
            where=first.where,
            value=f"{first.pass_}: {first.code}",
            rule=f"--strict allows no decision beyond the recipe; {first.reason} ({len(unasked)} in all)",
            remedy="write it into the recipe (keep, overrides, settings), or leave --strict out (--resume goes on)",
        )
