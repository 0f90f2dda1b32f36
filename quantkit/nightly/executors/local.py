"""Here, one build after another: what is timed has the machine for itself.

Builds whose cells are measured on devices are compiled here first. Then the devices measure side by side, each one cell
at a time, and this machine its own when they are done: it has nothing else to do meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from quantkit.nightly.running.build import prepare
from quantkit.nightly.running.jobs import BuildJob, JobOutcome, Work, contained
from quantkit.pipeline.progress import Progress


@dataclass(frozen=True)
class Local:
    """See the module.

    Args:
        prepare: compiles what a device will measure.
    """

    prepare: Work = prepare

    def ready(self) -> None:
        """See `jobs.Executor`: it always is."""

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """See `jobs.Executor`."""
        devices: dict[str, list[BuildJob]] = {}
        for job in jobs:
            if job.on:
                outcome = contained(job, self.prepare, progress)
                if outcome.state == "done":
                    devices.setdefault(job.on, []).append(job)
                else:
                    yield outcome
        if devices:
            yield from _side_by_side(list(devices.values()), work, progress)
        for job in jobs:
            if not job.on:
                yield contained(job, work, progress)


def _side_by_side(queues: Sequence[Sequence[BuildJob]], work: Work, progress: Progress) -> Iterator[JobOutcome]:
    """Each device's builds in order, each outcome as it comes; an interrupt ends all of them."""
    over = threading.Event()
    ended: SimpleQueue[JobOutcome | BaseException] = SimpleQueue()

    def one_after_another(queue: Sequence[BuildJob]) -> None:
        try:
            for job in queue:
                ended.put(contained(job, work, progress, alone=False, over=over))
        except BaseException as problem:
            ended.put(problem)

    with ThreadPoolExecutor(len(queues)) as pool:
        try:
            for queue in queues:
                pool.submit(one_after_another, queue)
            for _ in range(sum(map(len, queues))):
                outcome = ended.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        except BaseException:
            over.set()
            raise
