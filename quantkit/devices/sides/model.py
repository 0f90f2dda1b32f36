"""A transformer, set against the float model that its export is: both in runtimes that need no torch there."""

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
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished.against import MeasuredAgainst
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet


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
        for way, items in items_of(answers, self.scoring).items():
            settings = {**what.settings, **({"way": way} if way else {})}
            found += items.rows(replace(what, settings=settings))
        return score.flagged(found, self.bundle.manifest.model.source.was)
