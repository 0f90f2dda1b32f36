"""A graph and its quantized self: what it costs, how far the two agree, which is faster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.rows import Data, Device, Row
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.pipeline.progress import Progress

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.calibrate.sets.inputs import Feed, InputSet
    from quantkit.graph.sites import Site
    from quantkit.measurement.timing.speed import SpeedSide

Array = NDArray[Any]
# a graph in some runtime: values of its inputs to those of its outputs
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
RUNTIME = "onnxruntime"
# samples of a pass that is timed, and how long a compile looks at them
QUICK = TimingPlan(batches=(1, 32), seconds=40.0, rounds=4)
# samples of one run that is scored
_SCORED = 32


@dataclass(frozen=True)
class SampleCost:
    """What one sample takes.

    Args:
        macs: site -> multiply-accumulates.
        outputs: numbers that come out.
        inner: numbers that products make on the way.
    """

    macs: Mapping[str, int]
    outputs: int
    inner: int


def cost(model: ir.Model, sites: Sequence[Site], feed: Feed) -> SampleCost:
    """Counted on the shapes of a run with real inputs.

    Raises:
        InputError: `onnx-unrunnable`; `onnx-outputs` where they are no finite floats, which nothing could be scored by.
    """
    from quantkit.graph.run import Runner

    shown = Runner(model, [site.output for site in sites])(feed)
    samples = len(next(iter(feed.values())))
    macs = {site.name: site.macs(shown[site.output].shape, samples) for site in sites}
    _demand_floats({str(value.name): shown[str(value.name)] for value in model.graph.outputs})
    outputs = sum(shown[str(value.name)].size for value in model.graph.outputs)
    return SampleCost(macs, outputs // samples, sum(shown[site.output].size for site in sites) // samples)


def _demand_floats(outputs: Feed) -> None:
    floats = {name: array for name, array in outputs.items() if array.dtype.kind == "f"}
    bad = [name for name, array in floats.items() if not np.isfinite(array).all()]
    if bad or not floats:
        raise InputError(
            "onnx-outputs",
            where=", ".join(bad) or ", ".join(outputs),
            value="NaN or infinity for calibration samples" if bad else "no floats",
            rule="what comes out is finite floats, by which the quantized graph is compared",
            remedy="check the samples and the weights" if bad else "give out what the last operator reads, too",
        )


def scored(
    original: ir.Model | Path,
    own: Path | Run,
    scoring: InputSet,
    *,
    subject: str,
    baseline: str,
    progress: Progress,
    runtime: str = RUNTIME,
) -> list[Row]:
    """Accuracy of a file against the float graph.

    Args:
        subject, baseline: their identities in the rows.
        runtime: that runs the file.
    """
    expected = answers(original, scoring, lambda done: progress.at("score", done / 2))
    given = answers(own, scoring, lambda done: progress.at("score", (1 + done) / 2))
    return agreement(expected, given, scoring, subject=subject, baseline=baseline, runtime=runtime)


def answers(
    graph: ir.Model | Path | Run, samples: InputSet, report: Callable[[float], None] = lambda done: None
) -> dict[str, Array]:
    """Name of each output -> [n, ...], for all samples."""
    from quantkit.graph.run import Runner

    runner: Run = graph if callable(graph) else Runner(graph)
    found: dict[str, list[Any]] = {}
    done = 0
    for feed in samples.feeds(_SCORED):
        for name, value in runner(feed).items():
            found.setdefault(name, []).append(np.atleast_1d(value))
        done += len(next(iter(feed.values())))
        report(done / len(samples))
    return {name: np.concatenate(values) for name, values in found.items()}


def classes_of(expected: Mapping[str, Array], samples: InputSet) -> str | None:
    """The output that tells classes apart, if one does."""
    wide = [name for name, value in expected.items() if value.ndim == 2 and value.shape[1] > 1]
    # of several outputs none says that it tells classes apart, unless there are labels for just one
    return wide[0] if len(wide) == 1 and (len(expected) == 1 or samples.labels is not None) else None


def agreement(
    expected: Mapping[str, Array],
    given: Mapping[str, Array],
    samples: InputSet,
    *,
    subject: str,
    baseline: str,
    runtime: str = RUNTIME,
) -> list[Row]:
    """Accuracy of one graph's answers against another's."""
    from quantkit.measurement.accuracy.labelled import About, classification, outputs

    about = About(
        subject=subject,
        baseline=baseline,
        runtime=runtime,
        data=Data(set=samples.name, split=samples.split, sha256=samples.sha256, items=len(samples)),
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
    )
    name = classes_of(expected, samples)
    if name is None:
        return outputs(expected, given, about=about, clusters=samples.clusters)
    unit = "sample" if samples.channels is None else "image"
    labels, clusters = samples.labels, samples.clusters
    rows = classification(expected[name], given[name], labels, about=about, unit=unit, clusters=clusters)
    # without labels it may be no answer but a vector; and what stands beside the answer may be lost on its own
    others = {each: value for each, value in expected.items() if each != name or samples.labels is None}
    if not others:
        return rows
    return rows + outputs(others, {each: given[each] for each in others}, about=about, clusters=clusters)


def speed(
    ours: SpeedSide, theirs: SpeedSide, samples: InputSet, costs: SampleCost, progress: Progress, plan: TimingPlan
) -> list[Row]:
    """Both in turn, on real inputs; a graph of a fixed batch at that alone.

    Raises:
        InputError, MissingDependency: see `timing.speed.run`.
    """
    from quantkit.measurement.timing.speed import Samples, SpeedJob, run

    sizes = [samples.batch] if samples.batch else list(plan.batches)
    if samples.batch:
        progress.note(f"the graph takes {samples.batch} samples at a time, so it is timed at batch {samples.batch}")
    plan = TimingPlan((), (), (1,), sizes, plan.seconds, cell_seconds=plan.seconds, rounds=plan.rounds)
    with tempfile.TemporaryDirectory(prefix="quantkit-speed-") as folder:
        file = Path(folder) / "samples.npz"
        np.savez(file, allow_pickle=False, **samples.first(max(sizes)))
        graph = Samples(str(file), float(sum(costs.macs.values())), float(costs.outputs))
        job = SpeedJob(ours, theirs, machine.cores(), plan, graph)
        return run(job, lambda share, words: progress.at("speed", share, words))
