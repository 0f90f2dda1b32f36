"""What rows of one run share, and what both sides have to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import GateError, InputError
from quantkit.measurement.rows import Data, Device

Array = NDArray[Any]


@dataclass(frozen=True)
class About:
    """What was measured, on what, against what.

    Args:
        subject: `content_sha256` of the candidate.
        baseline: `content_sha256`, or another hash, of the original.
        runtime: that the candidate ran in.
        data: what was scored.
        device: that it ran on.
        versions: package -> version.
        settings: of the runtime.
    """

    subject: str
    baseline: str
    runtime: str
    data: Data
    device: Device | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)

    def common(self, *, flags: list[str], **settings: str | bool | int | float) -> dict[str, Any]:
        """The fields that every row of the run has, with settings of its own."""
        return {
            "subject": self.subject,
            "runtime": self.runtime,
            "settings": {**self.settings, **settings},
            "device": self.device,
            "versions": dict(self.versions),
            "data": self.data,
            "flags": flags,
        }


def demand_alike(original: Array, candidate: Array, where: str, what: str) -> None:
    """Refuse sides that cannot be compared: no items, or a number that is none.

    Raises:
        ValueError: different shapes.
        InputError: `nothing-scored`; `outputs-not-finite`, of the original.
        GateError: `outputs-not-finite`, of the candidate.
    """
    if original.shape != candidate.shape:
        raise ValueError(f"both sides have one shape, got {original.shape} and {candidate.shape}")
    if original.size == 0:
        raise InputError("nothing-scored", where=where, value=f"no {what}", rule="at least one item is scored")
    for side, values in (("the original", original), ("the candidate", candidate)):
        demand_finite(values, where, what, side)


def demand_finite(values: Array, where: str, what: str, side: str) -> None:
    """Refuse items [n, ...] of one side that are no numbers. Raises as `demand_alike`."""
    wrong = ~np.isfinite(values).reshape(values.shape[0], -1).all(axis=1)
    if wrong.any():
        own = side == "the candidate"
        kind = GateError if own else InputError
        raise kind(
            "outputs-not-finite",
            where=where,
            value=f"{side} gives NaN or infinity for {int(wrong.sum())} items, first item {int(wrong.argmax())}",
            rule=f"{what} are finite",
            remedy="look for NaN or infinite weights and scales" if own else "check the model and the items",
        )
