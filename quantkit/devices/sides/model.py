"""A transformer: what it is scored on, and rows of what was said; its export beside the float model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.bundle import Bundle, Decision
from quantkit.bundle.disk import walk
from quantkit.devices.answers import SessionSettings, invalid
from quantkit.devices.collect import CollectedCells
from quantkit.devices.sides.answered import items_of, outputs_of
from quantkit.devices.sides.base import DeviceSides
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline.measure import MeasuredAgainst, context_of, fitting
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.measurement.accuracy.purpose import TextResults


class TransformerSides(DeviceSides):
    """A transformer, whatever runs it.

    Args:
        found: what it is set against.
        calibration, decisions: see `measure_bundle`.
    """

    # a graph may multiply in two: see `measurement.accuracy.score`
    ways = frozenset({"", "prompts", "steps"})

    def __init__(
        self, bundle: Bundle, found: MeasuredAgainst, runtime: str, calibration: str | None, decisions: list[Decision]
    ) -> None:
        from quantkit.pipeline.blocks import tokens

        self.bundle, self.found, self.subject, self.runtime = bundle, found, found.subject, runtime
        self.of = bundle.manifest.model.kind
        self.tokens: TokenSet | None = None
        if found.stream is not None:
            recipe = Recipe.done(bundle.manifest.recipe)
            seen = bundle.manifest.calibration
            self.tokens = tokens.again(recipe, found.stream.source, calibration, seen, decisions)
        self.result: TextResults | None = None
        if self.of == "encoder" and found.stream is not None and self.tokens is not None:
            from quantkit.measurement.accuracy.purpose import TextResults

            self.result = TextResults(found.stream, self.tokens, vectors=True)
            decisions += self.result.decisions()

    def data(self) -> dict[str, Any]:
        """See `DeviceSides`."""
        if self.tokens is None:
            return {}
        if self.result is None or self.tokens.pairs is None:
            return {"ids": self.tokens.ids.numpy()}
        texts = self.result.ids
        lengths = np.array([len(text) for text in texts])
        ids = np.zeros((len(texts), int(lengths.max())), np.int64)
        for place, text in enumerate(texts):
            ids[place, : len(text)] = text
        return {"ids": ids, "lengths": lengths}

    def pooled(self) -> dict[str, Any]:
        """See `DeviceSides`."""
        return {} if self.result is None else {"pooling": self.result.purpose.pooling, "skip": self.result.skip}

    def rows(self, answers: CollectedCells) -> list[Row]:
        """See `DeviceSides`."""
        from quantkit.measurement.accuracy import score
        from quantkit.measurement.accuracy.labelled import About as What
        from quantkit.measurement.accuracy.positions import data_of

        assert self.tokens is not None and self.found.stream is not None
        about, ran = answers.about, answers.one(SessionSettings, "settings")
        what = What(
            subject=self.bundle.manifest.content_sha256,
            baseline=self.subject,
            runtime=self.runtime,
            data=data_of(self.tokens),
            device=Device.model_validate(about.device(answers.on, gpu=self.scored_on_gpu)),
            versions=about.versions,
            settings=ran.settings,
        )
        if self.result is not None:
            from quantkit.measurement.accuracy.embed import rows_of

            vectors = outputs_of(answers, len(self.result.ids))["pooled"]
            try:
                after = self.result.behind(vectors.astype(np.float32))
                return rows_of(self.found.stream, list(after), self.tokens, self.result, what)
            except (ValueError, RuntimeError):
                raise invalid(answers.on, f"vectors of shape {vectors.shape}") from None
        found, ways = [], items_of(answers, self.tokens)
        if not set(ways) <= self.ways:
            raise invalid(answers.on, f"ways to multiply: {', '.join(ways)}")
        for way, items in ways.items():
            settings = {**what.settings, **({"way": way} if way else {})}
            found += items.rows(replace(what, settings=settings))
        return score.flagged(found, self.bundle.manifest.model.source.was)


class ModelSides(TransformerSides):
    """A transformer in a runtime that needs no torch there, beside the float model as the same exporter makes it."""

    def __init__(
        self, bundle: Bundle, found: MeasuredAgainst, runtime: str, calibration: str | None, decisions: list[Decision]
    ) -> None:
        super().__init__(bundle, found, runtime, calibration, decisions)
        self.floats = str(load_runtime(runtime).floats)
        self.folder = load_runtime(runtime).folder(bundle)
        self.theirs, self.form = found.floats(bundle, runtime)

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """See `DeviceSides`."""
        both = [{path.relative_to(at).as_posix(): path for path in walk(at)} for at in (self.folder, self.theirs)]
        return both[0], both[1]

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """See `DeviceSides`."""
        context = min(map(context_of, (self.folder, self.theirs)))
        return fitting(plan, context, self.bundle.manifest.model.kind)
