"""A graph and its quantized self: what it costs, how far the two agree, which is faster."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.measure.rows import Data, Device, Row
from quantkit.pipeline.progress import Progress
from quantkit.plan import machine

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.calibrate.inputs import Feed, InputSet
    from quantkit.graph.sites import Site

RUNTIME = "onnxruntime"
# samples of a pass that is timed, and how long a compile looks at them
TIMED, SECONDS = (1, 32), 40.0
# samples of one run that is scored
_SCORED = 32


@dataclass(frozen=True)
class Cost:
    """What one sample takes.

    Args:
        macs: site -> multiply-accumulates.
        outputs: numbers that come out.
        inner: numbers that products make on the way.
    """

    macs: Mapping[str, int]
    outputs: int
    inner: int


def cost(model: ir.Model, sites: Sequence[Site], feed: Feed) -> Cost:
    """Counted on the shapes of a run with real inputs. Raises InputError `onnx-unrunnable`."""
    from quantkit.graph.run import Runner

    shown = Runner(model, [site.output for site in sites])(feed)
    samples = len(next(iter(feed.values())))
    macs = {site.name: site.macs(shown[site.output].shape, samples) for site in sites}
    outputs = sum(shown[str(value.name)].size for value in model.graph.outputs)
    return Cost(macs, outputs // samples, sum(shown[site.output].size for site in sites) // samples)


def scored(
    original: ir.Model | Path, own: Path, scoring: InputSet, *, subject: str, baseline: str, progress: Progress
) -> list[Row]:
    """Accuracy of a file against the float graph.

    Args:
        original: the float graph.
        own: the file.
        scoring: what both are given.
        subject, baseline: their identities in the rows.
        progress: told how far it is.
    """
    from quantkit.graph.run import Runner
    from quantkit.measure.labelled import About, classification, outputs

    runners = Runner(original), Runner(own)
    found: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    done = 0
    for feed in scoring.feeds(_SCORED):
        for runner, kept in zip(runners, found, strict=True):
            for name, value in runner(feed).items():
                kept.setdefault(name, []).append(np.atleast_1d(value))
        done += len(next(iter(feed.values())))
        progress.at("score", done / len(scoring))
    expected, given = ({name: np.concatenate(values) for name, values in each.items()} for each in found)
    about = About(
        subject=subject,
        baseline=baseline,
        runtime=RUNTIME,
        data=Data(set=scoring.name, split=scoring.split, sha256=scoring.sha256, items=len(scoring)),
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
    )
    wide = [name for name, value in expected.items() if value.ndim == 2 and value.shape[1] > 1]
    # of several outputs none says that it tells classes apart, unless there are labels for just one
    if len(wide) == 1 and (len(expected) == 1 or scoring.labels is not None):
        return classification(expected[wide[0]], given[wide[0]], scoring.labels, about=about)
    return outputs(expected, given, about=about)


@dataclass(frozen=True)
class Timed:
    """One side of a timing.

    Args:
        file: the graph.
        subject: identity for the rows.
        format: of its weights.
        bytes: of all its constants.
    """

    file: Path
    subject: str
    format: str
    bytes: int


def speed(
    ours: Timed,
    theirs: Timed,
    samples: InputSet,
    costs: Cost,
    progress: Progress,
    *,
    batches: Sequence[int] = TIMED,
    seconds: float = SECONDS,
    rounds: int = 4,
) -> list[Row]:
    """Both in turn, on real inputs; a graph of a fixed batch at that alone.

    Raises:
        InputError, MissingDependency: see `measure.speed_graph.run`.
    """
    from quantkit.measure.speed_graph import Job, Side, run

    sizes = [samples.batch] if samples.batch else list(batches)
    if samples.batch:
        progress.note(f"the graph takes {samples.batch} samples at a time, so it is timed at batch {samples.batch}")
    with tempfile.TemporaryDirectory(prefix="quantkit-speed-") as folder:
        file = Path(folder) / "samples.npz"
        np.savez(file, allow_pickle=False, **samples.first(max(sizes)))
        job = Job(
            ours=Side(str(ours.file), ours.subject, ours.format, float(ours.bytes)),
            theirs=Side(str(theirs.file), theirs.subject, theirs.format, float(theirs.bytes)),
            samples=str(file),
            macs=float(sum(costs.macs.values())),
            outputs=float(costs.outputs),
            batches=sizes,
            threads=machine.cores(),
            seconds=seconds,
            rounds=rounds,
        )
        return run(job, lambda share, words: progress.at("speed", share, words))
