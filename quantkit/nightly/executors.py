"""Run the builds of a night, on this machine or on a cluster.

`local`: on this machine, one build after another, so that timing has the machine to itself. Builds for devices are
compiled here first. Then the devices measure in parallel, each one cell at a time. This machine measures its own
builds after they finish.

`ray`: on a Ray cluster, each build on a node that offers its target as a resource.

    ray start --head --resources='{"cpu-x86": 1}'
    ray start --address=HEAD:6379 --resources='{"l4": 1}'

Cells of a device (`on: [pi5]`) go to a node that offers the device's name and can reach it with OpenSSH's own
configuration and keys; the device's other settings travel with the job. A build takes one unit of the resource, so a
node that offers 1 runs one build at a time. If a node dies, its build starts again on another; committed results are
not repeated. The store, the bundles and `nightly.yaml` must be on a path that all nodes share, and quantkit must be
installed on all of them.
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

# seconds between two checks of the remaining nodes
_LOOK = 5.0


@dataclass(frozen=True)
class Local:
    """This machine; `prepare` compiles the bundles that devices will measure."""

    prepare: Work = prepare

    def ready(self) -> None:
        """Do nothing: this machine is always ready. See `jobs.Executor`."""

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """Run the jobs: see `jobs.Executor`."""
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
    """Run the devices in parallel, each one's builds in order; yield outcomes as they arrive. An interrupt ends all."""
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
        address: address of its head; `auto` is this machine's cluster.
        retries: restarts of a build after a node died.
        patience: seconds that a build waits for a node of its target.
    """

    address: str = "auto"
    retries: int = 3
    patience: float = 60.0

    def ready(self) -> None:
        """Check the cluster: see `jobs.Executor`. Raises MissingDependency: ray; InputError: `ray-unreachable`."""
        _connected(self.address).shutdown()

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        """Run the jobs: see `jobs.Executor`. Raises as `ready`."""
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
    """Return the outcome of a task, or of its failure."""
    try:
        outcome: JobOutcome = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, Stopped):
            raise problem.cause from None
        return JobOutcome.of(job, InputError("internal-error", where=job.build, value=_first_line(problem.cause)))
    except ray.exceptions.RayError as problem:
        value, rule = _first_line(problem), "a build restarts after a node's death, a limited number of times"
        lost = InputError("node-died", where=job.build, value=value, rule=rule, remedy="see `ray status`")
        return JobOutcome.of(job, lost)
    return outcome


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def _nowhere(job: BuildJob) -> InputError:
    value, rule = (
        f"no node of the cluster offers {job.place!r}",
        "a build needs a node with its target among the resources",
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
            # ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=_LOOK).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError) as problem:
        where, remedy = f"--executor ray, {address}", "start one: ray start --head"
        raise InputError("ray-unreachable", where=where, value=_first_line(problem), remedy=remedy) from None
    if threading.current_thread() is threading.main_thread():
        # ray turns SIGTERM into an exit without cleanup
        signal.signal(signal.SIGTERM, before)
    return ray


NAMES: dict[str, type[Local | Ray]] = {"local": Local, "ray": Ray}


def named(name: str) -> Executor:
    """Return the executor called `name`, with its defaults. Raises InputError `usage`."""
    if name not in NAMES:
        raise InputError("usage", where="--executor", value=name, remedy=did_you_mean(name, NAMES))
    return NAMES[name]()
