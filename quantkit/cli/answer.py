"""What a command has to say, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    shown: Sequence[RenderableType] = ()
    decisions: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: QuantkitError | None = None


@contextmanager
def showing() -> Iterator[Any]:
    """A progress that shows itself on stderr."""
    from quantkit.pipeline.progress import Progress
    from quantkit.report.kit.progress import Display

    class Shown(Display, Progress):
        """The display, as the pipeline knows it."""

    with Shown(sys.stderr, live=sys.stderr.isatty()) as shown:
        yield shown
