"""Checks of what was made: one that fails ends the work, and nothing is delivered."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.bundle import Check
from quantkit.errors import GateError


def demand(checks: Iterable[Check], remedy: str, *, of: str = "") -> None:
    """Refuse what failed a check.

    Args:
        checks: of an export.
        remedy: what follows from a failure, and what to do.
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
