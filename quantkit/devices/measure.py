"""Measure a finished bundle on a device: accuracy and speed there, rows in the bundle here.

This machine chooses the float model and the text to score, and interprets the raw times, with the same code as for
local measurements; the device runs the jobs that it receives. Each shape is written to the bundle as it arrives, so a
lost connection loses no results.
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
from quantkit.devices.answers import (
    Cells,
    Footprints,
    LoadedPart,
    SessionSettings,
    SideCosts,
    Times,
    believed,
    ceilings_of,
    invalid,
)
from quantkit.devices.named import Reached
from quantkit.devices.sides import (
    APART,
    ApartSides,
    GraphSides,
    ModelSides,
    StreamedSides,
    files_below,
    largest,
)
from quantkit.devices.there import cell_of
from quantkit.measurement.load import ServerLoad
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing import latency
from quantkit.measurement.timing.latency import Side, explained
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Shape, TimingPlan
from quantkit.measurement.timing.speed import SpeedSide, memory_row
from quantkit.passes import decision
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.measure import original_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import keep
from quantkit.runtimes import load_runtime
from quantkit.runtimes.child import Report
from quantkit.runtimes.vllm import OWN
from quantkit.runtimes.vllm.inside import LISTS as _OF_A_REQUEST

VLLM, LISTS = OWN.name, (*_OF_A_REQUEST, "failed")
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
    """Score and time a bundle on a device; `measure_bundle` explains the shared parts.

    Args:
        plan: shapes and seconds.
        resume: True to skip shapes, and the score, that the bundle already has from this device.

    Returns:
        The new rows, each with the device's name.

    Raises:
        InputError: `runtime-unsupported`; those of `StreamedSides`, of `measure_bundle` and of the link.
        Stopped: `device-gone`; earlier results are in the bundle.
    """
    progress, decisions = progress or Progress(), [] if decisions is None else decisions
    runner, name = load_runtime(runtime), reached.link.name
    bundle.demand_writable()
    bundle.demand_intact()
    side: GraphSides | ModelSides | StreamedSides | ApartSides
    if holds_graph(bundle):
        side = GraphSides(bundle, original_of(bundle, baseline, None, calibration), runtime)
    elif runner.own is not None:
        original = original_of(bundle, baseline, None, calibration)
        side = ApartSides(bundle, original, runtime, calibration, decisions, reached.about)
    else:
        of = (original_of(bundle, baseline, runner.floats, calibration), runtime, calibration, decisions)
        side = StreamedSides(bundle, *of, reached.about, name) if runner.floats is None else ModelSides(bundle, *of)
    if speed and side.untimed:
        decisions.append(decision("measure", "speed-not-measured", runtime, f"{name}: {side.untimed}"))
    speed = speed and side.timed
    progress.plan({"carrying": 30.0, "score": 60.0, **({"speed": 30.0 + plan.seconds} if speed else {})})
    fitting = side.fitting(plan)
    reached.prepare(*side.needs(fitting if speed else None), progress=partial(progress.at, "carrying"))
    kept = _kept(bundle, name, side.subject, runtime) if resume else []
    work = _Measuring(bundle, reached, side, progress, kept)
    rows = work.scored()
    if speed:
        rows += work.timed(fitting)
    if not rows:
        if kept:  # an interruption after the last shape left no verdict, page and card
            work.keep(kept)
        progress.note(f"the bundle already has everything from {name}")
    return rows


def loaded_on(
    reached: Reached, load: ServerLoad, folders: Mapping[str, Path], order: Sequence[str], report: Report
) -> tuple[list[Any], dict[str, Any]]:
    """Load servers on a device, as `pipeline.load.in_turns` does here.

    Raises InputError: `answer-invalid`; those of `in_turns` and of the link. Stopped: `device-gone`.
    """
    link, files = reached.link, {side: files_below(folder) for side, folder in folders.items()}
    reached.prepare(largest(files.values()), float(APART), report)
    places = {side: link.carry("checkpoint", of, report) for side, of in files.items()}
    job = {"runtime": VLLM, "load": asdict(load), "folders": places, "order": list(order)}
    answers = link.run("load", job, report)
    about, session = answers.about, answers.one(SessionSettings, "settings")
    joined: dict[str, dict[str, Any]] = {}
    for cell, part in answers.all(LoadedPart, "load-"):
        known = joined.setdefault(cell.rpartition("-")[0], {})
        for name, value in part.model_dump(exclude_defaults=True).items():
            known[name] = known.get(name, []) + value if isinstance(value, list) else value
    asked = [(side, run["rate"]) for side in order for run in (*load.runs(), {"rate": None})]
    counts = {run["rate"]: run["requests"] for run in load.runs()}
    if [(one["side"], one.get("rate")) for one in joined.values()] != asked:
        raise invalid(link.name, f"{len(joined)} loads, not the {len(asked)} that were asked for")
    for one in joined.values():
        sizes = {len(one.get(name, ())) for name in LISTS}
        if "rate" in one and (sizes != {counts[one["rate"]]} or not {"duration", "began"} <= one.keys()):
            raise invalid(link.name, f"{sorted(sizes)} requests at {one['rate']:g} a second")
    settings = {name: value for name, value in session.settings.items() if name != "on_gpu"}
    device = about.device(link.name, gpu=session.settings.get("on_gpu") is True)
    told = {"runtime": VLLM, "device": device, "versions": {**about.versions, **session.versions}}
    return [*joined.values()], {**told, "settings": settings}


def _kept(bundle: Bundle, on: str, against: str, runtime: str) -> list[Row]:
    """Return the bundle's rows of a device and a runtime there against one baseline.

    A skipped shape has no baseline and counts for the original model.
    """
    path, original = bundle.path / MEASUREMENTS, bundle.manifest.model.source.sha256
    rows = read_rows(path) if path.is_file() else []
    own = [row for row in rows if row.on == on and row.runtime == runtime]
    return [row for row in own if (row.baseline.subject if row.baseline else original) == against]


class _Measuring:
    def __init__(
        self,
        bundle: Bundle,
        reached: Reached,
        side: GraphSides | ModelSides | StreamedSides | ApartSides,
        progress: Progress,
        kept: Sequence[Row],
    ) -> None:
        self.bundle, self.reached, self.link, self.side = bundle, reached, reached.link, side
        self.progress, self.kept, self._carried = progress, kept, partial(progress.at, "carrying")
        ours, theirs = (
            self.link.carry(name, files, self._carried) + opened
            for name, files, opened in zip(("subject", "baseline"), side.files, side.opened, strict=True)
        )
        subject = bundle.manifest.content_sha256
        self.job: dict[str, Any] = {
            "ours": asdict(SpeedSide(ours, subject, side.own_form, side.weights[0], side.runtime)),
            "theirs": asdict(SpeedSide(theirs, side.subject, side.form, side.weights[1], side.floats)),
            "built": side.built,
            "saved_bytes": side.saved,
        }

    def _sent(self, name: str, arrays: Mapping[str, Any]) -> str:
        with tempfile.TemporaryDirectory(prefix="quantkit-sent-") as folder:
            file = Path(folder) / f"{name}.npz"
            np.savez(file, allow_pickle=False, **arrays)
            return f"{self.link.carry(name, {file.name: file}, self._carried)}/{file.name}"

    def keep(self, rows: Sequence[Row], *, more: bool = False) -> None:
        keep(self.bundle, rows, None, self.side.runtime, self.side.subject, self.progress, more=more)

    def scored(self) -> list[Row]:
        """Score there; no rows if they are kept, or if there is nothing to compare with here."""
        data, side = self.side.data(), self.side
        if not data or any(row.name.startswith("accuracy.") for row in self.kept):
            return []
        job = {**self.job, **side.pooled, "of": side.of, "streams": side.streams, "data": self._sent("scored", data)}
        answers = self.link.run("accuracy", job, partial(self.progress.at, "score"), note=self.progress.note)
        with believed(answers.on):
            rows = side.rows(answers)
        rows = [row.model_copy(update={"flags": [*row.flags, *answers.about.flags]}) for row in rows]
        self.keep(rows)
        return rows

    def timed(self, plan: TimingPlan) -> list[Row]:
        """Time shape by shape there and weigh memory, except for kept rows."""
        side, known = (
            self.side,
            {(row.name, row.batch, *sorted((row.shape or {}).items())) for row in self.kept if row.name in _TIMED},
        )
        shapes = [
            shape for shape in plan.shapes() if (shape.name, shape.batch, *sorted(shape.sizes.items())) not in known
        ]
        unweighed = side.of == "network" or side.on_gpu
        if not shapes and (unweighed or any(row.name == "memory.peak" for row in self.kept)):
            return []
        samples = graphs = None
        if (of := side.samples([shape.batch for shape in shapes])) is not None:
            samples = {"file": self._sent("samples", of[0]), "macs": of[1], "outputs": of[2]}
        if not side.on_gpu:
            graphs = self.reached.carry_graphs(self._carried)
        job = {**self.job, "shapes": [asdict(shape) for shape in shapes], "graphs": graphs, "samples": samples}
        job |= {name: getattr(plan, name) for name in ("seconds", "cell_seconds", "rounds", "seed")}
        job |= {"layers": [layer.model_dump(mode="json") for layer in side.layers]}
        asked = {cell_of(shape): shape for shape in shapes}

        def come(answers: Cells, cell: str) -> None:
            if cell in asked:
                self.keep(self._rows(answers, plan.seed, [asked[cell]]), more=True)

        report = partial(self.progress.at, "speed")
        answers = self.link.run("measure", job, report, row=come, note=self.progress.note)
        rows = self._rows(answers, plan.seed, shapes)
        self.keep(rows)
        return rows

    def _rows(self, answers: Cells, seed: int, shapes: Sequence[Shape]) -> list[Row]:
        about, threads, rows = answers.about, answers.about.cores, list[Row]()
        how: dict[str, Any] = {"device": about.device(answers.on, gpu=self.side.on_gpu), "versions": about.versions}
        subjects = self.bundle.manifest.content_sha256, self.side.subject
        if shapes:
            with believed(answers.on):
                rows, threads = self._judged(answers, seed, shapes)
        if "memory" in answers:
            both = answers.one(Footprints, "memory")
            how |= {"subjects": subjects, "runtime": self.side.runtime, "threads": threads}
            with believed(answers.on):
                rows.append(memory_row(both.ours.model_dump(), both.theirs.model_dump(), **how))
        return [row.model_copy(update={"flags": list(dict.fromkeys([*row.flags, *about.flags]))}) for row in rows]

    def _judged(self, answers: Cells, seed: int, shapes: Sequence[Shape]) -> tuple[list[Row], int]:
        about, sides, gpu = answers.about, answers.one(SideCosts, "sides"), self.side.on_gpu
        timings = []
        for cell, shape in ((cell_of(shape), shape) for shape in shapes):
            times = answers.one(Times, cell)
            timings.append(times.timing({SUBJECT, BASELINE}, f"{answers.on}, {cell}", shape, counted=not gpu))
        rows = latency.judged(
            timings,
            {
                SUBJECT: Side(sides.ours, self.bundle.manifest.content_sha256, sides.resident_bytes),
                BASELINE: Side(sides.theirs, self.side.subject),
            },
            ceilings_of(answers),
            runtime=self.side.runtime,
            settings={**sides.settings, "cores": about.cores},
            device=about.device(answers.on, gpu=gpu),
            versions=about.versions | ({"driver": about.driver} if gpu else {}),
            cache=about.cache,
            seed=seed,
        )
        if sides.linears is not None:
            rows = explained(rows, sides.linears.get)
        threads = sides.settings.get("threads")
        return rows, threads if type(threads) is int and threads > 0 else about.cores
