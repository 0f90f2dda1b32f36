"""Here, one build after another: what is timed has the machine for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.nightly.running.jobs import BuildJob, JobOutcome, Work, contained
from quantkit.pipeline.progress import Progress


@dataclass(frozen=True)
class Local:
    """See the module."""

    def ready(self) -> None:
        """See `jobs.Executor`: it always is."""

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """See `jobs.Executor`."""
        for job in jobs:
            yield contained(job, work, progress)
