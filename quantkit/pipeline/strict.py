"""`--strict`: what was decided otherwise than asked is an error."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.bundle import Decision
from quantkit.errors import GateError
from quantkit.passes import NOTE
from quantkit.planning.model.assigned import ASKED


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
