"""What becomes of the experts of a block that calibration hardly ever routes to; see `calibrate.statistics.routing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.bundle import Decision
from quantkit.calibrate.statistics import routing
from quantkit.model.structure.block import Block
from quantkit.passes import decision

_DONE = {
    "force": ("forced", "it is calibrated on all tokens that reach its layer"),
    "keep": ("kept", "it stays in high precision"),
}


@dataclass(frozen=True)
class Rare:
    """Experts that see fewer than so many calibration tokens, and what is done about them; see `CalibrationChoice`."""

    tokens: int = 64
    action: Literal["force", "keep"] = "force"


def settle(block: Block, counts: Mapping[str, int], rare: Rare) -> tuple[dict[str, int], list[Decision]]:
    """Force or keep the experts that see too little.

    Args:
        counts: expert -> calibration tokens that are routed to it.

    Returns:
        linear's full name -> the tokens its expert is routed, and the decisions.
    """
    owners = {linear: owner for linear in block.linears() if (owner := routing.expert_of(linear, block.module))}
    routed = {block.full_name(linear): counts[owner] for linear, owner in owners.items() if owner in counts}
    chosen = [expert for expert, seen in counts.items() if seen < rare.tokens and expert in owners.values()]
    done, reason = _DONE[rare.action]
    if rare.action == "force":
        for module in (block.module, block.original):
            if module is not None:
                routing.force(module, chosen)
    else:
        block.schemes = {linear: None if owners.get(linear) in chosen else how for linear, how in block.schemes.items()}
    found = []
    for expert in chosen:
        seen = f"{counts[expert]} calibration tokens were routed to it, fewer than {rare.tokens}"
        found.append(
            decision("calibrate", "expert-unrouted", block.full_name(expert), f"{seen}; {reason}", counts[expert], done)
        )
    return routed, found
