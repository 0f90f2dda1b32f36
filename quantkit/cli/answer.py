"""The answer of a command, and `showing`, its progress display."""

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
    """Result of a command, for the JSON envelope and for people.

    Args:
        result: JSON result in the envelope.
        shown: the same result for people.
        decisions: decisions in the envelope.
        warnings: warnings in the envelope.
        error: error of completed work that failed its check.
    """

    result: Any
    shown: Sequence[RenderableType | Part] = ()
    decisions: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: QuantkitError | None = None
