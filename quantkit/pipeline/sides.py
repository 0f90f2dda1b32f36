"""The two that are compared: opened, checked, what was measured of each, and how good B is against A.

A side is a bundle, or the float model that the other side's bundle was made from. Of the float model nothing is opened:
whatever is known of the bundle is known against it, position by position and batch by batch. Accuracy is compared item
by item where both keep their items, else by the intervals of their rows.

How long B takes against A: in one run, or by what each run of its own said of one baseline.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit import machine
from quantkit.bundle import Bundle, Manifest
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.content import is_path
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items, against, load_items
from quantkit.measurement.compared import How, Quantity
from quantkit.measurement.rows import Data, Row, read_rows
from quantkit.measurement.size import bits_per_weight, folder_of, weight_bytes
from quantkit.measurement.timing import rounds
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, RoundsJob
from quantkit.measurement.timing.schedule import Shape, Timing, Visit
from quantkit.measurement.verdict import speed_up
from quantkit.pipeline.graphs.bundles import holds_graph, samples_of
from quantkit.pipeline.measure import fitting, quick, with_changes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import RUNTIME, export_of, runtimes_of
from quantkit.report.bundle import usage
from quantkit.runtimes import load_runtime, of_graphs, timed
from quantkit.runtimes.child import Report
from quantkit.stats.evidence import KNOWN, Apart, Doubt, MeasuredValue, difference, is_hidden
from quantkit.stats.slowdown import slowdown

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import Feed


_ITEMS = "items.safetensors"
# rows of one name that are about something else: a longer context, or some of the items; of two ways to multiply, the
# positions that a bundle keeps are those of prompts
_OTHER = {"kv_cache", "surer_than"}


@dataclass(frozen=True)
class BundleSide:
    """One of the two.

    Args:
        name: as it was given.
        bundle: whose measurements count: of the float model, the other side's.
        floating: whether this is the float model.
        rows: of `measurements.jsonl`, the bundle's own as it is now.
    """

    name: str
    bundle: Bundle
    floating: bool
    rows: tuple[Row, ...]

    @property
    def manifest(self) -> Manifest:
        """The bundle's."""
        return self.bundle.manifest

    @property
    def subject(self) -> str:
        """What it is called in the rows."""
        return self.original if self.floating else self.manifest.content_sha256

    @property
    def original(self) -> str:
        """The float model's hash."""
        return self.manifest.model.source.sha256

    def items(self) -> dict[str, str]:
        """Runtime -> the file with what was found at each position."""
        found: dict[str, str] = {}
        scored = [row.runtime for row in self.rows if row.name == "accuracy.kl" and row.runtime]
        for path in sorted(entry.path for entry in self.manifest.files):
            if path == _ITEMS:
                own = runtimes_of(self.manifest)[:1]
                # what was exported first may not run where it was compiled: then its values were scored in torch
                runtime = next((name for name in [*own, *scored] if name in scored), "torch")
                found = {runtime: path, **found}
            elif match := re.fullmatch(r"items-(.+)\.safetensors", path):
                found[match[1]] = path
        return found

    def read(self, runtime: str) -> Items:
        """What was found at each position in a runtime.

        Raises:
            InputError: `items-invalid`.
        """
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
        """The rows about the original, of all that was scored; of one runtime."""
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
        """What was scored in a runtime."""
        return next((row.data for row in self.accuracy(runtime) if row.name == "accuracy.kl"), None)

    def size(self, runtime: str) -> tuple[int | None, float | None]:
        """(bytes of the weights that a runtime loads, bits a weight of the quantized layers)."""
        if not self.floating:
            # what was scored by its values alone is what was exported first
            exports = [export_of(runtime), *(next(iter(step)) for step in self.manifest.recipe.get("export", []))]
            sizes = (weight_bytes(self.manifest.files, folder=folder_of(name)) for name in exports)
            return next((size for size in sizes if size), None), bits_per_weight(self.manifest.layers)
        given = (row.baseline for row in self.rows if row.name == "size.bytes" and row.baseline is not None)
        return next((int(each.value) for each in given if each.subject == self.original), None), None

    def measure(self, *options: str) -> str:
        """The command that measures it."""
        return " ".join(["quantkit measure", _near(self.bundle.path), *options, *usage.against(self.manifest)])


def open_sides(a: Bundle | str | Path, b: Bundle | str | Path) -> tuple[BundleSide, BundleSide]:
    """Both sides, every hash of their bundles verified.

    Raises:
        InputError: `not-a-bundle`, `unfinished-build`, `manifest-invalid`, `hash-mismatch`, `measurements-invalid`;
            `bundle-needed`, two models; `models-differ`.
    """
    first, second = (_bundle(each) for each in (a, b))
    if first is None and second is None:
        raise InputError(
            "bundle-needed",
            where=f"{a} and {b}",
            value="two models",
            rule="at least one is a bundle: a float model is compared by what was measured against it",
            remedy=f"quantkit compile {a}",
        )
    for bundle in (first, second):
        if bundle is not None:
            bundle.demand_intact("")
    one = _side(a, first, second)
    other = _side(b, second, first)
    _demand_one_model(one, other)
    return one, other


def _bundle(reference: Bundle | str | Path) -> Bundle | None:
    """The bundle that is meant; None where it is a model."""
    if isinstance(reference, Bundle):
        return Bundle.load(reference.path)
    path = Path(reference).expanduser()
    if not (path / MANIFEST).is_file() and _is_model(str(reference), path):
        return None
    return Bundle.load(path)


def _is_model(reference: str, path: Path) -> bool:
    if reference.startswith(("hf:", "alias:", "path:")):
        return True
    if path.exists() or is_path(reference):
        return (path / "config.json").is_file() or (path.suffix.lower() in (".onnx", ".gguf") and path.is_file())
    from quantkit.model.source.alias import ALIASES

    return reference in ALIASES


def _side(reference: Bundle | str | Path, own: Bundle | None, other: Bundle | None) -> BundleSide:
    bundle = own or other
    assert bundle is not None
    if own is None:
        _demand_original(str(reference), bundle)
    path = bundle.path / MEASUREMENTS
    rows = read_rows(path) if path.is_file() else []
    subject = bundle.manifest.content_sha256
    name = str(reference.path) if isinstance(reference, Bundle) else str(reference)
    return BundleSide(name, bundle, own is None, tuple(row for row in rows if row.subject == subject))


def _demand_original(reference: str, bundle: Bundle) -> None:
    """Refuse a float model that the bundle was not made from; only one whose name does not say it is hashed."""
    source = bundle.manifest.model.source
    if reference in (source.ref, source.ref.removeprefix("alias:")):
        return
    if reference.lower().endswith(".onnx"):
        from quantkit.graph.open import open_graph

        found = open_graph(Path(reference).expanduser()).sha256
    else:
        from quantkit.model.source.open import open_model

        found = open_model(reference).sha256
    if found != source.sha256:
        raise _other_model(reference, found, str(bundle.path), source.sha256)


def _demand_one_model(a: BundleSide, b: BundleSide) -> None:
    if a.original != b.original:
        mine, other = a.manifest.model, b.manifest.model
        raise _other_model(f"{b.name} ({other.name})", b.original, f"{a.name} ({mine.name})", a.original)


def _other_model(where: str, found: str, of: str, expected: str) -> InputError:
    return InputError(
        "models-differ",
        where=where,
        value=f"made from {found[:12]}",
        rule=f"{of} was made from {expected[:12]}, and what is compared are versions of one model",
        remedy="compile both from the same model",
    )


def _near(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


_NEXT_WORD, _KL, _PERPLEXITY = "accuracy.next_word", "accuracy.kl", "accuracy.perplexity"
# of models that have no next word, what counts, as far as it was scored; others say the same again
_LABELLED = (
    *("accuracy.top1", "accuracy.recall_at_1", "accuracy.top1_agreement", "accuracy.same"),
    *("accuracy.cosine", "accuracy.relative_error", _KL),
)


def common_runtime(a: BundleSide, b: BundleSide, asked: str | None) -> tuple[str, str, list[str]]:
    """The runtimes in which A and B were scored, the same where there is one, and what a reader must know.

    Raises:
        InputError: `items-missing`; `runtime-unsupported`, none of the one that was asked for.
    """
    found = []
    for side in (a, b):
        runtimes = list(side.items())
        if not runtimes:
            raise InputError(
                "items-missing",
                where=str(side.bundle.path),
                value="the bundle does not hold what was found at each position",
                rule="next words are compared one by one",
                remedy=side.measure("--no-speed"),
            )
        if asked is not None and asked not in runtimes:
            raise InputError(
                "runtime-unsupported",
                where="--runtime",
                value=f"{side.name} was not scored in {asked}",
                rule=f"it was in {', '.join(runtimes)}",
                remedy=side.measure(f"--runtime {asked}", "--no-speed"),
            )
        found.append(runtimes)
    both = [runtime for runtime in found[0] if runtime in found[1] and asked in (None, runtime)]
    if both:
        return both[0], both[0], []
    first, second = found[0][0], found[1][0]
    return first, second, [f"A was scored in {first} and B in {second}: what differs may be the runtimes"]


def demand_one_text(a: BundleSide, b: BundleSide, first: Data | None, second: Data | None) -> Data:
    """What both were scored on.

    Raises:
        InputError: `items-differ`.
    """
    for side, data in ((a, first), (b, second)):
        if data is None:
            raise InputError(
                "items-differ",
                where=str(side.bundle.path),
                value="no row says what was scored",
                rule="both sides were scored on the same items",
                remedy=side.measure("--no-speed"),
            )
    assert first is not None and second is not None
    if first.sha256 != second.sha256:
        what = (f"{data.set} ({data.split}, {data.items:,} items, {data.sha256[:12]})" for data in (first, second))
        raise InputError(
            "items-differ",
            where=f"{a.name} and {b.name}",
            value=" and ".join(what),
            rule="both sides are scored on the same items, which are paired",
            remedy=_remedy(a, b, first, second),
        )
    return first


def _remedy(a: BundleSide, b: BundleSide, first: Data, second: Data) -> str:
    if first.set != second.set:
        option = (f"--calibration {first.set}", "--no-speed")
        if a.floating or b.floating:
            return (b if a.floating else a).measure(*option)
        return f"{a.measure(*option)} and {b.measure(*option)}"
    for key, how in (("tokens", "cut it into {} and {} tokens"), ("template", "write it by template {} and {}")):
        mine, other = (side.manifest.recipe.get("calibration", {}).get(key) for side in (a, b))
        if mine != other:
            words = how.format(mine or "none", other or "none")
            return f"their recipes {words}: compile B with --set calibration.{key}={mine or 'null'}"
    return f"one of them is older than the text: {a.measure('--no-speed')} and {b.measure('--no-speed')}"


def by_item(a: Items, b: Items, margin: float, runtime: str, where: str) -> list[Quantity]:
    """Next words, KL and log-perplexity, position by position.

    Raises:
        InputError: `items-differ`, `values-invalid`, `nothing-scored`.
    """
    found = against(a, b, dict.fromkeys((_NEXT_WORD, _KL, _PERPLEXITY), margin), where=where)
    values: Mapping[str, tuple[Any, Any, str]] = {
        _NEXT_WORD: (a.right_candidate, b.right_candidate, "1"),
        _KL: (a.kl, b.kl, "nat"),
        _PERPLEXITY: (a.nll_candidate, b.nll_candidate, "1"),
    }
    asked = []
    for name, evidence in found.items():
        before, after, unit = values[name]
        means = [float(np.mean(side)) for side in (before, after)]
        if name == _PERPLEXITY:
            means = [float(np.exp(min(mean, 700.0))) for mean in means]
        asked.append(Quantity("accuracy", name, means[0], means[1], unit, "paired", evidence, n=a.n, runtime=runtime))
    return asked


def by_row(a: BundleSide, b: BundleSide, margin: float, asked: str | None) -> tuple[list[Quantity], Data, list[str]]:
    """What the rows of models without next words say: labels, pairs, cosines, each side by its own interval.

    Raises:
        InputError: `items-missing`, nothing that both were scored by; `items-differ`.
    """
    rows = [{_same(row): row for row in side.accuracy(asked) if row.name in _LABELLED} for side in (a, b)]
    shared = [place for place in rows[0] if place in rows[1] and not _said_by_cosine(place, rows[0])]
    if not shared:
        side = a if not rows[0] else b
        raise InputError(
            "items-missing",
            where=str(side.bundle.path),
            value="nothing that both were scored by, in one runtime",
            rule="both sides were scored",
            remedy=side.measure("--no-speed", *([f"--runtime {asked}"] if asked else [])),
        )
    data = demand_one_text(a, b, rows[0][shared[0]].data, rows[1][shared[0]].data)
    found, without = [], []
    for place in sorted(shared, key=lambda each: _LABELLED.index(each[0])):
        one, other = rows[0][place], rows[1][place]
        first, second = _measured(one, floating=a.floating), _measured(other, floating=b.floating)
        if first is None or second is None:
            without.append(one.name)
            continue
        evidence = difference(second, first, margin=margin, lower_is_better=one.better != "higher")
        shown = [_value(row, floating=side.floating) for row, side in ((one, a), (other, b))]
        output = one.settings.get("output")
        found.append(
            Quantity(
                *("accuracy", one.name, shown[0], shown[1], one.unit, "apart", evidence),
                n=one.n,
                runtime=one.runtime,
                output=None if output is None else str(output),
            )
        )
    notes = [
        "no items are kept of this kind of model: each side is known by its own interval, which is wider than a pair's"
    ]
    if without:
        notes.append(f"not decided, for want of an interval: {', '.join(sorted(set(without)))}")
    return found, data, notes


def _same(row: Row) -> tuple[Any, ...]:
    return row.name, row.runtime, row.settings.get("output")


def _said_by_cosine(place: tuple[Any, ...], rows: Mapping[tuple[Any, ...], Row]) -> bool:
    """Tell whether a relative error is of an output that has a cosine, which says the same."""
    return place[0] == "accuracy.relative_error" and ("accuracy.cosine", *place[1:]) in rows


def _measured(row: Row, *, floating: bool) -> MeasuredValue | None:
    """A row's value with its interval; of shares of the same items, against the original: those are pairs already."""
    base = row.baseline
    if base is not None and base.difference is not None and base.difference_ci95 is not None:
        return MeasuredValue(0.0, (0.0, 0.0)) if floating else MeasuredValue(base.difference, base.difference_ci95)
    if floating:
        return None if base is None else MeasuredValue(base.value, (base.value, base.value))
    if row.value is None or row.ci95 is None:
        return None
    return MeasuredValue(row.value, (min(row.ci95[0], row.value), max(row.ci95[1], row.value)))


def _value(row: Row, *, floating: bool) -> float | None:
    return (row.baseline.value if row.baseline else None) if floating else row.value


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
