"""How far a command is, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def showing() -> Iterator[Any]:
    """A progress that shows itself on stderr."""
    from quantkit.pipeline.progress import Progress
    from quantkit.report.kit.progress import Display

    class Shown(Display, Progress):
        """The display, as the pipeline knows it."""

    with Shown(sys.stderr, live=sys.stderr.isatty()) as shown:
        yield shown
