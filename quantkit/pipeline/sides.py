"""Sides of a comparison: opened, checked, and compared in accuracy and time.

A side is a bundle, or the float model that the other side's bundle was made from. The float model itself is not opened:
the bundle's rows and items already compare against it, position by position and batch by batch. Accuracy is compared
item by item where both sides keep items, otherwise by the intervals of their rows. Times come from one run, or from the
ratios of two runs to one baseline.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit import machine
from quantkit.bundle import Bundle, Manifest
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.content import is_path
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items, load_items
from quantkit.measurement.compared import How, Quantity
from quantkit.measurement.rows import Data, Row, read_rows
from quantkit.measurement.size import bits_per_weight, folder_of, weight_bytes
from quantkit.measurement.timing import rounds
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, RoundsJob
from quantkit.measurement.timing.schedule import Shape, Timing, Visit
from quantkit.measurement.verdict import speed_up
from quantkit.model.source.alias import ALIASES
from quantkit.pipeline.graphs.bundles import holds_graph, samples_of
from quantkit.pipeline.measure import fitting, quick, with_changes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import RUNTIME, export_of, runtimes_of
from quantkit.recipe import CalibrationChoice
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime, of_graphs, timed
from quantkit.runtimes.child import Report
from quantkit.stats.evidence import KNOWN, Doubt, MeasuredValue, difference, is_hidden
from quantkit.stats.slowdown import slowdown

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import Feed

_ITEMS = "items.safetensors"
# rows of one name that are about something else: a longer context, or some of the items; of two ways to multiply, the
# positions that a bundle keeps are those of prompts
_OTHER = {"kv_cache", "surer_than"}
_TIMED = ("latency.decode_step", "latency.prefill")
# a bootstrap draws at most so many groups of blocks
_GROUPS = 20
# a baseline that took so many times as long in one of the two runs had company
_BUSY = 1.2


@dataclass(frozen=True)
class BundleSide:
    """One side of a comparison.

    Attributes:
        name: name or path as typed.
        bundle: bundle whose measurements count; for the float model, the other side's.
        floating: True for the float model.
        rows: current rows of the bundle's own `measurements.jsonl`.
    """

    name: str
    bundle: Bundle
    floating: bool
    rows: tuple[Row, ...]

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle."""
        return self.bundle.manifest

    @property
    def subject(self) -> str:
        """Name in the rows."""
        return self.original if self.floating else self.manifest.content_sha256

    @property
    def original(self) -> str:
        """Hash of the float model."""
        return self.manifest.model.source.sha256

    def items(self) -> dict[str, str]:
        """Map runtimes to the file of results by position."""
        files: dict[str, str] = {}
        scored = [row.runtime for row in self.rows if row.name == "accuracy.kl" and row.runtime]
        for path in sorted(entry.path for entry in self.manifest.files):
            if path == _ITEMS:
                own = runtimes_of(self.manifest)[:1]
                # what was exported first may not run where it was compiled: then its values were scored in torch
                runtime = next((name for name in [*own, *scored] if name in scored), "torch")
                files = {runtime: path, **files}
            elif match := re.fullmatch(r"items-(.+)\.safetensors", path):
                files[match[1]] = path
        return files

    def read(self, runtime: str) -> Items:
        """Read the results per position in a runtime. Raises InputError `items-invalid`."""
        items = load_items(self.bundle.path / self.items()[runtime])
        if not self.floating:
            return items
        return replace(
            items,
            nll_candidate=items.nll_original,
            kl=items.kl * 0.0,
            agree=items.agree | True,
            right_candidate=items.right_original,
            best_candidate=items.best_original,
            chance_candidate=items.chance_original,
        )

    def accuracy(self, runtime: str | None = None) -> list[Row]:
        """Return the rows of accuracy against the original over all scored data, in one runtime."""
        return [
            row
            for row in self.rows
            if row.name.startswith("accuracy.")
            and row.data is not None
            and row.value is not None
            and (runtime is None or row.runtime == runtime)
            and (row.baseline is None or row.baseline.subject == self.original)
            and not _OTHER & set(row.settings)
            and row.settings.get("way") != "steps"
        ]

    def data(self, runtime: str) -> Data | None:
        """Return the scored data in a runtime."""
        return next((row.data for row in self.accuracy(runtime) if row.name == "accuracy.kl"), None)

    def size(self, runtime: str) -> tuple[int | None, float | None]:
        """Return (bytes of the weights that a runtime loads, bits a weight of the quantized layers)."""
        if not self.floating:
            # what was scored by its values alone is what was exported first
            exports = [export_of(runtime), *(next(iter(step)) for step in self.manifest.recipe.get("export", []))]
            sizes = (weight_bytes(self.manifest.files, folder=folder_of(name)) for name in exports)
            return next((size for size in sizes if size), None), bits_per_weight(self.manifest.layers)
        bases = (row.baseline for row in self.rows if row.name == "size.bytes" and row.baseline is not None)
        return next((int(base.value) for base in bases if base.subject == self.original), None), None

    def measure(self, *options: str) -> str:
        """Return the command to measure this side."""
        path = shlex.quote(str(self.bundle.path))
        return " ".join(["quantkit measure", path, *options, *usage.against(self.manifest, usage.here(self.manifest))])


def open_sides(a: Bundle | str | Path, b: Bundle | str | Path) -> tuple[BundleSide, BundleSide]:
    """Open both sides, every hash of their bundles verified.

    Raises InputError: `not-a-bundle`, `unfinished-build`, `manifest-invalid`, `hash-mismatch`, `measurements-invalid`;
    `bundle-needed`, two models; `models-differ`.
    """
    first, second = _bundle(a), _bundle(b)
    if first is None and second is None:
        rule = "at least one side is a bundle: a float model has no measurements of its own"
        where, remedy = f"{a} and {b}", f"quantkit compile {a}"
        raise InputError("bundle-needed", where=where, value="two models", rule=rule, remedy=remedy)
    for bundle in (first, second):
        if bundle is not None:
            bundle.demand_intact("")
    one, other = _side(a, first, second), _side(b, second, first)
    if one.original != other.original:
        mine, theirs = one.manifest.model, other.manifest.model
        where = f"{other.name} ({theirs.name})"
        raise _other_model(where, other.original, f"{one.name} ({mine.name})", one.original)
    return one, other


def _bundle(reference: Bundle | str | Path) -> Bundle | None:
    """Load the named bundle; None for a model."""
    if isinstance(reference, Bundle):
        return Bundle.load(reference.path)
    path, name = Path(reference).expanduser(), str(reference)
    if name.startswith(("hf:", "alias:", "path:")):
        is_model = True
    elif path.exists() or is_path(name):
        is_model = (path / "config.json").is_file() or (path.suffix.lower() in (".onnx", ".gguf") and path.is_file())
    else:
        is_model = name in ALIASES
    return None if is_model and not (path / MANIFEST).is_file() else Bundle.load(path)


def _side(reference: Bundle | str | Path, own: Bundle | None, other: Bundle | None) -> BundleSide:
    bundle = own or other
    assert bundle is not None
    name = str(reference.path) if isinstance(reference, Bundle) else str(reference)
    if own is None:
        _demand_original(name, bundle)
    path = bundle.path / MEASUREMENTS
    rows = read_rows(path) if path.is_file() else []
    subject = bundle.manifest.content_sha256
    return BundleSide(name, bundle, own is None, tuple(row for row in rows if row.subject == subject))


def _demand_original(reference: str, bundle: Bundle) -> None:
    """Refuse a float model other than the bundle's source; the hash is computed only if the name does not settle it."""
    source = bundle.manifest.model.source
    if reference in (source.ref, source.ref.removeprefix("alias:")):
        return
    if reference.lower().endswith(".onnx"):
        from quantkit.graph.open import open_graph

        sha256 = open_graph(Path(reference).expanduser()).sha256
    else:
        from quantkit.model.source.open import open_model

        sha256 = open_model(reference).sha256
    if sha256 not in (source.sha256, source.base):
        raise _other_model(reference, sha256, str(bundle.path), source.base or source.sha256)


def _other_model(where: str, sha256: str, of: str, expected: str) -> InputError:
    rule = f"{of} was made from {expected[:12]}; only versions of one model are compared"
    value, remedy = f"made from {sha256[:12]}", "compile both from the same model"
    return InputError("models-differ", where=where, value=value, rule=rule, remedy=remedy)


def common_runtime(a: BundleSide, b: BundleSide, asked: str | None) -> tuple[str, str, list[str]]:
    """Return the runtimes of A's and B's scores, the same one if possible, and notes for a reader.

    Raises InputError: `items-missing`; `runtime-unsupported`, if none is the requested one.
    """
    first, second = list(a.items()), list(b.items())
    for side, runtimes in ((a, first), (b, second)):
        if not runtimes:
            value = "the bundle has no results by position"
            rule, remedy = "next words are compared one by one", side.measure("--no-speed")
            raise InputError("items-missing", where=str(side.bundle.path), value=value, rule=rule, remedy=remedy)
        if asked is not None and asked not in runtimes:
            value, rule = f"{side.name} was not scored in {asked}", f"it was in {', '.join(runtimes)}"
            remedy = side.measure(f"--runtime {asked}", "--no-speed")
            raise InputError("runtime-unsupported", where="--runtime", value=value, rule=rule, remedy=remedy)
    both = [runtime for runtime in first if runtime in second and asked in (None, runtime)]
    if both:
        return both[0], both[0], []
    return first[0], second[0], [f"A was scored in {first[0]} and B in {second[0]}: what differs may be the runtimes"]


def demand_one_text(a: BundleSide, b: BundleSide, first: Data | None, second: Data | None) -> Data:
    """Return the data with both scores. Raises InputError `items-differ`."""
    for side, data in ((a, first), (b, second)):
        if data is None:
            rule, remedy = "both sides were scored on the same items", side.measure("--no-speed")
            value = "no row names the scored text"
            raise InputError("items-differ", where=str(side.bundle.path), value=value, rule=rule, remedy=remedy)
    assert first is not None and second is not None
    if first.sha256 != second.sha256:
        what = (f"{data.set} ({data.split}, {data.items:,} items, {data.sha256[:12]})" for data in (first, second))
        rule, remedy = "both sides are scored on the same items, pair by pair", _remedy(a, b, first, second)
        raise InputError("items-differ", f"{a.name} and {b.name}", " and ".join(what), rule, remedy)
    return first


def _remedy(a: BundleSide, b: BundleSide, first: Data, second: Data) -> str:
    if first.set != second.set:
        option = (f"--calibration {first.set}", "--no-speed")
        if a.floating or b.floating:
            return (b if a.floating else a).measure(*option)
        return f"{a.measure(*option)} and {b.measure(*option)}"
    for key, how in (("tokens", "cut it into {} and {} tokens"), ("template", "write it by template {} and {}")):
        usual = CalibrationChoice.model_fields[key].default
        mine, other = (side.manifest.recipe.get("calibration", {}).get(key, usual) for side in (a, b))
        if mine != other:
            words = how.format(mine or "none", other or "none")
            return f"their recipes {words}: compile B with --set calibration.{key}={mine or 'null'}"
    return f"one of them is older than the text: {a.measure('--no-speed')} and {b.measure('--no-speed')}"


# --- times -----------------------------------------------------------------------------------------------------------


class RoundsTimer(Protocol):
    """Times two sides, on this machine or on a device."""

    device: str

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        """Time all shapes. Raises InputError: those of `timing.rounds.run`."""
        ...


class _Here:
    def __init__(self) -> None:
        self.device = str(machine.device().get("name"))

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        return rounds.run(job, report)


@dataclass(frozen=True)
class BundleTiming:
    """Two bundles to time in turns, each in ONNX Runtime or llama.cpp.

    Attributes:
        job: sides and shapes; its samples have no file yet.
        samples: for graphs, an array [n, ...] for each input; otherwise None.
        runtime: runtime of both, for their rows.
    """

    job: RoundsJob
    samples: Feed | None = None
    runtime: str = RUNTIME
    timer: RoundsTimer = field(default_factory=_Here)

    def run(self, progress: Progress, shapes: Sequence[Shape] | None = None) -> list[Timing]:
        """Time all shapes; or some, in another order and in their share of the seconds.

        Raises InputError: those of `timing.rounds.run`; MissingDependency: onnxruntime or scipy.
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
    """Prepare the timing of two bundles, with what a reader must know of it; whatever can be refused is refused here.

    Args:
        runtime: of both, where they can be timed in it; None: what each is timed in by itself.
        here: whether this machine times them.
        batches: None is those of `measure --quick`.
        seconds: for all; None is those of `measure --quick`.
        calibration: where the samples of a graph are, if they were a file.

    Raises InputError: `compare-float`, `bundle-without-onnx`, `hash-mismatch`, `runtime-unsupported`; of graphs,
    `calibration-needed` and those of `load_inputs`; MissingDependency: onnxruntime or scipy.
    """
    from quantkit.measurement.timing.speed import demand

    if here:
        demand({timed_in(side.bundle, runtime) for side in (a, b)})
    for side in (a, b):
        if side.floating:
            where, rule = f"{side.name} --measure", "a bundle is timed against its float model by `measure`"
            raise InputError("compare-float", where=where, value="the float model", rule=rule, remedy=side.measure())
    (ours, mine, most), (theirs, other, least) = (_reader(side.bundle, runtime) for side in (b, a))
    kind, threads = b.manifest.model.kind, machine.cores()
    plan = with_changes(quick(kind), batches, seconds)
    samples, notes, named = None, [], mine if mine == other else f"{mine} against {other}"
    if holds_graph(b.bundle):
        data = samples_of(b.bundle, calibration)
        sizes = [data.batch] if data.batch else list(plan.batches)
        notes = [f"the graph takes {data.batch} samples at a time, so it is timed at that"] if data.batch else []
        shapes = [Shape("prefill", size, 1) for size in sizes]
        samples, named = data.first(max(sizes)), mine
        ours, theirs = ours / load_runtime(mine).graph, theirs / load_runtime(other).graph
    else:
        plan = fitting(plan, min(most, least), kind)
        shapes = plan.shapes()
    job = RoundsJob(str(ours), str(theirs), shapes, threads, plan.seconds, runtimes=(mine, other))
    return BundleTiming(job, samples, named), notes


def timed_in(bundle: Bundle, asked: str | None = None) -> str:
    """Return the runtime for timing a bundle in a comparison: the one with the requested scores, if possible."""
    if asked in (of_graphs() if holds_graph(bundle) else timed()):
        return str(asked)
    name = None if (bundle.path / "onnx").is_dir() else usage.file_runtime(bundle.manifest)
    return name or RUNTIME


def _reader(bundle: Bundle, asked: str | None = None) -> tuple[Path, str, int]:
    """Return the folder of a bundle that is timed, its runtime, and how many tokens a sequence can have.

    Raises InputError: `bundle-without-onnx`, `hash-mismatch`, `gguf-unreadable`. MissingDependency: llama-cpp-python.
    """
    runtime = load_runtime(timed_in(bundle, asked))
    folder = runtime.checked(bundle)
    return folder, runtime.name, 0 if holds_graph(bundle) else runtime.context(folder)


def of_run(
    taken: Sequence[Timing], margin: float, runtime: str = RUNTIME, device: str | None = None
) -> tuple[list[Quantity], list[str]]:
    """Compare raw times, by the same test as every night's; with the shapes that have none.

    Args:
        device: that they were taken on; None: this machine.
    """
    device = device or machine.device().get("name")
    quantities, notes = [], []
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
        # of each block the fastest step, as the ratio has it
        before, after = (float(np.median(side.min(axis=(1, 2)))) for side in (theirs, ours))
        more: dict[str, Any] = {"batch": shape.batch, "shape": shape.sizes, "device": device}
        quantities.append(
            Quantity(
                *("latency", shape.name, before, after, "s", "interleaved", evidence),
                n=ours.size,
                runtime=runtime,
                **more,
            )
        )
    return quantities, notes


def key(cell: Quantity) -> tuple[Any, ...]:
    """Make the key of a time: rows with the same key are times of the same thing."""
    return cell.name, cell.runtime, cell.device, cell.batch, tuple(sorted((cell.shape or {}).items()))


def recorded(a: BundleSide, b: BundleSide, margin: float) -> tuple[list[Quantity], list[str]]:
    """Compare recorded rows: times of one run against each other, else times against one baseline on one device.

    Returns:
        The comparisons, and what a reader must know of them.
    """
    direct = [_direct(row, margin, swapped=False) for row in _against(b, a)]
    direct += [_direct(row, margin, swapped=True) for row in _against(a, b)]
    if direct:
        return list({key(quantity): quantity for quantity in reversed(direct)}.values())[::-1], []
    ours = {_place(row): row for row in b.rows if _is_timed(row)}
    quantities, busy, versions = [], 1.0, set[str]()
    for row in filter(_is_timed, a.rows):
        other = ours.get(_place(row))
        if other is None or row.baseline is None or other.baseline is None:
            continue
        quantities.append(_by_ratio(row, other, margin))
        times = other.baseline.value / row.baseline.value
        busy, versions = max(busy, times, 1 / times), versions | {row.version, other.version}
    notes = []
    if busy > _BUSY:
        longer = f"up to {busy:.1f} times as long in one run as in the other"
        notes.append(f"the baseline took {longer}: the machine was busy")
    if len(versions) > 1:
        notes.append(f"the two were timed in versions {' and '.join(sorted(versions))} of the runtime")
    return quantities, notes


def _is_timed(row: Row) -> bool:
    base = row.baseline
    return row.name in _TIMED and row.value is not None and base is not None and base.ratio_ci95 is not None


def _against(side: BundleSide, other: BundleSide) -> list[Row]:
    """Return a side's rows with the other side as baseline."""
    rows = [] if side.floating else filter(_is_timed, side.rows)
    return [row for row in rows if row.baseline is not None and row.baseline.subject == other.subject]


def _place(row: Row) -> tuple[Any, ...]:
    """Make the key of a row's place: only rows of one place are comparable."""
    shape = tuple(sorted((row.shape or {}).items()))
    baseline = row.baseline.subject if row.baseline else None
    device = row.device.id if row.device else None
    return row.name, row.batch, shape, row.runtime, device, row.settings.get("threads"), baseline


def _ratio(row: Row) -> tuple[MeasuredValue, Doubt]:
    """Return (how many times as fast as its baseline, with the A/A spread, why that is not believed)."""
    base, speed = row.baseline, speed_up(row)
    assert base is not None and speed is not None
    # a block has two visits a side
    steps = 2 * Visit.fitting(max(row.value or 0.0, base.value)).burst
    degrees = max(1, min(_GROUPS, (row.n or 0) // steps) - 1)
    return MeasuredValue.ratio(speed.ratio, speed.ci95, spread=speed.spread, degrees=degrees), speed.doubt


def _direct(row: Row, margin: float, *, swapped: bool) -> Quantity:
    """Compare by one run; `swapped` if the row is A's."""
    assert row.baseline is not None
    ratio, doubt = _ratio(row)
    times = (row.value, row.baseline.value) if swapped else (row.baseline.value, row.value)
    sides = (KNOWN, ratio) if swapped else (ratio, KNOWN)
    return _slower(row, times, "interleaved", *sides, margin, doubt)


def _by_ratio(a: Row, b: Row, margin: float) -> Quantity:
    (ours, doubt), (theirs, other) = _ratio(b), _ratio(a)
    if "ceiling" in (doubt, other):
        doubt = "ceiling"
    else:
        hidden = is_hidden(ours.value - theirs.value, max(b.aa_spread or 0.0, a.aa_spread or 0.0))
        doubt = "noise" if hidden else ""
    return _slower(b, (a.value, b.value), "ratio of ratios", ours, theirs, margin, doubt)


def _slower(
    row: Row,
    times: tuple[float | None, float | None],
    how: How,
    candidate: MeasuredValue,
    baseline: MeasuredValue,
    margin: float,
    doubt: Doubt,
) -> Quantity:
    test: dict[str, Any] = {"margin": margin, "alarm": margin, "lower_is_better": False, "logarithm": True}
    return Quantity(
        *("latency", row.name, *times, "s", how, difference(candidate, baseline, doubt=doubt, **test)),
        n=row.n,
        runtime=row.runtime,
        batch=row.batch,
        shape=row.shape,
        device=row.device.name if row.device else None,
    )
