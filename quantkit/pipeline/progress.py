"""How the pipeline tells whoever watches how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Progress:
    """Receives the stages with their expected seconds, then how far each is. This one says nothing to nobody."""

    def plan(self, stages: Mapping[str, float]) -> None:
        """The stages to come, in order, with a first guess of the seconds each takes."""

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """A stage is `done` (0..1); `detail` names what it is at."""

    def note(self, line: str) -> None:
        """Something worth a line: a decision, a caveat."""


class Overall(Progress):
    """One share of all stages together, by the seconds that they are expected to take.

    Args:
        report: told that share, and the stage with its detail.
        note: told the notes.
    """

    def __init__(self, report: Callable[[float, str], None], note: Callable[[str], None]) -> None:
        self._report = report
        self._note = note
        self._stages: dict[str, float] = {}

    def plan(self, stages: Mapping[str, float]) -> None:
        """See `Progress`."""
        self._stages = {**stages}

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """See `Progress`."""
        names = list(self._stages)
        before = sum(self._stages[name] for name in names[: names.index(stage)]) if stage in names else 0.0
        share = (before + done * self._stages.get(stage, 0.0)) / max(sum(self._stages.values()), 1e-9)
        self._report(min(share, 1.0), f"{stage} {detail}".rstrip())

    def note(self, line: str) -> None:
        """See `Progress`."""
        self._note(line)
