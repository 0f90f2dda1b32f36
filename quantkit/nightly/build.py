"""One build of a night: compiled as `quantkit compile` does it, or found, and then its cells measured one by one.

Runs in a process of its own (`jobs.contained`). Each cell is committed to the store as soon as it is measured; one that
fails is a result with its error, and the next goes on.
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
from quantkit.measurement.size import folder_of, weight_bytes
from quantkit.measurement.timing.rounds import CANDIDATE, Task
from quantkit.nightly import items, there, timing
from quantkit.nightly.bundles import Bundles
from quantkit.nightly.config import Nightly
from quantkit.nightly.evidence import UNLOADABLE
from quantkit.nightly.items import Answered
from quantkit.nightly.jobs import BuildJob
from quantkit.nightly.records import BaselineKind, Item, NightCell, Result, Side
from quantkit.nightly.store import Store
from quantkit.nightly.timing import CellTimes
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.progress import Overall, Progress
from quantkit.pipeline.request import Request, runs_here
from quantkit.pipeline.verdict import export_of
from quantkit.target import Target

# of the whole job, as far as is known before: a compile takes longer than what a cell takes to be timed
_SHARES = {"compile": 60.0, "items": 10.0, "timing": 60.0}


def build(job: BuildJob, progress: Progress) -> None:
    """Measure the cells of a job that have no result yet.

    Raises:
        QuantkitError: what concerns all of the cells: the configuration, the store, the compile.
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
        with there.reached(on, request.target, progress, job.limit) as device:
            Measuring(config, store, job, request, progress, device).run(cells)
        return
    if (why := why_not_here(request.target)) is not None:
        for cell in cells:
            own = {"attempt": job.attempt, "error": why.as_dict(), **machine_now()}
            store.commit(Result.of(job.night, cell, "missing", **own))
        return
    Measuring(config, store, job, request, progress).run(cells)


def prepare(job: BuildJob, progress: Progress) -> None:
    """Compile what a device will measure. Raises as `build`."""
    config = _config(job)
    Bundles(config.at(config.bundles)).make(request_of(config, NightCell.of(job.cells[0])), progress)


def request_of(config: Nightly, cell: NightCell) -> Request:
    """The compile of a build. Raises InputError."""
    return Request.of(
        config.reference(cell.model),
        recipe=config.reference(cell.recipe),
        target=config.reference(cell.target),
        calibration=None if config.calibration is None else config.reference(config.calibration),
        changes=config.set_,
        speed=False,
    )


def why_not_here(target: Target) -> InputError | None:
    """Why cells of a target cannot be measured on this machine; None where they can."""
    here = machine.device()["name"]
    if target.kind == "cpu":
        if runs_here(target):
            return None
        value = f"{here}, {machine.isa()}"
    else:
        graphics, reason = machine.gpus()
        if any(target.arch.sm in (None, each["sm"]) for each in graphics):
            return None
        value = reason or ", ".join(f"{each['name']} (sm {each['sm']})" for each in graphics)
    return InputError(
        "no-machine",
        where=target.name,
        value=value,
        rule="a cell is measured on its target",
        remedy="run it there with --only, or on a cluster with --executor ray",
    )


class Measuring:
    """The cells of one build, one after another; see the module."""

    def __init__(
        self,
        config: Nightly,
        store: Store,
        job: BuildJob,
        request: Request,
        progress: Progress,
        device: there.Timer | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.job = job
        self.request = request
        self.progress = progress
        self.device = device
        self.bundles = Bundles(config.at(config.bundles))
        self._since = time.monotonic()

    def run(self, cells: Sequence[NightCell]) -> None:
        """All of them."""
        self.progress.plan(_SHARES)
        compiling = Overall(lambda share, words: self.progress.at("compile", share, words), self.progress.note)
        bundle, reused = self.bundles.make(self.request, compiling)
        flags = ["reused"] if reused else []
        failed = [check.name for check in bundle.manifest.checks if not check.ok and check.name.startswith("gate.")]
        flags += [f"gate-failed: {', '.join(failed)}"] if failed else []
        accepted = self.store.accepted(self.job.night, [cell.key for cell in cells])
        # the first that is done brings the items: one that is new has no baseline to bring them of, where others have
        cells = sorted(cells, key=lambda cell: cell.key not in accepted)
        with tempfile.TemporaryDirectory(prefix="quantkit-nightly-") as folder:
            samples = None
            if holds_graph(bundle):
                samples = Path(folder) / "samples.npz"
                items.samples(self.request, samples, max(cell.batch for cell in cells))
            for number, cell in enumerate(cells):
                self.progress.at("timing", number / len(cells), f"batch {cell.batch}")
                others = against(self.config, cell, bundle, accepted, self.bundles)
                try:
                    result, found, answered = self._measured(cell, bundle, others, samples)
                except Stopped:
                    raise
                except QuantkitError as problem:
                    result, found, answered = {"state": "failed", "error": problem.as_dict()}, CellTimes(), Answered([])
                said = [*flags, *result.pop("flags", ()), *answered.flags]
                if answered.items and cell.on:
                    said.append(f"scored here, not on {cell.on}")
                self._commit(cell, {**result, "flags": tuple(said)}, bundle, found, answered)

    def _measured(
        self, cell: NightCell, bundle: Bundle, others: Against, samples: Path | None
    ) -> tuple[dict[str, Any], CellTimes, Answered]:
        """What a cell's result says, its times, and its build's items where no other cell has brought them.

        The items of a build are set against the baseline of the first of its cells.
        """
        sides: dict[Side, Bundle] = {CANDIDATE: bundle, **others.bundles}
        found = self._timed(cell, sides, samples)
        missing = {**others.missing, **{side: InputError(**error).line() for side, error in found.unloadable.items()}}
        here = {side: each for side, each in sides.items() if side not in missing}
        answered = Answered([])
        if self.job.attempt == 1 and not self._has_items(cell.build):
            self.progress.at("items", 0.0)
            answered = items.answered(here, cell.program, self.request)
        baseline, release = here.get("baseline"), here.get("release")
        result = {
            "state": "done",
            "baseline_sha256": None if baseline is None else baseline.manifest.content_sha256,
            "baseline_kind": others.kind,
            "release_sha256": None if release is None else release.manifest.content_sha256,
            "bytes": _bytes(bundle, cell.program),
            "baseline_bytes": None if baseline is None else _bytes(baseline, cell.program),
            "flags": [f"{UNLOADABLE[side]}: {why}" for side, why in missing.items()],
        }
        return result, found, answered

    def _timed(self, cell: NightCell, sides: Mapping[Side, Bundle], samples: Path | None) -> CellTimes:
        budget = self.config.budget
        task = Task(
            rounds=budget.rounds,
            blocks=budget.most,
            seconds=budget.seconds,
            sides={side: str(each.path) for side, each in sides.items()},
            runtime=cell.program,
            batch=cell.batch,
            # another order in each night and attempt, the same where one is looked into again
            seed=zlib.crc32(f"{self.job.night} {cell.key} {self.job.attempt}".encode()),
            gpu=self.request.target.kind == "gpu",
            samples=None if samples is None else str(samples),
        )

        def at(share: float, words: str) -> None:
            self.progress.at("timing", share, f"batch {cell.batch}, {words}")

        return timing.run(task, at) if self.device is None else self.device.run(task, at)

    def _has_items(self, build: str) -> bool:
        """Whether a cell of the build that is done has brought its items."""
        before = self.store.results(self.job.night)
        return any((each.build, each.attempt, each.state) == (build, 1, "done") for each in before)

    def _commit(
        self, cell: NightCell, values: dict[str, Any], bundle: Bundle, found: CellTimes, answered: Answered
    ) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        own: dict[str, Any] = {"night": self.job.night, "attempt": self.job.attempt}
        self.store.commit(
            Result.of(
                cell=cell,
                **own,
                **values,
                content_sha256=bundle.manifest.content_sha256,
                seconds=seconds,
                **(machine_now(self.request.target) if self.device is None else self.device.now()),
            ),
            found.times(self.job.night, cell.key, self.job.attempt),
            [Item(build=cell.build, **own, **each) for each in answered.items],
        )


def machine_now(target: Target | None = None) -> dict[str, Any]:
    """`device` and `versions` of a result that was measured here."""
    versions = {"quantkit": __version__, **machine.versions()}
    device: dict[str, Any] = {**machine.device(), "isa": machine.isa(), "threads": machine.cores()}
    if target is not None and target.kind == "gpu":
        for each in machine.gpus()[0][:1]:
            device = {**machine.gpu(each["name"]), "sm": each["sm"]}
            versions["driver"] = each["driver"]
    return {"device": device, "versions": versions}


def _bytes(bundle: Bundle, runtime: str) -> int | None:
    """Of the weights that a runtime loads."""
    return weight_bytes(bundle.manifest.files, folder=folder_of(export_of(runtime))) or None


def _config(job: BuildJob) -> Nightly:
    """As it was when the night began: what it names was there then, on that machine."""
    config = Nightly.load(job.config, look=False)
    if config.sha256 != job.config_sha256:
        raise InputError(
            "nightly-changed",
            where=job.config,
            value=f"the file has the hash {config.sha256[:12]}",
            rule=f"the night {job.night} began with {job.config_sha256[:12]}",
            remedy="begin another night, or restore the file",
        )
    return config


@dataclass(frozen=True)
class Against:
    """What one cell is set against.

    Args:
        bundles: of the sides that there are: `baseline`, `release`.
        kind: of the baseline; None where there is none yet.
        missing: of a side that there should be and is not: why.
    """

    bundles: Mapping[Side, Bundle]
    kind: BaselineKind | None
    missing: Mapping[Side, str]


def against(
    config: Nightly, cell: NightCell, candidate: Bundle, accepted: Mapping[str, Result], bundles: Bundles
) -> Against:
    """Find and open them.

    Args:
        accepted: cell -> its result of the last night that passed.
        bundles: where those lie.
    """
    found: dict[Side, Bundle] = {}
    missing: dict[Side, str] = {}
    baseline = config.baseline_of(cell)
    last = accepted.get(cell.key)
    places: dict[Side, Path | None] = {}
    try:
        if baseline.bundle is not None:
            places["baseline"] = config.at(baseline.bundle)
        elif baseline.kind == "release":
            places["baseline"] = _release(config, candidate.manifest)
        elif last is not None and last.content_sha256 is not None:
            places["baseline"] = bundles.holding(last.content_sha256, besides=candidate.path)
            if places["baseline"] is None:
                missing["baseline"] = f"the bundle {last.content_sha256[:12]} of night {last.night} is gone"
    except InputError as problem:
        missing["baseline"] = problem.line()
    if config.release is not None and baseline.kind != "release":
        try:
            places["release"] = _release(config, candidate.manifest)
        except InputError as problem:
            missing["release"] = problem.line()
    for side, path in places.items():
        if path is None:
            continue
        try:
            found[side] = _opened(path, candidate.manifest)
        except QuantkitError as problem:
            missing[side] = problem.line()
    kind = baseline.kind if "baseline" in found or "baseline" in missing else None
    return Against(found, kind, missing)


def _opened(path: Path, candidate: Manifest) -> Bundle:
    """A bundle whose files are whole, of the candidate's model.

    Raises:
        InputError: those of `Bundle.load`, `hash-mismatch`, `models-differ`.
    """
    bundle = Bundle.load(path)
    bundle.demand_intact()
    ours, theirs = candidate.model.source.sha256, bundle.manifest.model.source.sha256
    if ours != theirs:
        rule = f"the candidate was made from {ours[:12]}, and what is compared are versions of one model"
        raise InputError("models-differ", where=str(path), value=f"made from {theirs[:12]}", rule=rule)
    return bundle


def _release(config: Nightly, candidate: Manifest) -> Path:
    """The bundle of the last release that was made by the candidate's recipe for its target.

    Raises:
        InputError: `release-missing`; those of `Bundle.load`.
    """
    assert config.release is not None
    place = config.at(config.release)
    if (place / MANIFEST).is_file():
        return place
    asked = _made_by(candidate)
    for path in sorted(place.glob(f"*/{MANIFEST}")):
        if _made_by(Manifest.read(path)) == asked:
            return path.parent
    raise InputError(
        "release-missing",
        where=str(place),
        value=f"no bundle of {' | '.join(map(str, asked))}",
        rule="the release holds a bundle of each build, by model, recipe and target",
        remedy="compile it there from the release, or leave `release` out",
    )


def _made_by(manifest: Manifest) -> tuple[str, object, object]:
    return manifest.model.name, manifest.recipe.get("name"), (manifest.target or {}).get("name")
