"""Run jobs on this machine, or on a Ray cluster.

`Local`: one job after another, so that timing has the machine to itself. Jobs that measure on devices are prepared here
first (a night compiles their bundles). Then the devices measure in parallel, each one job at a time, and this machine's
own jobs follow.

`Ray`: each job on a node that offers its place, one unit of it.

    GPU      a GPU of the node, with its share of the processors
    CPU      a whole node: as many processors as the largest node has
    l4       a resource that a node was started with: ray start --address=HEAD:6379 --resources='{"l4": 1}'

A night's jobs go to nodes that offer the name of their target, or of their device: such a node reaches the device with
OpenSSH's own configuration and keys; the device's other settings travel with the job.

If a node dies, its jobs start again on others; committed results are not repeated. All nodes have quantkit, and see the
files of a job and its folder under the same paths. Both are checked on every node before a job starts, and on a node
that joins later before its first step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from quantkit import limits, machine
from quantkit._version import __version__
from quantkit.errors import InputError, MissingDependency, Stopped, did_you_mean
from quantkit.pipeline.many.jobs import Executor, J, Job, JobOutcome, Work, contained
from quantkit.pipeline.progress import Progress
from quantkit.report.kit import words

CPU, GPU = "CPU", "GPU"
_CLIENT, _ADDRESS = "ray://", re.compile(r"ray://\S+:\d+")
# seconds between two checks of the remaining nodes
_LOOK = 5.0
# seconds in which a node answers which files it sees: its first process imports quantkit
_ANSWER = 120.0
# bytes of a file that is compared by its content; of others the size is
_SMALL = 1 << 16
_NOTHING = "nothing"


@dataclass(frozen=True)
class Local:
    """This machine.

    Args:
        prepare: work that is done here before a device has its job; None is none.
    """

    prepare: Work | None = None

    def ready(self) -> None:
        """Do nothing: this machine is always ready. See `jobs.Executor`."""

    def run(self, jobs: Sequence[J], work: Work, progress: Progress) -> Iterator[JobOutcome[J]]:
        """Run the jobs: see `jobs.Executor`."""
        devices: dict[str, list[J]] = {}
        for job in jobs:
            if job.on:
                outcome = contained(job, self.prepare, progress) if self.prepare else JobOutcome(job, "done")
                if outcome.state == "done":
                    devices.setdefault(job.on, []).append(job)
                else:
                    yield outcome
        if devices:
            yield from _side_by_side(list(devices.values()), work, progress)
        for job in jobs:
            if not job.on:
                yield contained(job, work, progress)


def _side_by_side(queues: Sequence[Sequence[J]], work: Work, progress: Progress) -> Iterator[JobOutcome[J]]:
    """Run the devices in parallel, each one's jobs in order; yield outcomes as they arrive. An interrupt ends all."""
    over = threading.Event()
    ended: SimpleQueue[JobOutcome[J] | BaseException] = SimpleQueue()

    def one_after_another(queue: Sequence[J]) -> None:
        try:
            for job in queue:
                ended.put(contained(job, work, progress, over=over))
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
        address: `ray://HOST:PORT` of its client server, from anywhere; `auto` is the cluster of this machine.
        cpus: processors of a job in a place `CPU` or `GPU`; 0 for what the module says.
        retries: restarts of a job after a node died.
        patience: seconds that a job waits for a node of its place.
    """

    address: str = "auto"
    cpus: int = 0
    retries: int = 3
    patience: float = 60.0

    def ready(self) -> None:
        """Check the cluster: see `jobs.Executor`. Raises MissingDependency: ray; InputError: `ray-unreachable`."""
        _connected(self.address).shutdown()

    def run(self, jobs: Sequence[J], work: Work, progress: Progress) -> Iterator[JobOutcome[J]]:
        """Run the jobs: see `jobs.Executor`. Raises as `ready`; InputError: `node-differs`, `not-shared`."""
        ray = _connected(self.address)
        try:
            yield from self._run(ray, jobs, work, progress)
        finally:
            ray.shutdown()

    def _run(self, ray: Any, jobs: Sequence[J], work: Work, progress: Progress) -> Iterator[JobOutcome[J]]:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        needs = {place: self._needs(place, nodes) for place in {job.place for job in jobs}}
        able = [node for node in nodes if any(_offers(node, need) for need in needs.values())]
        _demand_alike(ray, able, sorted({path for job in jobs for path in job.paths}))
        task = ray.remote(max_retries=self.retries)(_on_a_node)
        waiting = {}
        for job in largest_first(jobs):
            need, seen = needs[job.place], stamps(job.paths)
            options = {"num_cpus": need.get(CPU, 0), "num_gpus": need.get(GPU, 0), "name": job.name}
            options["resources"] = {name: count for name, count in need.items() if name not in (CPU, GPU)}
            threads = int(need[CPU]) if CPU in need else None
            waiting[task.options(**options).remote(job, work, seen, threads)] = job
        on = words.plural(len(able), "node")
        offered = dict.fromkeys(needs, time.monotonic())
        progress.plan({"jobs": 1.0})  # in one share: they end in any order
        try:
            while waiting:
                ready, _ = ray.wait([*waiting], timeout=_LOOK)
                for reference in ready:
                    job = waiting.pop(reference)
                    outcome = _outcome(ray, reference, job)
                    yield outcome
                    ended = len(jobs) - len(waiting)
                    progress.at("jobs", ended / len(jobs), f"{ended} of {len(jobs)} on {on}")
                now, nodes = time.monotonic(), [node for node in ray.nodes() if node["Alive"]]
                offered |= {place: now for place in needs if any(_offers(node, needs[place]) for node in nodes)}
                for reference, job in [*waiting.items()]:
                    if now - offered[job.place] > self.patience:
                        del waiting[reference]
                        ray.cancel(reference, force=True)
                        yield JobOutcome.of(job, _nowhere(job), "missing")
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    def _needs(self, place: str, nodes: Sequence[Any]) -> dict[str, float]:
        """Return the resources of a node for a job in that place."""
        if place not in (CPU, GPU):
            return {place: 1}
        has = [(int(node["Resources"].get(CPU, 0)), int(node["Resources"].get(GPU, 0))) for node in nodes]
        if place == CPU:
            return {CPU: self.cpus or max((cpus for cpus, _ in has), default=1) or 1}
        return {GPU: 1, CPU: self.cpus or max(min((cpus // gpus for cpus, gpus in has if gpus), default=1), 1)}


def _offers(node: Any, need: Mapping[str, float]) -> bool:
    return all(node["Resources"].get(name, 0) >= count for name, count in need.items())


def _on_a_node(job: J, work: Work, seen: Mapping[str, str], threads: int | None) -> JobOutcome[J]:
    """Run a job; the number of threads that Ray set in this process is no measure of what it may use."""
    import ray

    node = f"{platform.node()} ({ray.get_runtime_context().get_node_id()[:6]})"
    if (other := _differing(seen, stamps([*seen]), node)) is not None:
        return replace(JobOutcome.of(job, other), node=node)
    return replace(contained(job, work, Progress(), threads=threads or machine.cores()), node=node)


def largest_first(jobs: Sequence[J]) -> list[J]:
    """Sort jobs by the bytes of their files: a long job that begins last keeps a cluster waiting for one node."""

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())

    return sorted(jobs, key=lambda job: -sum(size(Path(path)) for path in job.paths))


def stamps(paths: Sequence[str], *, times: bool = False) -> dict[str, str]:
    """Describe paths as seen here: nothing, a folder, the hash of a small file, or the size of another.

    Args:
        times: True to add the times of changes, and the files of folders; only for this machine.
    """

    def stamp(path: Path) -> str:
        if path.is_dir():
            inside = sorted(path.iterdir())
            files = "".join(f"{file.name} {stamp(file)}\n" for file in inside if file.is_file()) if times else ""
            return f"folder {hashlib.sha256(files.encode()).hexdigest()}"
        if not path.is_file():
            return _NOTHING
        status = path.stat()
        size = hashlib.sha256(limits.read(path)).hexdigest() if status.st_size <= _SMALL else str(status.st_size)
        return f"{size} {status.st_mtime_ns}" if times else size

    return {path: stamp(Path(path)) for path in paths}


def _differing(here: Mapping[str, str], there: Mapping[str, str], node: str) -> InputError | None:
    """Return the error of a node that does not see what this machine sees."""
    for path, stamp in here.items():
        if there[path] != stamp:
            value = "it sees nothing there" if there[path] == _NOTHING else "it sees something else there"
            rule = "all nodes see the model, the out folder and other files of a job under one path"
            remedy = "mount the folder there, or take the node out of the cluster: `ray stop` there"
            return InputError("not-shared", where=f"{path}, node {node}", value=value, rule=rule, remedy=remedy)
    return None


def _look(paths: Sequence[str]) -> tuple[str, str, dict[str, str]]:
    return platform.node(), __version__, stamps(paths)


def _demand_alike(ray: Any, nodes: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuse a node without quantkit, with another version, or that does not see the paths; a dead one is left to Ray.

    Raises InputError: `node-differs`, `not-shared`.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, here, asked = ray.remote(num_cpus=0, max_retries=0)(_look), stamps(paths), {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[task.options(scheduling_strategy=strategy).remote(paths)] = node
    for reference, node in asked.items():
        name, problem = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})", ""
        try:
            _, version, there = ray.get(reference, timeout=_ANSWER)
        except ray.exceptions.GetTimeoutError:
            problem = f"no answer in {_ANSWER:g} s"
        except ray.exceptions.RayTaskError:
            problem = "its Python cannot import this machine's quantkit"
        except ray.exceptions.RayError:
            continue
        else:
            problem = "" if version == __version__ else f"quantkit {version}"
        if problem:
            rule = f"all nodes have quantkit {__version__}, as this machine has"
            remedy = "there, in the Python of its Ray: pip install -e '.[compile,ray]'; or `ray stop`"
            raise InputError("node-differs", where=f"node {name}", value=problem, rule=rule, remedy=remedy)
        if (other := _differing(here, there, name)) is not None:
            raise other


def _outcome(ray: Any, reference: Any, job: J) -> JobOutcome[J]:
    """Return the outcome of a task, or of its failure."""
    try:
        outcome: JobOutcome[J] = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, Stopped):
            raise problem.cause from None
        return JobOutcome.of(job, InputError("internal-error", where=job.name, value=_first_line(problem.cause)))
    except ray.exceptions.RayError as problem:
        value, rule = _first_line(problem), "a job restarts after a node's death, a limited number of times"
        lost = InputError("node-died", where=job.name, value=value, rule=rule, remedy="see `ray status`")
        return JobOutcome.of(job, lost)
    return outcome


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def _nowhere(job: Job) -> InputError:
    rule = "a job needs a node that offers its place"
    named = "--resources='" + json.dumps({job.place: 1}) + "'"
    start = {GPU: "--num-gpus=1", CPU: "--num-cpus=N, or set fewer `cpus`"}
    remedy = f"start a node with it: ray start {start.get(job.place, named)}"
    value = f"no node of the cluster offers {job.place!r}"
    return InputError("no-machine", where=job.name, value=value, rule=rule, remedy=remedy)


def _connected(address: str) -> Any:
    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    purpose = f"the cluster {address}"
    try:
        import ray

        if address.startswith(_CLIENT):
            import grpc  # noqa: F401 (of Ray's client alone)
    except ImportError as problem:
        raise MissingDependency(str(problem.name), extra="ray", purpose=purpose) from None
    before = signal.getsignal(signal.SIGTERM)
    try:
        if host and port.isdecimal():
            # ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=_LOOK).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as problem:
        rule = "a cluster is named by the address of its client server, ray://HOST:10001, or is this machine's own"
        remedy = "start one: ray start --head"
        if address == "auto" and isinstance(problem, ConnectionError):  # ray names a flag of its own
            raise InputError("ray-unreachable", "ray", "no cluster runs on this machine", rule, remedy) from None
        raise InputError("ray-unreachable", address, _first_line(problem), rule, remedy) from None
    if threading.current_thread() is threading.main_thread():
        # ray turns SIGTERM into an exit without cleanup
        signal.signal(signal.SIGTERM, before)
    return ray


def named(name: str, *, where: str, prepare: Work | None = None, cpus: int = 0) -> Executor:
    """Return an executor: `local`, `ray` (the cluster of this machine) or `ray://HOST:PORT`.

    Args:
        prepare: see `Local`; `cpus`: see `Ray`.

    Raises InputError `usage`.
    """
    if name == "local":
        return Local(prepare)
    if name != "ray" and not _ADDRESS.fullmatch(name):
        rule = "a job runs here or on a Ray cluster; a device only measures: quantkit measure BUNDLE --on DEVICE"
        raise InputError("usage", where, name, rule, did_you_mean(name, ("local", "ray", "ray://HOST:10001")))
    return Ray("auto" if name == "ray" else name, cpus=cpus)
