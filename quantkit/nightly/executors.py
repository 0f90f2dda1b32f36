"""Where the builds of a night run.

`local`: here, one build after another: what is timed has the machine for itself. Builds whose cells are measured on
devices are compiled here first. Then the devices measure side by side, each one cell at a time, and this machine its
own when they are done: it has nothing else to do meanwhile.

`ray`: on a Ray cluster, each build on a node that offers its target as a resource.

    ray start --head --resources='{"cpu-x86": 1}'
    ray start --address=HEAD:6379 --resources='{"l4": 1}'

Cells of a device (`on: [pi5]`) go to a node that offers the device's name: one that reaches it, by OpenSSH's own
configuration and keys. What else is known of the device goes with them. A build takes one of the resource, so a node
that offers 1 runs one build at a time. Where a node dies, its build begins anew on another; what it had committed is
not done again. The store, the bundles and `nightly.yaml` lie on a path that all nodes share, and quantkit is installed
on all of them.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from quantkit.errors import InputError, MissingDependency, Stopped, did_you_mean
from quantkit.nightly.build import prepare
from quantkit.nightly.jobs import BuildJob, Executor, JobOutcome, Work, contained
from quantkit.pipeline.progress import Progress

# seconds between two looks at which nodes are left
_LOOK = 5.0


@dataclass(frozen=True)
class Local:
    """This machine; `prepare` compiles what a device will measure."""

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


@dataclass(frozen=True)
class Ray:
    """A Ray cluster.

    Args:
        address: of its head; `auto` is the one that this machine belongs to.
        retries: how often a build begins anew because its node died.
        patience: seconds that a build waits for a node of its target to come, or to come back.
    """

    address: str = "auto"
    retries: int = 3
    patience: float = 60.0

    def ready(self) -> None:
        """See `jobs.Executor`. Raises MissingDependency: ray; InputError: `ray-unreachable`."""
        _connected(self.address).shutdown()

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """See `jobs.Executor`. Raises as `ready`."""
        ray = _connected(self.address)
        try:
            yield from self._run(ray, jobs, work, progress)
        finally:
            ray.shutdown()

    def _run(self, ray: Any, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        task = ray.remote(num_cpus=0, max_retries=self.retries)(_on_a_node)
        waiting = {task.options(resources={job.place: 1}, name=job.build).remote(job, work): job for job in jobs}
        seen = dict.fromkeys((job.place for job in jobs), time.monotonic())
        try:
            while waiting:
                ready, _ = ray.wait([*waiting], timeout=_LOOK)
                for reference in ready:
                    job = waiting.pop(reference)
                    outcome = _outcome(ray, reference, job)
                    progress.at(job.build, 1.0, outcome.state)
                    yield outcome
                now, there = time.monotonic(), ray.cluster_resources()
                seen |= dict.fromkeys((target for target in seen if there.get(target, 0) >= 1), now)
                for reference, job in [*waiting.items()]:
                    if now - seen[job.place] > self.patience:
                        del waiting[reference]
                        ray.cancel(reference, force=True)
                        yield JobOutcome.of(job, _nowhere(job), "missing")
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


def _on_a_node(job: BuildJob, work: Work) -> JobOutcome:
    return contained(job, work, Progress())


def _outcome(ray: Any, reference: Any, job: BuildJob) -> JobOutcome:
    """What a task gave back, or why it did not."""
    try:
        found: JobOutcome = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, Stopped):
            raise problem.cause from None
        return JobOutcome.of(job, InputError("internal-error", where=job.build, value=_first_line(problem.cause)))
    except ray.exceptions.RayError as problem:
        value, rule = _first_line(problem), "a build whose node dies begins anew, but not for ever"
        lost = InputError("node-died", where=job.build, value=value, rule=rule, remedy="see `ray status`")
        return JobOutcome.of(job, lost)
    return found


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def _nowhere(job: BuildJob) -> InputError:
    value, rule = (
        f"no node of the cluster offers {job.place!r}",
        "a build runs on a node whose resources name its target",
    )
    remedy = f"ray start --resources='{{\"{job.place}\": 1}}'"
    return InputError("no-machine", where=job.build, value=value, rule=rule, remedy=remedy)


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependency("ray", extra="ray", purpose="--executor ray") from None
    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            # ray itself would go on trying for minutes
            socket.create_connection((host, int(port)), timeout=_LOOK).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError) as problem:
        where, remedy = f"--executor ray, {address}", "start one: ray start --head"
        raise InputError("ray-unreachable", where=where, value=_first_line(problem), remedy=remedy) from None
    if threading.current_thread() is threading.main_thread():
        # ray makes of a SIGTERM an exit that nothing can be put away in
        signal.signal(signal.SIGTERM, before)
    return ray


NAMES: dict[str, type[Local | Ray]] = {"local": Local, "ray": Ray}


def named(name: str) -> Executor:
    """Return the executor of that name, with its defaults. Raises InputError `usage`."""
    if name not in NAMES:
        raise InputError("usage", where="--executor", value=name, remedy=did_you_mean(name, NAMES))
    return NAMES[name]()
