"""Run one build of a night: compile it like `quantkit compile`, or reuse its bundle, then measure its cells one by one.

Runs in a process of its own (`jobs.contained`). Each cell is committed to the store as soon as it is measured. A cell
that fails is stored with its error, and the next one runs.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import Bundle, Manifest
from quantkit.bundle.manifest import MANIFEST
from quantkit.devices.named import NamedDevice
from quantkit.errors import InputError, QuantkitError, Stopped
from quantkit.measurement import load as loads
from quantkit.measurement.size import folder_of, weight_bytes
from quantkit.measurement.timing.rounds import CANDIDATE, Task
from quantkit.nightly import items, timing
from quantkit.nightly.bundles import Bundles
from quantkit.nightly.config import Nightly
from quantkit.nightly.evidence import UNASKED, UNLOADABLE
from quantkit.nightly.items import Answered
from quantkit.nightly.records import BaselineKind, BuildJob, Item, NightCell, Result, Side
from quantkit.nightly.store import Store
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.measure import measure_bundle
from quantkit.pipeline.progress import Overall, Progress
from quantkit.pipeline.request import Request, runs_here
from quantkit.pipeline.tasks import measure_tasks
from quantkit.pipeline.verdict import export_of
from quantkit.runtimes import load_runtime
from quantkit.target import Target

# seconds of each stage, for the progress bar
_SHARES = {"compile": 60.0, "items": 10.0, "timing": 60.0}


def build(job: BuildJob, progress: Progress) -> None:
    """Measure the cells of a job that have no result yet.

    Raises:
        QuantkitError: an error that concerns all cells: configuration, store, compile.
        Stopped: interrupted, or the disk is full.
    """
    config = _config(job)
    store = Store.open(config.at(config.store))
    cells = [NightCell.of(key) for key in job.cells if key not in store.committed(job.night, job.attempt)]
    if not cells:
        return
    request = request_of(config, cells[0])
    if job.on:
        on = NamedDevice.read(job.device, where=job.on)
        with timing.reached(on, request.target, progress, job.limit) as device:
            _Measuring(config, store, job, request, progress, device).run(cells)
    elif (why := why_not_here(request.target)) is not None:
        for cell in cells:
            own = {"attempt": job.attempt, "error": why.as_dict(), **machine_now()}
            store.commit(Result.of(job.night, cell, "missing", **own))
    else:
        _Measuring(config, store, job, request, progress).run(cells)


def prepare(job: BuildJob, progress: Progress) -> None:
    """Compile a bundle for measurement on a device. Raises as `build`."""
    config = _config(job)
    Bundles(config.at(config.bundles)).make(request_of(config, NightCell.of(job.cells[0])), progress)


def request_of(config: Nightly, cell: NightCell) -> Request:
    """Return the compile request of a build. Raises InputError."""
    return config.request(cell.model, cell.recipe, cell.target, speed=False)


def why_not_here(target: Target) -> InputError | None:
    """Return the reason for not measuring a target's cells on this machine; None if it can."""
    if target.kind == "cpu":
        if runs_here(target):
            return None
        value = f"{machine.device()['name']}, {machine.isa()}"
    else:
        graphics, reason = machine.gpus()
        if any(target.arch.sm in (None, gpu["sm"]) for gpu in graphics):
            return None
        value = reason or ", ".join(f"{gpu['name']} (sm {gpu['sm']})" for gpu in graphics)
    remedy = "run the cell there with --only, or on a cluster with --executor ray"
    rule = "a cell is measured on its target"
    return InputError("no-machine", where=target.name, value=value, rule=rule, remedy=remedy)


@dataclass
class _Measuring:
    """Cells of one build, one after another; see the module."""

    config: Nightly
    store: Store
    job: BuildJob
    request: Request
    progress: Progress
    device: timing.Timer | None = None

    def run(self, cells: Sequence[NightCell]) -> None:
        since = time.monotonic()
        self.progress.plan(_SHARES)
        self.bundles = Bundles(self.config.at(self.config.bundles))
        compiling = Overall(lambda share, words: self.progress.at("compile", share, words), self.progress.note)
        bundle, reused = self.bundles.make(self.request, compiling)
        flags = ["reused"] if reused else []
        failed = [check.name for check in bundle.manifest.checks if not check.ok and check.name.startswith("gate.")]
        flags += [f"gate-failed: {', '.join(failed)}"] if failed else []
        accepted = self.store.accepted(self.job.night, [cell.key for cell in cells])
        # the first finished cell scores the items, so cells with a baseline come before new ones
        cells = sorted(cells, key=lambda cell: cell.key not in accepted)
        with tempfile.TemporaryDirectory(prefix="quantkit-nightly-") as folder:
            samples = None
            if holds_graph(bundle):
                samples = Path(folder) / "samples.npz"
                items.samples(self.request, samples, max(cell.batch for cell in cells))
            for number, cell in enumerate(cells):
                self.progress.at("timing", number / len(cells), f"batch {cell.batch}")
                others = against(self.config, cell, bundle, accepted, self.bundles)
                rows: timing.Taken = []
                answered = Answered([])
                try:
                    result, rows, answered = self._measured(cell, bundle, others, samples)
                except Stopped:
                    raise
                except QuantkitError as problem:
                    result = {"state": "failed", "error": problem.as_dict()}
                notes = [*flags, *result.pop("flags", ()), *answered.flags]
                notes += [f"scored here, not on {cell.on}"] if answered.items and cell.on else []
                now = machine_now(self.request.target) if self.device is None else self.device.now()
                seconds, since = time.monotonic() - since, time.monotonic()
                own: dict[str, Any] = {"night": self.job.night, "attempt": self.job.attempt}
                result |= {"content_sha256": bundle.manifest.content_sha256, "seconds": seconds, **now}
                self.store.commit(
                    Result.of(cell=cell, **own, **result, flags=tuple(notes)),
                    timing.times(rows, self.job.night, cell.key, self.job.attempt),
                    [Item(build=cell.build, **own, **item) for item in answered.items],
                )

    def _measured(
        self, cell: NightCell, bundle: Bundle, others: Against, samples: Path | None
    ) -> tuple[dict[str, Any], timing.Taken, Answered]:
        """Measure a cell: its result, its times, and the build's items unless another cell has them.

        The items of a build are compared with the baseline of the first of its cells.
        """
        sides: dict[Side, Bundle] = {CANDIDATE: bundle, **others.bundles}
        if load_runtime(cell.program).own is not None:
            sides = self._scored(cell, sides)
            rows, served = self._loaded(cell, sides)
        else:
            rows, served = self._timed(cell, sides, samples), []
        lost = {side: InputError(**error).line() for side, error in timing.unloadable(rows).items()}
        missing = {**others.missing, **lost}
        here = {side: other for side, other in sides.items() if side not in missing}
        answered, recovery = Answered([]), None
        if self.job.attempt == 1 and not self._has_items(cell.build):
            self.progress.at("items", 0.0)
            answered = items.answered(here, cell.program, self.request)
            recovery, unasked = self._recovered(cell, bundle)
            served += unasked
        hashes = {side: other.manifest.content_sha256 for side, other in here.items()}
        result = {
            "state": "done",
            "baseline_sha256": hashes.get("baseline"),
            "baseline_kind": others.kind,
            "release_sha256": hashes.get("release"),
            "bytes": _bytes(bundle, cell.program),
            "baseline_bytes": _bytes(here["baseline"], cell.program) if "baseline" in here else None,
            "recovery": recovery,
            "flags": [*served, *(f"{UNLOADABLE[side]}: {why}" for side, why in missing.items())],
        }
        return result, rows, answered

    def _recovered(self, cell: NightCell, bundle: Bundle) -> tuple[dict[str, Any] | None, list[str]]:
        """Ask the candidate and its original the night's tasks: recovery by score, or a flag with the obstacle."""
        if (question := self.config.question()) is None:
            return None, []
        original = None if self.request.adapters else self.request.model  # a merged one is found by its hashes
        asking = Overall(lambda share, words: self.progress.at("items", share, words), self.progress.note)
        try:
            rows = measure_tasks(bundle, question, original, asking, runtime=cell.program)
        except QuantkitError as problem:
            return None, [f"{UNASKED}: {problem.line()}"]
        return {
            f"{row.settings['task']} {row.settings['metric']}": [base.ratio, *base.ratio_ci95, row.n]
            for row in rows
            if (base := row.baseline) is not None and base.ratio is not None and base.ratio_ci95
        }, []

    def _scored(self, cell: NightCell, sides: Mapping[Side, Bundle]) -> dict[Side, Bundle]:
        """Score each side in a runtime without steps to time, unless it was already. Raises as `measure_bundle`."""
        if self.device is not None:
            rule, remedy = "a night scores and loads it on this machine", f"leave out `on` for runtime {cell.program}"
            raise InputError("runtime-unsupported", cell.on, cell.program, rule, remedy)
        for bundle in sides.values():
            if not (bundle.path / f"items-{cell.program}.safetensors").is_file():
                original = None if self.request.adapters else self.request.model  # a merged one is found by its hashes
                measure_bundle(bundle, original, self.progress, runtime=cell.program, speed=False)
        return {side: Bundle.load(bundle.path) for side, bundle in sides.items()}

    def _loaded(self, cell: NightCell, sides: Mapping[Side, Bundle]) -> tuple[timing.Taken, list[str]]:
        """Load each side's server in turns, if the night asks for it: times of requests, and the goodput in words."""
        from quantkit.pipeline.load import in_turns

        if (asked := self.config.load_) is None:
            return [], []
        folders = {str(side): load_runtime(cell.program).checked(bundle) for side, bundle in sides.items()}
        lost: list[dict[str, Any]] = []
        while True:
            order = [*folders] if zlib.crc32(f"{self.job.night} {cell.key}".encode()) % 2 else [*reversed(folders)]
            try:
                turns = [*order, *reversed(order)]
                answers, _ = in_turns(
                    asked.asked(), folders, turns, lambda share, words: self.progress.at("timing", share, words)
                )
                break
            except InputError as problem:
                refused = [side for side, folder in folders.items() if problem.where == str(folder)]
                if not refused or refused[0] == CANDIDATE:
                    raise
                del folders[refused[0]]
                lost.append({"unloadable": refused[0], "error": problem.as_dict()})
        return [*lost, timing.of_turns(loads.paired(answers, asked.gate))], loads.served_words(asked.asked(), answers)

    def _timed(self, cell: NightCell, sides: Mapping[Side, Bundle], samples: Path | None) -> timing.Taken:
        budget = self.config.budget
        task = Task(
            rounds=budget.rounds,
            blocks=budget.most,
            seconds=budget.seconds,
            sides={side: str(bundle.path) for side, bundle in sides.items()},
            runtime=cell.program,
            batch=cell.batch,
            # differs between nights and attempts, and repeats when one is repeated
            seed=zlib.crc32(f"{self.job.night} {cell.key} {self.job.attempt}".encode()),
            gpu=self.request.target.kind == "gpu",
            samples=None if samples is None else str(samples),
        )

        def at(share: float, words: str) -> None:
            self.progress.at("timing", share, f"batch {cell.batch}, {words}")

        return timing.run(task, at) if self.device is None else self.device.run(task, at)

    def _has_items(self, build: str) -> bool:
        """Tell whether a finished cell of the build has stored its items."""
        before = self.store.results(self.job.night)
        return any((result.build, result.attempt, result.state) == (build, 1, "done") for result in before)


def machine_now(target: Target | None = None) -> dict[str, Any]:
    """Return `device` and `versions` of a result measured here."""
    versions = {"quantkit": __version__, **machine.versions()}
    device: dict[str, Any] = {**machine.device(), "isa": machine.isa(), "threads": machine.cores()}
    if target is not None and target.kind == "gpu":
        for gpu in machine.gpus()[0][:1]:
            device = {**machine.gpu(gpu["name"]), "sm": gpu["sm"]}
            versions["driver"] = gpu["driver"]
    return {"device": device, "versions": versions}


def _bytes(bundle: Bundle, runtime: str) -> int | None:
    """Return the bytes of the weights that a runtime loads."""
    return weight_bytes(bundle.manifest.files, folder=folder_of(export_of(runtime))) or None


def _config(job: BuildJob) -> Nightly:
    """Read the configuration, unchanged since the night began."""
    config = Nightly.load(job.config, look=False)
    if config.sha256 != job.config_sha256:
        value, remedy = f"the file has the hash {config.sha256[:12]}", "start another night, or restore the file"
        rule = f"the night {job.night} began with {job.config_sha256[:12]}"
        raise InputError("nightly-changed", where=job.config, value=value, rule=rule, remedy=remedy)
    return config


@dataclass(frozen=True)
class Against:
    """Sides to compare a cell with.

    Args:
        bundles: bundles of `baseline` and `release`, if present.
        kind: kind of the baseline; None if there is none yet.
        missing: expected but missing sides, with the reason.
    """

    bundles: Mapping[Side, Bundle]
    kind: BaselineKind | None
    missing: Mapping[Side, str]


def against(
    config: Nightly, cell: NightCell, candidate: Bundle, accepted: Mapping[str, Result], bundles: Bundles
) -> Against:
    """Find and open the sides to compare a cell with.

    Args:
        accepted: cell -> its result in the last night that passed.
        bundles: folder of the night's bundles.
    """
    opened: dict[Side, Bundle] = {}
    missing: dict[Side, str] = {}
    choice, last = config.baseline_of(cell), accepted.get(cell.key)
    manifest = candidate.manifest

    def baseline() -> Path | None:
        if choice.bundle is not None:
            return config.at(choice.bundle)
        if choice.kind == "release":
            return _release(config, manifest)
        if last is None or last.content_sha256 is None:
            return None
        path = bundles.holding(last.content_sha256, besides=candidate.path)
        if path is None:
            missing["baseline"] = f"the bundle {last.content_sha256[:12]} of night {last.night} is gone"
        return path

    def release() -> Path | None:
        return _release(config, manifest) if config.release is not None and choice.kind != "release" else None

    sides: dict[Side, Any] = {"baseline": baseline, "release": release}
    for side, find in sides.items():
        try:
            if (path := find()) is not None:
                opened[side] = _opened(path, manifest)
        except QuantkitError as problem:
            missing[side] = problem.line()
    kind = choice.kind if "baseline" in opened or "baseline" in missing else None
    return Against(opened, kind, missing)


def _opened(path: Path, candidate: Manifest) -> Bundle:
    """Open an intact bundle of the candidate's model.

    Raises InputError: those of `Bundle.load`, `hash-mismatch`, `models-differ`.
    """
    bundle = Bundle.load(path)
    bundle.demand_intact()
    ours, theirs = candidate.model.source.sha256, bundle.manifest.model.source.sha256
    if ours != theirs:
        rule = f"both sides need one model; the candidate was made from {ours[:12]}"
        raise InputError("models-differ", where=str(path), value=f"made from {theirs[:12]}", rule=rule)
    return bundle


def _release(config: Nightly, candidate: Manifest) -> Path:
    """Find the last release's bundle with the candidate's model, recipe and target.

    Raises InputError: `release-missing`; those of `Bundle.load`.
    """
    assert config.release is not None
    place, asked = config.at(config.release), _made_by(candidate)
    if (place / MANIFEST).is_file():
        return place
    for path in sorted(place.glob(f"*/{MANIFEST}")):
        if _made_by(Manifest.read(path)) == asked:
            return path.parent
    value, rule = (
        f"no bundle of {' | '.join(map(str, asked))}",
        "a release has a bundle of each model, recipe and target",
    )
    remedy = "compile it there with the release, or remove `release`"
    raise InputError("release-missing", where=str(place), value=value, rule=rule, remedy=remedy)


def _made_by(manifest: Manifest) -> tuple[str, object, object]:
    return manifest.model.name, manifest.recipe.get("name"), (manifest.target or {}).get("name")
