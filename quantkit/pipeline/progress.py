"""How the pipeline tells whoever watches how far it is."""

from __future__ import annotations

from collections.abc import Mapping


class Progress:
    """Receives the stages with their expected seconds, then how far each is. This one says nothing to nobody."""

    def plan(self, stages: Mapping[str, float]) -> None:
        """The stages to come, in order, with a first guess of the seconds each takes."""

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """A stage is `done` (0..1); `detail` names what it is at."""

    def note(self, line: str) -> None:
        """Something worth a line: a decision, a caveat."""
