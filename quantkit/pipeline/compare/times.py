"""How long B takes against A: in one run, or by what each run of its own said of one baseline."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.compared import How, Quantity
from quantkit.measurement.rows import Row
from quantkit.measurement.timing import rounds
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, RoundsJob
from quantkit.measurement.timing.schedule import Timing, Visit
from quantkit.measurement.timing.shapes import Shape
from quantkit.measurement.verdict import speed_up
from quantkit.pipeline.compare.sides import BundleSide
from quantkit.pipeline.graphs.bundles import holds_graph, samples_of
from quantkit.pipeline.measure import fitting, quick, with_changes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import RUNTIME
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime, of_graphs, timed
from quantkit.runtimes.child import Report
from quantkit.stats.deciding.apart import KNOWN, Apart, MeasuredValue, difference, is_hidden
from quantkit.stats.deciding.evidence import Doubt
from quantkit.stats.deciding.slowdown import slowdown

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import Feed

_TIMED = ("latency.decode_step", "latency.prefill")
# a bootstrap draws at most so many groups of blocks
_GROUPS = 20
# a baseline that took so many times as long in one of the two runs had company
_BUSY = 1.2


class RoundsTimer(Protocol):
    """What takes raw times of two sides: this machine, or a device that is reached from here."""

    device: str

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        """Of all shapes. Raises InputError: those of `timing.rounds.run`."""
        ...


class _Here:
    def __init__(self) -> None:
        self.device = str(machine.device().get("name"))

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        return rounds.run(job, report)


@dataclass(frozen=True)
class BundleTiming:
    """Two bundles that can be timed in turns, in ONNX Runtime or llama.cpp each.

    Args:
        job: what is timed; its samples have no file yet.
        samples: of graphs, an array [n, ...] for each input; None else.
        runtime: of both, for their rows.
        timer: takes the times.
    """

    job: RoundsJob
    samples: Feed | None = None
    runtime: str = RUNTIME
    timer: RoundsTimer = field(default_factory=_Here)

    def run(self, progress: Progress, shapes: Sequence[Shape] | None = None) -> list[Timing]:
        """Times of all shapes; of some, in another order and in their share of the seconds.

        Raises:
            InputError: those of `timing.rounds.run`.
            MissingDependency: onnxruntime or scipy.
        """
        job = self.job
        if shapes is not None:
            share = len(shapes) / len(job.shapes)
            job = replace(job, shapes=shapes, seconds=job.seconds * share, seed=job.seed + 1)

        def report(share: float, words: str) -> None:
            progress.at("speed", share, words)

        if self.samples is None:
            return self.timer(job, report)
        with tempfile.TemporaryDirectory(prefix="quantkit-speed-") as folder:
            file = Path(folder) / "samples.npz"
            np.savez(file, allow_pickle=False, **self.samples)
            return self.timer(replace(job, samples=str(file)), report)


def prepare(
    a: BundleSide,
    b: BundleSide,
    *,
    batches: Sequence[int] | None,
    seconds: float | None,
    calibration: str | None,
    runtime: str | None = None,
    here: bool = True,
) -> tuple[BundleTiming, list[str]]:
    """What is timed of two bundles, and what a reader must know of it; whatever can be refused is refused here.

    Args:
        runtime: of both, where they can be timed in it; None: what each is timed in by itself.
        here: whether this machine times them.
        batches: None is those of `measure --quick`.
        seconds: for all; None is those of `measure --quick`.
        calibration: where the samples of a graph are, if they were a file.

    Raises:
        InputError: `compare-float`, `bundle-without-onnx`, `hash-mismatch`, `runtime-unsupported`;
            of graphs, `calibration-needed` and those of `load_inputs`.
        MissingDependency: onnxruntime or scipy.
    """
    from quantkit.measurement.timing.speed import demand

    if here:
        demand({timed_in(side.bundle, runtime) for side in (a, b)})
    for side in (a, b):
        if side.floating:
            raise InputError(
                "compare-float",
                where=f"{side.name} --measure",
                value="the float model",
                rule="a bundle is timed against its float model by `measure`",
                remedy=side.measure(),
            )
    (ours, mine, most), (theirs, other, least) = (_reader(side.bundle, runtime) for side in (b, a))
    runtimes = (mine, other)
    kind, threads = b.manifest.model.kind, machine.cores()
    plan = with_changes(quick(kind), batches, seconds)
    if not holds_graph(b.bundle):
        plan = fitting(plan, min(most, least), kind)
        named = mine if mine == other else f"{mine} against {other}"
        job = RoundsJob(str(ours), str(theirs), plan.shapes(), threads, plan.seconds, runtimes=runtimes)
        return BundleTiming(job, runtime=named), []
    data = samples_of(b.bundle, calibration)
    sizes = [data.batch] if data.batch else list(plan.batches)
    notes = [f"the graph takes {data.batch} samples at a time, so it is timed at that"] if data.batch else []
    shapes = [Shape("prefill", size, 1) for size in sizes]
    ours, theirs = ours / load_runtime(mine).graph, theirs / load_runtime(other).graph
    job = RoundsJob(str(ours), str(theirs), shapes, threads, plan.seconds, runtimes=runtimes)
    return BundleTiming(job, data.first(max(sizes)), mine), notes


def timed_in(bundle: Bundle, asked: str | None = None) -> str:
    """The runtime that a comparison times a bundle in: the one whose scores are asked for, where it can be timed."""
    if asked in (of_graphs() if holds_graph(bundle) else timed()):
        return str(asked)
    name = None if (bundle.path / "onnx").is_dir() else usage.file_runtime(bundle.manifest)
    return name or RUNTIME


def _reader(bundle: Bundle, asked: str | None = None) -> tuple[Path, str, int]:
    """Of a bundle: the folder that is timed, its runtime, and how many tokens a sequence can have.

    Raises:
        InputError: `bundle-without-onnx`, `hash-mismatch`, `gguf-unreadable`. MissingDependency: llama-cpp-python.
    """
    runtime = load_runtime(timed_in(bundle, asked))
    folder = runtime.checked(bundle)
    return folder, runtime.name, 0 if holds_graph(bundle) else runtime.context(folder)


def of_run(
    taken: Sequence[Timing], margin: float, runtime: str = RUNTIME, device: str | None = None
) -> tuple[list[Quantity], list[str]]:
    """What raw times say, by the same test as every night's; and which shapes have none.

    Args:
        device: that they were taken on; None: this machine.
    """
    device = device or machine.device().get("name")
    found, notes = [], []
    for timing in taken:
        assert timing.shape is not None
        shape, words = timing.shape, timing.shape.words
        if timing.skipped:
            notes.append(f"{words}: not timed ({timing.skipped})")
            continue
        if "throttled" in timing.flags:
            notes.append(f"{words}: the processor lowered its clock meanwhile; cool it, and time it again")
        ours, theirs = (timing.seconds[side] for side in (CANDIDATE, BASELINE))
        evidence = slowdown(ours, theirs, rounds=timing.rounds, margin=margin, where=words)
        found.append(
            Quantity(
                what="latency",
                name=shape.name,
                # of each block the fastest step, as the ratio has it
                a=float(np.median(theirs.min(axis=(1, 2)))),
                b=float(np.median(ours.min(axis=(1, 2)))),
                unit="s",
                how="interleaved",
                evidence=evidence,
                n=ours.size,
                runtime=runtime,
                batch=shape.batch,
                shape=shape.sizes,
                device=device,
            )
        )
    return found, notes


def key(cell: Quantity) -> tuple[Any, ...]:
    """What it is a time of."""
    return cell.name, cell.runtime, cell.device, cell.batch, tuple(sorted((cell.shape or {}).items()))


def recorded(a: BundleSide, b: BundleSide, margin: float) -> tuple[list[Quantity], list[str]]:
    """What the rows of both say: those that were timed against each other, else against one baseline on one device.

    Returns:
        The comparisons, and what a reader must know of them.
    """
    direct = [_direct(row, margin, swapped=False) for row in _against(b, a)]
    direct += [_direct(row, margin, swapped=True) for row in _against(a, b)]
    if direct:
        return list({key(each): each for each in reversed(direct)}.values())[::-1], []
    ours = {_place(row): row for row in b.rows if _is_timed(row)}
    found, busy, versions = [], 1.0, set()
    for row in a.rows:
        other = ours.get(_place(row)) if _is_timed(row) else None
        if other is None or row.baseline is None or other.baseline is None:
            continue
        found.append(_by_ratio(row, other, margin))
        busy = max(busy, *(_times(other.baseline.value, row.baseline.value)))
        versions |= {each.version for each in (row, other)}
    notes = []
    if busy > _BUSY:
        notes.append(
            f"the baseline took up to {busy:.1f} times as long in one run as in the other: the machine was busy"
        )
    if len(versions) > 1:
        notes.append(f"the two were timed in versions {' and '.join(sorted(versions))} of the runtime")
    return found, notes


def _times(one: float, other: float) -> tuple[float, float]:
    return one / other, other / one


def _is_timed(row: Row) -> bool:
    base = row.baseline
    return row.name in _TIMED and row.value is not None and base is not None and base.ratio_ci95 is not None


def _against(side: BundleSide, other: BundleSide) -> list[Row]:
    """A side's own rows that have the other for their baseline."""
    return [
        row
        for row in side.rows
        if not side.floating and _is_timed(row) and row.baseline is not None and row.baseline.subject == other.subject
    ]


def _place(row: Row) -> tuple[Any, ...]:
    """Rows of one place can be set against each other."""
    shape = tuple(sorted((row.shape or {}).items()))
    baseline = row.baseline.subject if row.baseline else None
    device = row.device.id if row.device else None
    return row.name, row.batch, shape, row.runtime, device, row.settings.get("threads"), baseline


def _ratio(row: Row) -> tuple[MeasuredValue, Doubt]:
    """(how many times as fast as its baseline, with the A/A spread, why that is not believed)."""
    base, speed = row.baseline, speed_up(row)
    assert base is not None and speed is not None
    # a block has two visits a side
    steps = 2 * Visit.fitting(max(row.value or 0.0, base.value)).burst
    degrees = max(1, min(_GROUPS, (row.n or 0) // steps) - 1)
    found = MeasuredValue.ratio(speed.ratio, speed.ci95, spread=speed.spread, degrees=degrees)
    return found, speed.doubt


def _direct(row: Row, margin: float, *, swapped: bool) -> Quantity:
    """Of one run; swapped: the row is A's."""
    assert row.baseline is not None
    found, doubt = _ratio(row)
    own, other = (KNOWN, found) if swapped else (found, KNOWN)
    times = (row.value, row.baseline.value) if swapped else (row.baseline.value, row.value)
    return _asked(row, times, "interleaved", _slower(own, other, margin, doubt))


def _by_ratio(a: Row, b: Row, margin: float) -> Quantity:
    (ours, doubt), (theirs, other) = _ratio(b), _ratio(a)
    if "ceiling" in (doubt, other):
        doubt = "ceiling"
    else:
        hidden = is_hidden(ours.value - theirs.value, max(b.aa_spread or 0.0, a.aa_spread or 0.0))
        doubt = "noise" if hidden else ""
    return _asked(b, (a.value, b.value), "ratio of ratios", _slower(ours, theirs, margin, doubt))


def _slower(candidate: MeasuredValue, baseline: MeasuredValue, margin: float, doubt: Doubt) -> Apart:
    how: dict[str, Any] = {"margin": margin, "alarm": margin, "lower_is_better": False, "logarithm": True}
    return difference(candidate, baseline, doubt=doubt, **how)


def _asked(row: Row, times: tuple[float | None, float | None], how: How, evidence: Apart) -> Quantity:
    return Quantity(
        what="latency",
        name=row.name,
        a=times[0],
        b=times[1],
        unit="s",
        how=how,
        evidence=evidence,
        n=row.n,
        runtime=row.runtime,
        batch=row.batch,
        shape=row.shape,
        device=row.device.name if row.device else None,
    )
