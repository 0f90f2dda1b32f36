"""A finished bundle measured on a device: accuracy and speed there, in this machine's bundle.

What the float model is, which text is scored and what follows from raw times is found out here, by the same code as for
this machine; the device runs what it is sent. Each shape is put into the bundle as it comes, so that what was measured
is not lost with the connection.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.bundle import Bundle, Decision
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.devices.answers import CeilingSamples, Cells, Footprints, ShapeTimes, SideCosts, believed, invalid
from quantkit.devices.reached import Reached
from quantkit.devices.sides import DeviceSides, GraphSides, ModelSides, StreamedSides
from quantkit.devices.there.times import cell_of
from quantkit.measurement.operators.ceilings import joined, write_graphs
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing import latency
from quantkit.measurement.timing.clocks import Between, settings_of
from quantkit.measurement.timing.latency import Side, explained
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Shape, Timing, TimingPlan
from quantkit.measurement.timing.speed import memory_row
from quantkit.passes import decision
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.measure import original_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import keep
from quantkit.runtimes import load_runtime

_TIMED = ("latency.decode_step", "latency.prefill")


def measure_on(
    bundle: Bundle,
    reached: Reached,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    runtime: str,
    calibration: str | None = None,
    plan: TimingPlan,
    speed: bool = True,
    resume: bool = False,
    decisions: list[Decision] | None = None,
) -> list[Row]:
    """Score and time a bundle on a device; see `measure_bundle` for what is common to both.

    Args:
        plan: shapes and seconds.
        resume: shapes that the bundle has of this device are left out, and so is the score.

    Returns:
        the new rows, each with the device's name.

    Raises:
        InputError: `runtime-unsupported`; those of `StreamedSides`; what the device answers; those of `measure_bundle`
            and of the link.
        Stopped: `device-gone`; what came before is in the bundle.
    """
    progress, decisions = progress or Progress(), [] if decisions is None else decisions
    runner, name = load_runtime(runtime), reached.link.name
    bundle.demand_writable()
    bundle.demand_intact()
    side: DeviceSides
    if holds_graph(bundle):
        side = GraphSides(bundle, original_of(bundle, baseline, None, calibration), runtime)
    else:
        of = (original_of(bundle, baseline, runner.floats, calibration), runtime, calibration, decisions)
        side = StreamedSides(bundle, *of, reached.about, name) if runner.floats is None else ModelSides(bundle, *of)
    if speed and side.untimed:
        decisions.append(decision("measure", "speed-not-measured", runtime, f"{name}: {side.untimed}"))
    speed = speed and side.timed
    stages = {"carrying": 30.0, "score": 60.0, **({"speed": 30.0 + plan.seconds} if speed else {})}
    progress.plan(stages)
    fitting = side.fitting(plan)
    reached.prepare(*side.needs(fitting if speed else None), progress=partial(progress.at, "carrying"))
    kept = _kept(bundle, name, side.subject, runtime) if resume else []
    work = _Measuring(bundle, reached, side, progress, kept)
    rows = work.scored()
    if speed:
        rows += work.timed(fitting)
    if not rows:
        work.finish()
        progress.note(f"nothing is missing of {name}")
    return rows


def _kept(bundle: Bundle, on: str, against: str, runtime: str) -> list[Row]:
    """What the bundle has of a device and a runtime there against a baseline; a shape that was skipped has none, and is
    one against the model that the bundle was made from."""
    path, original = bundle.path / MEASUREMENTS, bundle.manifest.model.source.sha256
    rows = read_rows(path) if path.is_file() else []
    own = [row for row in rows if row.on == on and row.runtime == runtime]
    return [row for row in own if (row.baseline.subject if row.baseline else original) == against]


class _Measuring:
    """The work of one measuring."""

    def __init__(
        self, bundle: Bundle, reached: Reached, side: DeviceSides, progress: Progress, kept: Sequence[Row]
    ) -> None:
        self.bundle, self.link, self.side, self.progress, self.kept = bundle, reached.link, side, progress, kept
        self.runtime, self.subject = side.runtime, bundle.manifest.content_sha256
        self._carried, weights = partial(progress.at, "carrying"), side.weights()
        places = []
        for name, files, opened in zip(("subject", "baseline"), side.files(), side.opened(), strict=True):
            places.append(self.link.carry(name, files, self._carried) + opened)
        ours = {"place": places[0], "subject": self.subject, "format": side.own_form, "weight_bytes": weights[0]}
        ours |= {"built": dict(side.built), "saved_bytes": side.saved}
        theirs = {"place": places[1], "subject": side.subject, "format": side.form, "weight_bytes": weights[1]}
        self.job: dict[str, Any] = {"ours": ours, "theirs": theirs, "runtime": self.runtime, "floats": side.floats}

    def _sent(self, name: str, arrays: Mapping[str, Any]) -> str:
        with tempfile.TemporaryDirectory(prefix="quantkit-sent-") as folder:
            file = Path(folder) / f"{name}.npz"
            np.savez(file, allow_pickle=False, **arrays)
            return f"{self.link.carry(name, {file.name: file}, self._carried)}/{file.name}"

    def _keep(self, rows: Sequence[Row], *, more: bool = False) -> None:
        keep(self.bundle, rows, None, self.runtime, self.side.subject, self.progress, more=more)

    def scored(self) -> list[Row]:
        """Accuracy there; none where it is kept, or where there is nothing to score against here."""
        data = self.side.data()
        if not data or any(row.name.startswith("accuracy.") for row in self.kept):
            return []
        floats = None if self.side.streams else self.side.floats
        job = {**self.job, "of": self.side.of, "floats": floats, "data": self._sent("scored", data)}
        job |= self.side.pooled()
        answers = self.link.run("accuracy", job, partial(self.progress.at, "score"), note=self.progress.note)
        with believed(answers.on):
            rows = self.side.rows(answers)
        rows = [row.model_copy(update={"flags": [*row.flags, *answers.about.flags]}) for row in rows]
        self._keep(rows)
        return rows

    def timed(self, plan: TimingPlan) -> list[Row]:
        """Times there, shape by shape, and memory; what is kept is left out."""
        known = {(row.name, row.batch, *sorted((row.shape or {}).items())) for row in self.kept if row.name in _TIMED}
        shapes = [
            shape for shape in plan.shapes() if (shape.name, shape.batch, *sorted(shape.sizes.items())) not in known
        ]
        unweighed = self.side.of == "network" or self.side.on_gpu
        if not shapes and (unweighed or any(row.name == "memory.peak" for row in self.kept)):
            return []
        samples = graphs = None
        if (found := self.side.samples([shape.batch for shape in shapes])) is not None:
            samples = {"file": self._sent("samples", found[0]), "macs": found[1], "outputs": found[2]}
        if not self.side.on_gpu:
            with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
                graphs = self.link.carry("ceilings", {path.name: path for path in write_graphs(Path(folder))})
        job = {**self.job, "shapes": [asdict(shape) for shape in shapes], "graphs": graphs, "samples": samples}
        job |= {name: getattr(plan, name) for name in ("seconds", "cell_seconds", "rounds", "seed")}
        job |= {"layers": [layer.model_dump(mode="json") for layer in self.side.layers]}
        asked = {cell_of(shape): shape for shape in shapes}

        def come(answers: Cells, cell: str) -> None:
            if cell in asked:
                self._keep(self._rows(answers, plan.seed, [asked[cell]]), more=True)

        report = partial(self.progress.at, "speed")
        answers = self.link.run("measure", job, report, row=come, note=self.progress.note)
        rows = self._rows(answers, plan.seed, shapes)
        self._keep(rows)
        return rows

    def finish(self) -> None:
        """Verdict, page and card of what is kept: who was cut off behind the last shape has none."""
        if self.kept:
            self._keep(self.kept)

    def _rows(self, answers: Cells, seed: int, shapes: Sequence[Shape]) -> list[Row]:
        """What the times say that have come."""
        about = answers.about
        device, rows, threads = about.device(answers.on, gpu=self.side.on_gpu), list[Row](), about.cores
        if shapes:
            with believed(answers.on):
                rows, threads = self._judged(answers, seed, shapes)
        if "memory" in answers:
            found = answers.one(Footprints, "memory")
            names = {"before", "resident", "peak", "new_tokens", "context"}
            if set(found.ours) != names or set(found.theirs) != names or not found.ours["peak"]:
                raise invalid(answers.on, "memory of other names")
            with believed(answers.on):
                rows.append(
                    memory_row(
                        found.ours,
                        found.theirs,
                        subjects=(self.subject, self.side.subject),
                        runtime=self.runtime,
                        threads=threads,
                        device=device,
                        versions=about.versions,
                    )
                )
        return [row.model_copy(update={"flags": list(dict.fromkeys([*row.flags, *about.flags]))}) for row in rows]

    def _judged(self, answers: Cells, seed: int, shapes: Sequence[Shape]) -> tuple[list[Row], int]:
        """Of times, and the threads that they were taken with."""
        about, sides = answers.about, answers.one(SideCosts, "sides")
        limits = answers.one(CeilingSamples, "ceilings").ceilings
        if "ceilings-after" in answers:
            after = answers.one(CeilingSamples, "ceilings-after").ceilings
            if len(after) != len(limits):
                raise invalid(answers.on, "other ceilings than before")
            limits = joined(limits, after)
        rows = latency.judged(
            [_timing(answers, shape, counted=not self.side.on_gpu) for shape in shapes],
            {
                SUBJECT: Side(sides.ours, self.subject, sides.resident_bytes),
                BASELINE: Side(sides.theirs, self.side.subject),
            },
            limits,
            runtime=self.runtime,
            settings={**sides.settings, "cores": about.cores},
            device=about.device(answers.on, gpu=self.side.on_gpu),
            versions=about.versions | ({"driver": about.driver} if self.side.on_gpu else {}),
            cache=about.cache,
            seed=seed,
        )
        if sides.linears is not None:
            rows = explained(rows, sides.linears.get)
        threads = sides.settings.get("threads")
        return rows, threads if type(threads) is int and threads > 0 else about.cores


def _timing(answers: Cells, shape: Shape, *, counted: bool) -> Timing:
    """The times of one shape, if they fit together; `counted`: see `Between.of`. Raises InputError `answer-invalid`."""
    found: ShapeTimes = answers.one(ShapeTimes, cell_of(shape))
    if not found.skipped:
        found.demand_whole({SUBJECT, BASELINE}, f"{answers.on}, {cell_of(shape)}")
    state = Between.of(found.before, found.after, counted=counted)
    return Timing(
        {} if found.skipped else {side: np.asarray(times) for side, times in found.seconds.items()},
        rounds=tuple(found.rounds),
        shape=shape,
        skipped=found.skipped,
        settings=settings_of(found.before, found.after),
        flags=("throttled",) if state.throttled else (),
    )
