"""The two models of a measuring on a device: their files, what they are scored on, and rows of what was answered.

A bundle of blocks is set against the float model that its export is; a graph against its float graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.bundle import Bundle, Decision
from quantkit.bundle.disk import walk
from quantkit.devices.answers import SampleOutputs, ScoredStretch, SessionSettings, invalid, read
from quantkit.devices.collect import CollectedCells
from quantkit.errors import InputError
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished.against import MeasuredAgainst
from quantkit.pipeline.graphs.remeasure import MODEL, RUNTIMES, FloatSide
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.runtimes.openvino.open import MODEL as XML

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet


class DeviceSides:
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


class ModelSides(DeviceSides):
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
        """See `DeviceSides`."""
        both = [{path.relative_to(at).as_posix(): path for path in walk(at)} for at in (self.folder, self.theirs)]
        return both[0], both[1]

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """See `DeviceSides`."""
        context = min(map(worth.context_of, (self.folder, self.theirs)))
        return worth.fitting(plan, context, self.bundle.manifest.model.kind)

    def data(self) -> dict[str, Any]:
        """See `DeviceSides`."""
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
        """See `DeviceSides`."""
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
            vectors = outputs_of(answers, len(texts))["pooled"]
            try:
                return vector_rows(self.found.stream, vectors, texts, self.scoring.pairs, about=what)
            except ValueError:
                raise invalid(answers.on, f"vectors of shape {vectors.shape}") from None
        if self.of == "encoder":
            from quantkit.measurement.accuracy.labelled.pairs import cosine_row

            ours = outputs_of(answers, len(self.scoring.ids))["pooled"].astype(np.float64)
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


class GraphSides(DeviceSides):
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
        """See `DeviceSides`."""
        theirs = self.theirs.graph.path
        beside = sorted(theirs.parent.glob(f"{theirs.name}*"))
        return (
            {path.name: path for path in sorted(self.path.parent.glob(f"{self.path.stem}.*"))},
            {MODEL if path == theirs else path.name: path for path in beside},
        )

    def opened(self) -> tuple[str, str]:
        """See `DeviceSides`."""
        return f"/{self.path.name}", f"/{MODEL}"

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """See `DeviceSides`."""
        sizes = [self.theirs.data.batch] if self.theirs.data.batch else plan.batches
        return replace(plan, batches=(), contexts=(), prefills=(1,), prefill_batches=tuple(sizes))

    def data(self) -> dict[str, Any]:
        """See `DeviceSides`."""
        feeds = list(self.theirs.data.feeds(len(self.theirs.data)))
        return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}

    def rows(self, answers: CollectedCells, runtime: str) -> list[Row]:
        """See `DeviceSides`."""
        from quantkit.pipeline.graphs.measure import agreement
        from quantkit.pipeline.graphs.measure import answers as expected

        given = outputs_of(answers, len(self.theirs.data))
        known = expected(self.theirs.graph.model, self.theirs.data)
        if {name: each.shape for name, each in known.items()} != {name: each.shape for name, each in given.items()}:
            raise invalid(answers.on, "outputs of other names or shapes")
        subject = self.bundle.manifest.content_sha256
        rows = agreement(known, given, self.theirs.data, subject=subject, baseline=self.subject, runtime=runtime)
        return [_there(row, answers) for row in rows]

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """See `DeviceSides`."""
        costs = self.theirs.costs()
        return dict(self.theirs.data.first(max(sizes))), float(sum(costs.macs.values())), float(costs.outputs)

    def weights(self) -> tuple[float, float]:
        """See `DeviceSides`."""
        return float(sum(path.stat().st_size for path in self.files()[0].values())), float(self.theirs.graph.bytes)


def _there(row: Row, answers: CollectedCells) -> Row:
    """A row that was made here of what a device said."""
    about = answers.about
    device = Device.model_validate(about.device(answers.on))
    return row.model_copy(update={"device": device, "versions": about.versions})


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


def outputs_of(answers: CollectedCells, count: int) -> dict[str, Any]:
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
