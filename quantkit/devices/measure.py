"""A finished bundle measured on a device: accuracy and speed there, in this machine's bundle.

What the float model is, which text is scored and what follows from raw times is found out here, by the same code as for
this machine; the device runs what it is sent. Each shape is put into the bundle as it comes, so that what was measured
is not lost with the connection.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.bundle import Bundle, Decision
from quantkit.bundle.disk import walk
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.devices import job as jobs
from quantkit.devices.answers import (
    CeilingSamples,
    DeviceFacts,
    Footprints,
    SampleOutputs,
    ScoredStretch,
    SessionSettings,
    ShapeTimes,
    SideCosts,
    invalid,
    read,
)
from quantkit.devices.asked.room import Ready, running, unasked
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import Job
from quantkit.devices.link import Link, carry
from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import joined, write_graphs
from quantkit.measurement.rows import Device, Row, read_rows
from quantkit.measurement.timing import latency
from quantkit.measurement.timing.clocks import Between, settings_of
from quantkit.measurement.timing.shapes import Shape, TimingPlan
from quantkit.measurement.timing.speed import memory_row
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished.against import MeasuredAgainst, against
from quantkit.pipeline.finished.keep import keep
from quantkit.pipeline.graphs.remeasure import MODEL, RUNTIMES, FloatSide, float_side, holds_graph
from quantkit.pipeline.progress import Progress
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.runtimes.openvino.open import MODEL as XML

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet

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
    ready: Ready = unasked,
) -> list[Row]:
    """Score and time a bundle on a device; see `measure_bundle` for what is common to both.

    Args:
        plan: shapes and seconds.
        resume: shapes that the bundle has of this device are left out, and so is the score.
        ready: told the files of both models before anything is carried.

    Returns:
        the new rows, each with the device's name.

    Raises:
        InputError: `runtime-unsupported`; what the device answers; those of `measure_bundle` and of the link.
        Stopped: `device-gone`; what came before is in the bundle.
    """
    progress, decisions = progress or Progress(), [] if decisions is None else decisions
    runner = load_runtime(runtime)
    if runner.floats is None:
        rule = "ONNX Runtime, OpenVINO and llama.cpp run on a device's processor"
        raise InputError("runtime-unsupported", where="--runtime", value=runtime, rule=rule)
    bundle.demand_writable()
    bundle.demand_intact()
    side: _Side
    if holds_graph(bundle):
        side = _Graph(bundle, float_side(bundle, baseline, calibration), runtime)
    else:
        side = _Model(bundle, against(bundle, baseline, runner.floats), runtime, calibration, decisions)
    stages = {"carrying": 30.0, "score": 60.0, **({"speed": 30.0 + plan.seconds} if speed else {})}
    progress.plan(stages)
    fitting = side.fitting(plan)
    # both are of one architecture, and both are there at once
    beside = 2 * running(bundle.path, fitting.shapes(), runtime) if speed else 0.0
    ready([path for files in side.files() for path in files.values()], beside)
    kept = _kept(bundle, link.name, side.subject, runtime) if resume else []
    work = _Measuring(bundle, link, side, runtime, progress, kept)
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
        return measure_on(bundle, found.link, baseline, progress, ready=found.ready(progress), **how)


def _kept(bundle: Bundle, on: str, against: str, runtime: str) -> list[Row]:
    """What the bundle has of a device and a runtime there against a baseline; a shape that was skipped has none, and is
    one against the model that the bundle was made from."""
    path, original = bundle.path / MEASUREMENTS, bundle.manifest.model.source.sha256
    rows = read_rows(path) if path.is_file() else []
    own = [row for row in rows if row.on == on and row.runtime == runtime]
    return [row for row in own if (row.baseline.subject if row.baseline else original) == against]


class _Side:
    """A bundle and its float model, as far as its kind matters.

    Args:
        subject: of the float model in rows.
        floats: the runtime that runs it.
    """

    bundle: Bundle
    subject: str
    floats: str
    of: Any

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """What is loaded of both: relative path -> file here."""
        raise NotImplementedError

    def opened(self) -> tuple[str, str]:
        """What is opened there of both, below their folders; empty where that is the folder."""
        return "", ""

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """The plan's shapes that both have."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """What is scored: arrays of an .npz."""
        raise NotImplementedError

    def rows(self, answers: CollectedCells, runtime: str) -> list[Row]:
        """Of accuracy."""
        raise NotImplementedError

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """What a graph is timed on, multiply-accumulates and outputs of a sample."""
        return None

    def weights(self) -> tuple[float, float]:
        """Bytes of all constants of graphs."""
        return 0.0, 0.0

    form = "float32"


class _Model(_Side):
    """A transformer."""

    def __init__(
        self, bundle: Bundle, found: MeasuredAgainst, runtime: str, calibration: str | None, decisions: list[Decision]
    ) -> None:
        from quantkit.pipeline.blocks import tokens

        self.bundle, self.found, self.subject = bundle, found, found.subject
        self.of, self.floats = bundle.manifest.model.kind, str(load_runtime(runtime).floats)
        self.folder = load_runtime(runtime).folder(bundle)
        self.theirs, self.form = found.floats(bundle, runtime)
        self.scoring: TokenSet | None = None
        if found.stream is not None:
            recipe = Recipe.done(bundle.manifest.recipe)
            seen = bundle.manifest.calibration
            self.scoring = tokens.again(recipe, found.stream.source, calibration, seen, decisions)

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        both = [{path.relative_to(at).as_posix(): path for path in walk(at)} for at in (self.folder, self.theirs)]
        return both[0], both[1]

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        context = min(map(worth.context_of, (self.folder, self.theirs)))
        return worth.fitting(plan, context, self.bundle.manifest.model.kind)

    def data(self) -> dict[str, Any]:
        if self.scoring is None:
            return {}
        if self.scoring.pairs is None:
            return {"ids": self.scoring.ids.numpy()}
        texts = self._texts()
        lengths = np.array([len(text) for text in texts])
        ids = np.zeros((len(texts), int(lengths.max())), np.int64)
        for place, text in enumerate(texts):
            ids[place, : len(text)] = text
        return {"ids": ids, "lengths": lengths}

    def _texts(self) -> list[list[int]]:
        """Of an encoder that is scored on pairs."""
        from quantkit.measurement.accuracy.embed import texts_of

        assert self.scoring is not None and self.scoring.pairs is not None and self.found.stream is not None
        return texts_of(self.scoring.pairs, self.found.stream.source.tokenizer(), self.scoring.ids.shape[1])

    def rows(self, answers: CollectedCells, runtime: str) -> list[Row]:
        from quantkit.measurement.accuracy import score
        from quantkit.measurement.accuracy.labelled import About as What
        from quantkit.measurement.accuracy.positions import data_of

        assert self.scoring is not None and self.found.stream is not None
        about, ran = answers.about, answers.one(SessionSettings, "settings")
        what = What(
            subject=self.bundle.manifest.content_sha256,
            baseline=self.subject,
            runtime=runtime,
            data=data_of(self.scoring),
            device=Device.model_validate(about.device(answers.on)),
            versions=about.versions,
            settings=ran.settings,
        )
        if self.of == "encoder" and self.scoring.pairs is not None:
            from quantkit.measurement.accuracy.embed import vector_rows

            texts = self._texts()
            vectors = _outputs(answers, len(texts))["pooled"]
            try:
                return vector_rows(self.found.stream, vectors, texts, self.scoring.pairs, about=what)
            except ValueError:
                raise invalid(answers.on, f"vectors of shape {vectors.shape}") from None
        if self.of == "encoder":
            from quantkit.measurement.accuracy.labelled.pairs import cosine_row

            ours = _outputs(answers, len(self.scoring.ids))["pooled"].astype(np.float64)
            theirs = score.original_answers(self.found.stream, self.scoring).all().mean(dim=1).double().cpu().numpy()
            if ours.shape != theirs.shape:
                raise invalid(answers.on, f"vectors of shape {ours.shape}")
            both = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            values = (ours * theirs).sum(axis=1) / both
            what = replace(what, data=what.data.model_copy(update={"items": len(values)}))
            return [cosine_row(values, np.arange(values.size), what, "sequence", [])]
        found = []
        for way, items in _items(answers, self.scoring).items():
            settings = {**what.settings, **({"way": way} if way else {})}
            found += items.rows(replace(what, settings=settings))
        return score.flagged(found, self.bundle.manifest.model.source.was)


class _Graph(_Side):
    """A network, or an encoder that came as a graph."""

    # the float graph is an ONNX file, whatever runs the bundle's
    of, floats = "network", worth.RUNTIME

    def __init__(self, bundle: Bundle, theirs: FloatSide, runtime: str) -> None:
        self.bundle, self.theirs, self.subject = bundle, theirs, theirs.graph.sha256
        if runtime not in RUNTIMES:
            rule = f"a graph's runtimes are {' and '.join(RUNTIMES)}"
            raise InputError("runtime-unsupported", where="--runtime", value=runtime, rule=rule)
        folder = load_runtime(runtime).folder(bundle)
        self.path = folder / (MODEL if runtime == worth.RUNTIME else XML)

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        theirs = self.theirs.graph.path
        beside = sorted(theirs.parent.glob(f"{theirs.name}*"))
        return (
            {path.name: path for path in sorted(self.path.parent.glob(f"{self.path.stem}.*"))},
            {MODEL if path == theirs else path.name: path for path in beside},
        )

    def opened(self) -> tuple[str, str]:
        return f"/{self.path.name}", f"/{MODEL}"

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        sizes = [self.theirs.data.batch] if self.theirs.data.batch else plan.batches
        return replace(plan, batches=(), contexts=(), prefills=(1,), prefill_batches=tuple(sizes))

    def data(self) -> dict[str, Any]:
        feeds = list(self.theirs.data.feeds(len(self.theirs.data)))
        return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}

    def rows(self, answers: CollectedCells, runtime: str) -> list[Row]:
        from quantkit.pipeline.graphs.measure import agreement
        from quantkit.pipeline.graphs.measure import answers as expected

        given = _outputs(answers, len(self.theirs.data))
        known = expected(self.theirs.graph.model, self.theirs.data)
        if {name: each.shape for name, each in known.items()} != {name: each.shape for name, each in given.items()}:
            raise invalid(answers.on, "outputs of other names or shapes")
        subject = self.bundle.manifest.content_sha256
        rows = agreement(known, given, self.theirs.data, subject=subject, baseline=self.subject, runtime=runtime)
        return [_there(row, answers) for row in rows]

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        costs = self.theirs.costs()
        return dict(self.theirs.data.first(max(sizes))), float(sum(costs.macs.values())), float(costs.outputs)

    def weights(self) -> tuple[float, float]:
        return float(sum(path.stat().st_size for path in self.files()[0].values())), float(self.theirs.graph.bytes)


class _Measuring:
    """The jobs of one measuring."""

    def __init__(
        self, bundle: Bundle, link: Link, side: _Side, runtime: str, progress: Progress, kept: Sequence[Row]
    ) -> None:
        self.bundle, self.link, self.side, self.runtime, self.progress, self.kept = (
            *(bundle, link, side),
            *(runtime, progress, kept),
        )
        manifest, weights = bundle.manifest, side.weights()
        places = []
        for name, files, opened in zip(("subject", "baseline"), side.files(), side.opened(), strict=True):
            places.append(carry(link, name, files, self._carried) + opened)
        self.ours = jobs.PlacedModel(
            place=places[0],
            subject=manifest.content_sha256,
            format=worth.format_of(manifest.layers),
            weight_bytes=weights[0],
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
        work = jobs.ScoreBeside(
            of=self.side.of,
            ours=self.ours,
            theirs=self.theirs if self.side.of == "decoder" else None,
            runtime=self.runtime,
            floats=self.side.floats,
            data=self._sent("scored", data),
        )
        answers = CollectedCells.of(self.link, Job(work=work), self.progress, "score")
        rows = self.side.rows(answers, self.runtime)
        flags = answers.about.flags
        rows = [row.model_copy(update={"flags": [*row.flags, *flags]}) for row in rows]
        self._keep(rows)
        return rows

    def timed(self, plan: TimingPlan) -> list[Row]:
        """Times there, shape by shape, and memory; what is kept is left out."""
        known = {(row.name, row.batch, *sorted((row.shape or {}).items())) for row in self.kept if row.name in _TIMED}
        shapes = [each for each in plan.shapes() if (each.name, each.batch, *sorted(each.sizes.items())) not in known]
        if not shapes and (self.side.of == "network" or any(row.name == "memory.peak" for row in self.kept)):
            return []
        samples = None
        if (found := self.side.samples([each.batch for each in shapes])) is not None:
            samples = jobs.PlacedSamples(place=self._sent("samples", found[0]), macs=found[1], outputs=found[2])
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
        device, rows, threads = about.device(answers.on), list[Row](), about.cores
        if shapes:
            rows, threads = self._judged(answers, work, shapes)
        if "memory" in answers.cells:
            found = answers.one(Footprints, "memory")
            names = {"before", "resident", "peak", "new_tokens", "context"}
            if set(found.ours) != names or set(found.theirs) != names or not found.ours["peak"]:
                raise invalid(answers.on, "memory of other names")
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
            [_timing(answers, shape, about) for shape in shapes],
            latency.Side(sides.ours, self.ours.subject),
            latency.Side(sides.theirs, self.theirs.subject),
            limits,
            runtime=self.runtime,
            settings={**sides.settings, "cores": about.cores},
            device=about.device(answers.on),
            versions=about.versions,
            cache=about.cache,
            seed=work.seed,
        )
        threads = sides.settings.get("threads")
        return rows, threads if type(threads) is int and threads > 0 else about.cores


def _there(row: Row, answers: CollectedCells) -> Row:
    """A row that was made here of what a device said."""
    about = answers.about
    device = Device.model_validate(about.device(answers.on))
    return row.model_copy(update={"device": device, "versions": about.versions})


def _timing(answers: CollectedCells, shape: jobs.ShapeCell, about: DeviceFacts) -> latency.ShapeTiming:
    """The times of one shape, if they fit together. Raises InputError `answer-invalid`."""
    found: ShapeTimes = answers.one(ShapeTimes, shape.cell)
    timing = latency.ShapeTiming(Shape(shape.kind, shape.batch, shape.size))
    if not found.skipped:
        found.demand_whole({latency.SUBJECT, latency.BASELINE}, f"{answers.on}, {shape.cell}")
    timing.given(found.seconds, found.rounds, found.skipped)
    state = Between.of(found.before, found.after, counted=True)
    timing.flags = ["throttled"] if state.throttled else []
    timing.settings = settings_of(found.before, found.after)
    return timing


def _items(answers: CollectedCells, tokens: TokenSet) -> dict[str, Any]:
    """Way -> the numbers of all positions, in order. Raises InputError `answer-invalid`."""
    from quantkit.measurement.accuracy.positions import DTYPES, Items

    ways: dict[str, list[ScoredStretch]] = {}
    for cell, rows in answers.cells.items():
        for row in rows if cell.startswith("scored-") else ():
            found = read(ScoredStretch, row, answers.on)
            ways.setdefault(found.way, []).append(found)
    count, length = tokens.ids.shape
    made = {}
    for way, parts in ways.items():
        arrays: dict[str, list[Any]] = {name: [] for name in DTYPES}
        for part in parts:
            sizes = {len(values) for values in part.found.values()}
            if set(part.found) != {*DTYPES} - {"sequence"} or len(sizes) != 1:
                raise invalid(answers.on, f"scored: {', '.join(part.found)}"[:200])
            arrays["sequence"].append(np.full(next(iter(sizes)), part.sequence))
            for name, values in part.found.items():
                arrays[name].append(np.array(values))
        items = Items(**{name: np.concatenate(parts).astype(DTYPES[name]) for name, parts in arrays.items()})
        if not np.array_equal(items.sequence, np.repeat(np.arange(count), length - 1)):
            raise invalid(answers.on, f"{items.n} positions, not the {count * (length - 1)} that were asked for")
        made[way] = items
    if not made:
        raise invalid(answers.on, "no position")
    return made


def _outputs(answers: CollectedCells, count: int) -> dict[str, Any]:
    """Name -> what came out, [count, ...]. Raises InputError `answer-invalid`."""
    parts: dict[str, list[Any]] = {}
    done, numbers = 0, np.empty(0, np.float32)
    for cell, rows in answers.cells.items():
        for row in rows if cell.startswith("outputs-") else ():
            found = read(SampleOutputs, row, answers.on)
            if found.first != done or found.at != len(numbers):
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            numbers = np.concatenate([numbers, np.array(found.numbers, np.float32)])
            if cell != f"outputs-{done}":  # more of the same samples follows
                continue
            try:
                arrays = found.arrays(numbers)
            except ValueError:
                raise invalid(answers.on, f"{cell}: numbers that do not fit their shape") from None
            if len({array.shape[:1] for array in arrays.values()}) != 1 or not next(iter(arrays.values())).ndim:
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            done += len(next(iter(arrays.values())))
            numbers = np.empty(0, np.float32)
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
    if done != count:
        raise invalid(answers.on, f"{done} samples, not {count}")
    try:
        return {name: np.concatenate(found) for name, found in parts.items()}
    except ValueError:
        raise invalid(answers.on, "samples of several shapes") from None
