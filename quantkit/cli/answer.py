"""What a command has to say; `showing` is how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError
from quantkit.pipeline.progress import showing

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantkit.report.kit.tree import Part

__all__ = ["Answer", "showing"]


@dataclass
class Answer:
    """The result of a command, for the envelope and for people.

    Args:
        result: of the envelope; JSON.
        shown: the same for people.
        decisions: of the envelope.
        warnings: of the envelope.
        error: where the work was done and did not hold.
    """

    result: Any
    shown: Sequence[RenderableType | Part] = ()
    decisions: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: QuantkitError | None = None
