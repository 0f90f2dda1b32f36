"""A bundle and its float model, as a measuring on a device takes them, whatever their kind is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle, LayerEntry
from quantkit.devices import job as jobs
from quantkit.devices.asked.room import running
from quantkit.devices.collect import CollectedCells
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline.verdict import format_of


class DeviceSides:
    """A bundle and its float model, as far as its kind matters.

    Args:
        subject: of the float model in rows.
        runtime: of what is judged.
        floats: the runtime that runs the float model.
    """

    bundle: Bundle
    subject: str
    runtime: str
    floats: str
    of: Any
    # what is timed: nothing, for this reason where somebody has to know it, or what a GPU runs; what is scored there
    timed, untimed, on_gpu, scored_on_gpu = True, "", False, False
    # see `jobs.PlacedModel`
    built: Mapping[str, str] = {}
    saved = 0.0
    # see `jobs.Measure`
    layers: Sequence[LayerEntry] = ()

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """What is loaded of both: relative path -> file here."""
        raise NotImplementedError

    def opened(self) -> tuple[str, str]:
        """What is opened there of both, below their folders; empty where that is the folder."""
        return "", ""

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """Files that are loaded there all at once, and bytes besides while they run.

        Args:
            plan: of the times that are taken; None where none are.
        """
        # both are of one architecture, and both are there at once
        beside = 2 * running(self.bundle.path, plan.shapes(), self.runtime) if plan else 0.0
        return [path for files in self.files() for path in files.values()], beside

    def scoring(self, ours: jobs.PlacedModel, theirs: jobs.PlacedModel, data: str) -> jobs.Work:
        """What is asked for accuracy; `data` is the place of `data`."""
        return jobs.ScoreBeside(
            of=self.of,
            ours=ours,
            theirs=theirs if self.of == "decoder" else None,
            runtime=self.runtime,
            floats=self.floats,
            data=data,
            **self.pooled(),
        )

    def pooled(self) -> dict[str, Any]:
        """Return how vectors are pooled there, as a job says it; empty where nothing is."""
        return {}

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """The plan's shapes that both have."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """What is scored: arrays of an .npz."""
        raise NotImplementedError

    def rows(self, answers: CollectedCells) -> list[Row]:
        """Of accuracy."""
        raise NotImplementedError

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """What a graph is timed on, multiply-accumulates and outputs of a sample."""
        return None

    def weights(self) -> tuple[float, float]:
        """Bytes of all constants of graphs."""
        return 0.0, 0.0

    @property
    def own_form(self) -> str:
        """Of the weights of what is judged; `form` is that of the float model's."""
        return format_of(self.bundle.manifest.layers)

    form = "float32"
