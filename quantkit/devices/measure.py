"""A finished bundle measured on a device: accuracy and speed there, in this machine's bundle.

What the float model is, which text is scored and what follows from raw times is found out here, by the same code as for
this machine; the device runs what it is sent. Each shape is put into the bundle as it comes, so that what was measured
is not lost with the connection.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.bundle import Bundle, Decision
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.devices import job as jobs
from quantkit.devices.answers import (
    CeilingSamples,
    Footprints,
    ShapeTimes,
    SideCosts,
    believed,
    invalid,
)
from quantkit.devices.asked.room import Ready, unasked
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import Job
from quantkit.devices.link import Link, carry
from quantkit.devices.probed import Probed
from quantkit.devices.sides.base import DeviceSides
from quantkit.devices.sides.graph import GraphSides
from quantkit.devices.sides.model import ModelSides
from quantkit.devices.sides.streamed import StreamedSides
from quantkit.measurement.operators.ceilings import joined, write_graphs
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing import latency
from quantkit.measurement.timing.clocks import Between, settings_of
from quantkit.measurement.timing.rows import Side, explained
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Timing
from quantkit.measurement.timing.shapes import Shape, TimingPlan
from quantkit.measurement.timing.speed import memory_row
from quantkit.passes import decision
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.keep import keep
from quantkit.pipeline.measure import original_of
from quantkit.pipeline.progress import Progress
from quantkit.runtimes import load_runtime

_TIMED = ("latency.decode_step", "latency.prefill")


def measure_on(
    bundle: Bundle,
    link: Link,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    runtime: str,
    calibration: str | None = None,
    plan: TimingPlan,
    speed: bool = True,
    resume: bool = False,
    decisions: list[Decision] | None = None,
    about: Probed | None = None,
    ready: Ready = unasked,
) -> list[Row]:
    """Score and time a bundle on a device; see `measure_bundle` for what is common to both.

    Args:
        plan: shapes and seconds.
        about: the device, as it was probed: an engine has to be for it.
        resume: shapes that the bundle has of this device are left out, and so is the score.
        ready: told the files of both models before anything is carried.

    Returns:
        the new rows, each with the device's name.

    Raises:
        InputError: `runtime-unsupported`; those of `StreamedSides`; what the device answers; those of `measure_bundle`
            and of the link.
        Stopped: `device-gone`; what came before is in the bundle.
    """
    progress, decisions = progress or Progress(), [] if decisions is None else decisions
    runner = load_runtime(runtime)
    bundle.demand_writable()
    bundle.demand_intact()
    side: DeviceSides
    if holds_graph(bundle):
        side = GraphSides(bundle, original_of(bundle, baseline, None, calibration), runtime)
    else:
        found = original_of(bundle, baseline, runner.floats, calibration)
        of = (found, runtime, calibration, decisions)
        side = StreamedSides(bundle, *of, about, link.name) if runner.floats is None else ModelSides(bundle, *of)
    if speed and side.untimed:
        decisions.append(decision("measure", "speed-not-measured", runtime, f"{link.name}: {side.untimed}"))
    speed = speed and side.timed
    stages = {"carrying": 30.0, "score": 60.0, **({"speed": 30.0 + plan.seconds} if speed else {})}
    progress.plan(stages)
    fitting = side.fitting(plan)
    ready(*side.needs(fitting if speed else None))
    kept = _kept(bundle, link.name, side.subject, runtime) if resume else []
    work = _Measuring(bundle, link, side, progress, kept)
    rows = work.scored()
    if speed:
        rows += work.timed(fitting)
    if not rows:
        work.finish()
        progress.note(f"nothing is missing of {link.name}")
    return rows


def measure_at(
    on: str,
    bundle: Bundle,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    wheelhouse: Path | None = None,
    **how: Any,
) -> list[Row]:
    """`measure_on` of a device's name or address. Raises InputError: those of `reach` as well."""
    from quantkit.devices.reached import reach

    with reach(on, wheelhouse=wheelhouse, runtimes=[how["runtime"]]) as found:
        return measure_on(bundle, found.link, baseline, progress, about=found.about, ready=found.ready(progress), **how)


def _kept(bundle: Bundle, on: str, against: str, runtime: str) -> list[Row]:
    """What the bundle has of a device and a runtime there against a baseline; a shape that was skipped has none, and is
    one against the model that the bundle was made from."""
    path, original = bundle.path / MEASUREMENTS, bundle.manifest.model.source.sha256
    rows = read_rows(path) if path.is_file() else []
    own = [row for row in rows if row.on == on and row.runtime == runtime]
    return [row for row in own if (row.baseline.subject if row.baseline else original) == against]


class _Measuring:
    """The jobs of one measuring."""

    def __init__(self, bundle: Bundle, link: Link, side: DeviceSides, progress: Progress, kept: Sequence[Row]) -> None:
        self.bundle, self.link, self.side, self.progress, self.kept = bundle, link, side, progress, kept
        self.runtime = side.runtime
        manifest, weights = bundle.manifest, side.weights()
        places = []
        for name, files, opened in zip(("subject", "baseline"), side.files(), side.opened(), strict=True):
            places.append(carry(link, name, files, self._carried) + opened)
        self.ours = jobs.PlacedModel(
            place=places[0],
            subject=manifest.content_sha256,
            format=side.own_form,
            weight_bytes=weights[0],
            built=dict(side.built),
            saved_bytes=side.saved,
        )
        self.theirs = jobs.PlacedModel(place=places[1], subject=side.subject, format=side.form, weight_bytes=weights[1])

    def _carried(self, share: float, words: str) -> None:
        self.progress.at("carrying", share, words)

    def _sent(self, name: str, arrays: Mapping[str, Any]) -> str:
        with tempfile.TemporaryDirectory(prefix="quantkit-sent-") as folder:
            file = Path(folder) / f"{name}.npz"
            np.savez(file, allow_pickle=False, **arrays)
            return f"{carry(self.link, name, {file.name: file}, self._carried)}/{file.name}"

    def _keep(self, rows: Sequence[Row], *, more: bool = False) -> None:
        keep(self.bundle, rows, None, self.runtime, self.side.subject, self.progress, more=more)

    def scored(self) -> list[Row]:
        """Accuracy there; none where it is kept, or where there is nothing to score against here."""
        data = self.side.data()
        if not data or any(row.name.startswith("accuracy.") for row in self.kept):
            return []
        work = self.side.scoring(self.ours, self.theirs, self._sent("scored", data))
        answers = CollectedCells.of(self.link, Job(work=work), self.progress, "score")
        with believed(answers.on):
            rows = self.side.rows(answers)
        flags = answers.about.flags
        rows = [row.model_copy(update={"flags": [*row.flags, *flags]}) for row in rows]
        self._keep(rows)
        return rows

    def timed(self, plan: TimingPlan) -> list[Row]:
        """Times there, shape by shape, and memory; what is kept is left out."""
        known = {(row.name, row.batch, *sorted((row.shape or {}).items())) for row in self.kept if row.name in _TIMED}
        shapes = [each for each in plan.shapes() if (each.name, each.batch, *sorted(each.sizes.items())) not in known]
        unweighed = self.side.of == "network" or self.side.on_gpu
        if not shapes and (unweighed or any(row.name == "memory.peak" for row in self.kept)):
            return []
        samples = None
        if (found := self.side.samples([each.batch for each in shapes])) is not None:
            samples = jobs.PlacedSamples(place=self._sent("samples", found[0]), macs=found[1], outputs=found[2])
        graphs = None
        if not self.side.on_gpu:
            with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
                graphs = carry(self.link, "ceilings", {path.name: path for path in write_graphs(Path(folder))})
        work = jobs.Measure(
            ours=self.ours,
            theirs=self.theirs,
            runtime=self.runtime,
            floats=self.side.floats,
            shapes=tuple(jobs.ShapeCell(kind=each.kind, batch=each.batch, size=each.size) for each in shapes),
            graphs=graphs,
            seconds=plan.seconds,
            cell_seconds=plan.cell_seconds,
            rounds=plan.rounds,
            seed=plan.seed,
            samples=samples,
            layers=tuple(self.side.layers),
        )
        asked = {each.cell: each for each in work.shapes}

        def found_one(answers: CollectedCells, cell: str) -> None:
            if cell in asked:
                self._keep(self._rows(answers, work, [asked[cell]]), more=True)

        answers = CollectedCells.of(self.link, Job(work=work), self.progress, "speed", found_one)
        rows = self._rows(answers, work, work.shapes)
        self._keep(rows)
        return rows

    def finish(self) -> None:
        """Verdict, page and card of what is kept: who was cut off behind the last shape has none."""
        if self.kept:
            self._keep(self.kept)

    def _rows(self, answers: CollectedCells, work: jobs.Measure, shapes: Sequence[jobs.ShapeCell]) -> list[Row]:
        """What the times say that have come."""
        about = answers.about
        device, rows, threads = about.device(answers.on, gpu=self.side.on_gpu), list[Row](), about.cores
        if shapes:
            with believed(answers.on):
                rows, threads = self._judged(answers, work, shapes)
        if "memory" in answers.cells:
            found = answers.one(Footprints, "memory")
            names = {"before", "resident", "peak", "new_tokens", "context"}
            if set(found.ours) != names or set(found.theirs) != names or not found.ours["peak"]:
                raise invalid(answers.on, "memory of other names")
            with believed(answers.on):
                rows.append(
                    memory_row(
                        found.ours,
                        found.theirs,
                        subjects=(self.ours.subject, self.theirs.subject),
                        runtime=self.runtime,
                        threads=threads,
                        device=device,
                        versions=about.versions,
                    )
                )
        return [row.model_copy(update={"flags": list(dict.fromkeys([*row.flags, *about.flags]))}) for row in rows]

    def _judged(
        self, answers: CollectedCells, work: jobs.Measure, shapes: Sequence[jobs.ShapeCell]
    ) -> tuple[list[Row], int]:
        """Of times, and the threads that they were taken with."""
        about, sides = answers.about, answers.one(SideCosts, "sides")
        limits = answers.one(CeilingSamples, "ceilings").ceilings
        if "ceilings-after" in answers.cells:
            after = answers.one(CeilingSamples, "ceilings-after").ceilings
            if len(after) != len(limits):
                raise invalid(answers.on, "other ceilings than before")
            limits = joined(limits, after)
        rows = latency.judged(
            [_timing(answers, shape, counted=not self.side.on_gpu) for shape in shapes],
            {
                SUBJECT: Side(sides.ours, self.ours.subject, sides.resident_bytes),
                BASELINE: Side(sides.theirs, self.theirs.subject),
            },
            limits,
            runtime=self.runtime,
            settings={**sides.settings, "cores": about.cores},
            device=about.device(answers.on, gpu=self.side.on_gpu),
            versions=about.versions | ({"driver": about.driver} if self.side.on_gpu else {}),
            cache=about.cache,
            seed=work.seed,
        )
        if sides.linears is not None:
            rows = explained(rows, sides.linears.get)
        threads = sides.settings.get("threads")
        return rows, threads if type(threads) is int and threads > 0 else about.cores


def _timing(answers: CollectedCells, shape: jobs.ShapeCell, *, counted: bool) -> Timing:
    """The times of one shape, if they fit together; `counted`: see `Between.of`. Raises InputError `answer-invalid`."""
    found: ShapeTimes = answers.one(ShapeTimes, shape.cell)
    if not found.skipped:
        found.demand_whole({SUBJECT, BASELINE}, f"{answers.on}, {shape.cell}")
    state = Between.of(found.before, found.after, counted=counted)
    return Timing(
        {} if found.skipped else {side: np.asarray(times) for side, times in found.seconds.items()},
        rounds=tuple(found.rounds),
        shape=Shape(shape.kind, shape.batch, shape.size),
        skipped=found.skipped,
        settings=settings_of(found.before, found.after),
        flags=("throttled",) if state.throttled else (),
    )
