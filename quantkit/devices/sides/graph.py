"""A network, or an encoder that came as a graph, set against its float graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.bundle import Bundle
from quantkit.devices.answers import invalid
from quantkit.devices.collect import CollectedCells
from quantkit.devices.sides.answered import outputs_of
from quantkit.devices.sides.base import DeviceSides
from quantkit.errors import InputError
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline.graphs.bundles import MODEL, RUNTIMES
from quantkit.pipeline.measure import MeasuredAgainst
from quantkit.pipeline.verdict import RUNTIME
from quantkit.runtimes import load_runtime
from quantkit.runtimes.openvino.open import MODEL as XML


class GraphSides(DeviceSides):
    """See the module."""

    # the float graph is an ONNX file, whatever runs the bundle's
    of, floats = "network", RUNTIME

    def __init__(self, bundle: Bundle, theirs: MeasuredAgainst, runtime: str) -> None:
        assert theirs.graph is not None and theirs.samples is not None
        self.bundle, self.theirs, self.subject, self.runtime = bundle, theirs, theirs.subject, runtime
        self.graph, self.inputs = theirs.graph, theirs.samples
        if runtime not in RUNTIMES:
            rule = f"a graph's runtimes are {' and '.join(RUNTIMES)}"
            raise InputError("runtime-unsupported", where="--runtime", value=runtime, rule=rule)
        folder = load_runtime(runtime).folder(bundle)
        self.path = folder / (MODEL if runtime == RUNTIME else XML)

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """See `DeviceSides`."""
        theirs = self.graph.path
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
        sizes = [self.inputs.batch] if self.inputs.batch else plan.batches
        return replace(plan, batches=(), contexts=(), prefills=(1,), prefill_batches=tuple(sizes))

    def data(self) -> dict[str, Any]:
        """See `DeviceSides`."""
        feeds = list(self.inputs.feeds(len(self.inputs)))
        return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}

    def rows(self, answers: CollectedCells) -> list[Row]:
        """See `DeviceSides`."""
        from quantkit.pipeline.graphs.answers import agreement, kinds_of
        from quantkit.pipeline.graphs.answers import answers as expected

        given = outputs_of(answers, len(self.inputs))
        known = expected(self.graph.model, self.inputs)
        if {name: each.shape for name, each in known.items()} != {name: each.shape for name, each in given.items()}:
            raise invalid(answers.on, "outputs of other names or shapes")
        subject = self.bundle.manifest.content_sha256
        said, data = kinds_of(self.graph.model), self.inputs
        rows = agreement(known, given, data, said, subject=subject, baseline=self.subject, runtime=self.runtime)
        return [_there(row, answers) for row in rows]

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """See `DeviceSides`."""
        costs = self.theirs.costs()
        return dict(self.inputs.first(max(sizes))), float(sum(costs.macs.values())), float(costs.outputs)

    def weights(self) -> tuple[float, float]:
        """See `DeviceSides`."""
        return float(sum(path.stat().st_size for path in self.files()[0].values())), float(self.graph.bytes)


def _there(row: Row, answers: CollectedCells) -> Row:
    """A row that was made here of what a device said."""
    about = answers.about
    device = Device.model_validate(about.device(answers.on))
    return row.model_copy(update={"device": device, "versions": about.versions})
