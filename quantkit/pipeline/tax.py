"""`quantkit tax`: the time of quantized products on this machine beyond its bound, and advice.

The question is checked before anything is timed: shapes, formats, batches, traffic, device.

**A bundle's products** (`BundleWays`) have a variant for the blocks and one for the head. A graph exported with
`prefill: int8` has a third: it multiplies fewer than `ROWS` rows by its codes, and more rows in integers. The number of
rows alone decides which one a batch takes.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import content, limits, machine
from quantkit._version import __version__
from quantkit.bundle import Bundle, Verdict
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError, did_you_mean, unknown_name
from quantkit.exporters.onnx.integers import ROWS
from quantkit.kernels import dispatch
from quantkit.kernels.dispatch import FILE, LAYERS, OTHER_PACKING, KernelTiming, Recorded, fastest
from quantkit.measurement.operators import run as ops_run
from quantkit.measurement.operators.run import ALL, SweepJob
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import MeasuredFormat, advise, verdicts
from quantkit.model.sizes import configs, shapes
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.model.source.alias import ALIASES
from quantkit.pipeline.tax_devices import Graphics, Processor, demand_runtime
from quantkit.planning import efficiency
from quantkit.planning.traffic import of_products
from quantkit.report.kit import words
from quantkit.report.taxed import Taxed
from quantkit.target import Target

Report = Callable[[float, str], None]
# what times one thread count
Sweep = Callable[[SweepJob, Report], list[Row]]
DEVICES = ("cpu", "cuda")
# the flag of a processor that is a program
EMULATED = "emulated"
# what `exporters/onnx/integers/products.py` does by token
MANY = "int8.token"
# on a GPU, where the requested batches are powers of two
_BISECTIONS = 2
_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Question:
    """Question to `tax`, as typed.

    Attributes:
        model: a bundle, a folder with a config or weights, a `config.json`, or a shipped name; None takes `shapes`.
        shapes: `4096x14336`, ...
        formats: names of formats or variants (`int4`, `int4.g32.level0`), patterns (`int4*`), or `all`.
        batches: values of M; empty takes the target's.
        traffic: batch -> share of the steps; these batches are timed too.
        device: `cpu` or `cuda`; "" takes the target's.
        runtime: `onnxruntime` on a CPU, `torch` on a GPU; "" takes the one for the device.
        threads: thread counts, one run each; empty takes all cores.
        seconds: time for all runs together.
        target: name or path; None takes this processor.
        seed: seed of the weights and of the order of steps.
        cores: cores of the device that times, if it is another machine.
    """

    model: str | None = None
    shapes: Sequence[str] = ()
    formats: Sequence[str] = ()
    batches: Sequence[int] = ()
    traffic: Mapping[int, float] | None = None
    device: str = ""
    runtime: str = ""
    threads: Sequence[int] = ()
    seconds: float = 300.0
    target: str | None = None
    seed: int = 0
    cores: int | None = None


@dataclass(frozen=True)
class BundleWays:
    """Variants of a bundle's products.

    Attributes:
        body: variant of most linears.
        head: (K, N) of the head; None if it is not quantized.
        head_variant: variant of the head.
        many: variant of all products but the head from `ROWS` rows on; "" if it is `body`.
    """

    body: str
    head: tuple[int, int] | None
    head_variant: str
    many: str

    @property
    def variants(self) -> list[str]:
        """Variants, each once."""
        return list(dict.fromkeys(name for name in (self.body, self.head_variant, self.many) if name))

    def at(self, rows: int) -> str:
        """Name the variant of the blocks' products for so many rows."""
        return self.many if self.many and rows >= ROWS else self.body

    def said(self, rows: Sequence[Row], shapes: LinearShapes, batches: Sequence[int]) -> list[str]:
        """Describe the time of all products at each batch, and the head's share; empty if there is only `body`."""
        if len(self.variants) < 2 and self.head is None:
            return []
        timed = {
            ((row.op.K, row.op.N), row.op.M, row.settings.get("variant")): row
            for row in rows
            if row.name == "latency.op" and row.op is not None and row.op.layer != ALL and row.value is not None
        }
        lines = []
        for batch in batches:
            ours = theirs = head = 0.0
            for linear in shapes.distinct():
                last = self.head == (linear.K, linear.N)
                row = timed.get(((linear.K, linear.N), batch, self.head_variant if last else self.at(batch)))
                if row is None or row.baseline is None:
                    break
                ours += linear.count * (row.value or 0.0)
                theirs += linear.count * row.baseline.value
                head += (row.value or 0.0) if last else 0.0
            else:
                text = f"batch {batch}, as this bundle multiplies ({self.at(batch)}): {words.moment(ours)} of products"
                text += f" against {words.moment(theirs)}, {words.times(theirs / ours)} the speed"
                if self.head is not None:
                    what = f"{self.head[0]}x{self.head[1]}, {self.head_variant}"
                    text += f"; the head ({what}) takes {words.percent(head / ours, 0)}"
                lines.append(text)
        return lines


@dataclass(frozen=True)
class TaxPlan:
    """Products to time, all of them known to fit.

    Attributes:
        bundle: bundle that the question names, if it names one.
        variants: variants without the baseline.
        batches: rising values of M.
        threads: thread counts, one run each; 0 is a GPU.
        ways: variants of the bundle's products, if the question names a bundle.
    """

    asked: Question
    shapes: LinearShapes
    on: Processor | Graphics
    bundle: Bundle | None
    variants: Sequence[str]
    batches: Sequence[int]
    threads: Sequence[int]
    ways: BundleWays | None = None

    @property
    def subject(self) -> str:
        """Variant of a bundle's own format; "" without a bundle."""
        return self.ways.body if self.ways is not None else ""

    @property
    def records(self) -> bool:
        """True if choices of kernels go into the bundle: on a GPU."""
        return self.bundle is not None and 0 in self.threads


@dataclass(frozen=True)
class TaxAnswer:
    """Measured tax.

    Attributes:
        rows: rows of all thread counts.
        verdicts: threads -> verdict on each variant; 0 is a GPU.
        advice: threads -> advice.
        notes: notes for the reader.
        traffic: batch -> share of the steps, as asked.
    """

    plan: TaxPlan
    rows: Sequence[Row]
    verdicts: Mapping[int, Sequence[Verdict]]
    advice: Mapping[int, Verdict]
    notes: Sequence[str] = ()
    traffic: Mapping[int, float] | None = None

    @property
    def inconclusive(self) -> bool:
        """True if noise hides the advice, for every number of threads."""
        return bool(self.advice) and all(advice.answer == "inconclusive" for advice in self.advice.values())

    def choices(self, variant: str) -> Recorded | None:
        """Choose a packing, and a kernel for each batch, of a variant that a GPU's kernels ran; None where none did."""
        timed = [
            row
            for row in self.rows
            if row.name == "latency.op"
            and str(row.settings.get("variant")).removesuffix(OTHER_PACKING) == variant
            and row.value is not None
        ]
        timings = [_timing(row) for row in timed if row.settings.get("kernel") in LAYERS]
        device = timed[0].device if timed else None
        if not timings or device is None:
            return None
        versions = {name: version for name, version in timed[0].versions.items() if name == "driver"}
        weights = self.traffic or of_products(timing.batch for timing in timings)
        table = fastest(timings, traffic=weights)
        return Recorded(device.model_dump(mode="json"), versions | dispatch.versions(), variant, table, weights)

    def reported(self) -> Taxed:
        """Return it for the page and the screen."""
        plan = self.plan
        about = (self.rows, self.verdicts, self.advice, plan.asked.traffic, self.notes)
        return Taxed(plan.shapes, plan.on.target, *about, baseline=plan.on.baseline, version=__version__)

    def as_dict(self) -> dict[str, Any]:
        """Return the result of the command."""
        plan = self.plan
        judged = [(n, verdict) for n, verdicts in self.verdicts.items() for verdict in verdicts]
        return {
            "model": plan.shapes.name or None,
            "linears": [linear.model_dump() for linear in plan.shapes.linears],
            "source": plan.shapes.source,
            "target": plan.on.target.name,
            "on": next((row.on for row in self.rows), None),
            "baseline": plan.on.baseline,
            "traffic": {str(batch): share for batch, share in (plan.asked.traffic or {}).items()} or None,
            "advice": [{"threads": n or None, **advice.model_dump(mode="json")} for n, advice in self.advice.items()],
            "verdicts": [{"threads": n or None, **verdict.model_dump(mode="json")} for n, verdict in judged],
            "measurements": [row.as_dict() for row in self.rows],
        }


def prepare(asked: Question) -> TaxPlan:
    """Check the whole request. Raises InputError, one line each."""
    device = asked.device
    if not device:
        device = "cuda" if asked.target and Target.load(asked.target).kind == "gpu" else "cpu"
    if device not in DEVICES:
        raise InputError("unknown-device", where="--device", value=device, remedy=did_you_mean(device, DEVICES))
    on = Graphics.of(asked.target) if device == "cuda" else Processor.of(asked.target, asked.cores)
    demand_runtime(asked.runtime, on.runtime, "GPU" if device == "cuda" else "CPU")
    bundle, multiplies = None, None
    if asked.model is not None and not asked.shapes and content.is_path(asked.model):
        path = Path(asked.model).expanduser()
        bundle = Bundle.load(path) if (path / MANIFEST).is_file() else None
    if bundle is None:
        linears = _shapes(asked)
    else:
        linears, multiplies = _of_bundle(bundle, on)
    batches = sorted({*(asked.batches or ([] if asked.traffic else on.target.batches)), *(asked.traffic or {})})
    if not batches or batches[0] < 1:
        raise InputError("usage", where="--batch", value=batches, rule="batches are numbers from 1 up")
    names = list(asked.formats) or list(on.formats)
    if multiplies is not None:
        own = multiplies.body
        ours = [name for name in multiplies.variants if name == own or _fits(name, linears, on)]
        # the other packing of the same weights, which `choices` compares
        other = f"{own}{OTHER_PACKING}"
        second = [other] if isinstance(on, Graphics) and other in on.names() and machine.has("humming") else []
        names = [*ours, *second, *(asked.formats or [own])]
    variants = _variants(names, linears, on)
    return TaxPlan(asked, linears, on, bundle, variants, batches, on.threads(asked.threads), multiplies)


def batch_range(text: str) -> list[int]:
    """Read `--batch`: `1,8,64` as numbers; `1:4096` doubles from 1 to 4,096. Raises InputError."""
    batches: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        ends = part.split(":")
        if not (1 <= len(ends) <= 2 and all(end.isdecimal() and int(end) > 0 for end in ends)):
            rule = "numbers from 1 up, with commas, or a range that doubles: 1,8,64 or 1:4096"
            raise InputError("usage", where="--batch", value=text, rule=rule)
        first, last = int(ends[0]), int(ends[-1])
        if last < first:
            raise InputError("usage", where="--batch", value=text, rule="a range rises")
        while first < last:
            batches.append(first)
            first *= 2
        batches.append(last)
    return sorted(set(batches))


def _shapes(asked: Question) -> LinearShapes:
    """Return the linears of a model that is no bundle, or those that were typed."""
    if (asked.model is None) == (not asked.shapes):
        value = "a model and --shape" if asked.model else "neither a model nor --shape"
        rule = "a model or --shape names the linears to time"
        remedy = f"quantkit tax --shape 4096x14336, or one of {', '.join(shapes.names())}"
        raise InputError("usage", where="quantkit tax", value=value, rule=rule, remedy=remedy)
    if asked.model is None:
        return shapes.typed(asked.shapes)
    if content.is_path(asked.model):
        return _of_folder(Path(asked.model).expanduser())
    if asked.model in configs.shipped_names():
        return shapes.shipped(asked.model)
    if asked.model.startswith("hf:"):
        remedy = "name its config.json, a folder with its weights, or --shape KxN"
        raise InputError("model-remote", where=asked.model, value="not fetched for its shapes alone", remedy=remedy)
    raise unknown_name("model", asked.model, {*shapes.names(), *ALIASES})


def _of_bundle(bundle: Bundle, on: Processor | Graphics) -> tuple[LinearShapes, BundleWays]:
    """Return the quantized linears of a bundle, and the variants that they are."""
    manifest = bundle.manifest
    if not manifest.layers:
        where, value = str(bundle.path), "nothing in it is quantized"
        raise InputError("no-linears", where=where, value=value, remedy="name its model")
    layers = manifest.layers
    if isinstance(on, Graphics) and (bundle.model_folder / "config.json").is_file():
        from quantkit.runtimes.torch.packed import joined_layers

        layers = joined_layers(bundle.model_folder, layers)
    linears = shapes.from_tensors({f"{layer.name}.weight": layer.shape for layer in layers}, manifest.model.name)
    variants = [on.own(layer.scheme, layer.activations) for layer in manifest.layers]
    outside = zip(manifest.layers, variants, strict=True)
    head = next(((layer, variant) for layer, variant in outside if not _BLOCK.search(layer.name)), None)
    options = [options or {} for step in manifest.recipe.get("export") or [] for options in step.values()]
    second = any(option.get("prefill") == "int8" for option in options)
    second = second and not any(taken.code == "prefill-same" for taken in manifest.decisions)
    return linears, BundleWays(
        max(variants, key=variants.count),
        None if head is None else (head[0].shape[1], head[0].shape[0]),
        "" if head is None else head[1],
        MANY if second else "",
    )


def _of_folder(path: Path) -> LinearShapes:
    """Read shapes from stored weights where there are some, else from the config."""
    from quantkit.model.source.weights import Weights

    config_file = path if path.is_file() else path / "config.json"
    if not config_file.is_file():
        remedy = "name a bundle, a model's folder or its config.json, or --shape KxN"
        raise InputError("file-missing", where=str(path), value="no bundle and no config.json there", remedy=remedy)
    try:
        config = json.loads(limits.read(config_file))
    except (OSError, ValueError) as error:
        raise InputError("config-invalid", where=str(config_file), value=str(error)) from None
    if not isinstance(config, dict):
        raise InputError("config-invalid", where=str(config_file), value="not an object")
    name = (path.parent if path.is_file() else path).resolve().name
    if path.is_dir() and any(path.glob("*.safetensors")):
        stored = {tensor: entry.shape for tensor, entry in Weights.open(path).entries.items()}
        return shapes.from_tensors(stored, name, tied_head=bool(config.get("tie_word_embeddings")))
    return shapes.from_config(config, name)


def _variants(names: Iterable[str], linears: LinearShapes, on: Processor | Graphics) -> list[str]:
    """Return the variants for names, patterns and formats, each once, every one of them fit for every shape."""
    known = on.names()
    chosen: dict[str, None] = {}
    for name in names:
        if name == "all" or any(letter in name for letter in "*?["):
            matching = known if name == "all" else fnmatch.filter(known, name)
            fitting = [variant for variant in matching if _fits(variant, linears, on)]
            if not fitting:
                raise InputError("unknown-variant", where="--format", value=name, remedy=did_you_mean(name, known))
            chosen |= dict.fromkeys(fitting)
        else:
            chosen[name if name in known or name == on.baseline else on.usual(name, linears)] = None
    chosen.pop(on.baseline, None)
    if not chosen:
        value = f"{on.baseline} alone"
        raise InputError("usage", where="--format", value=value, rule="it is the baseline", remedy="name another")
    for name in chosen:
        on.check(name, linears)
    return list(chosen)


def _fits(name: str, linears: LinearShapes, on: Processor | Graphics) -> bool:
    try:
        on.check(name, linears)
    except InputError:
        return False
    return True


def measure_tax(plan: TaxPlan, progress: Report | None = None, sweep: Sweep | None = None) -> TaxAnswer:
    """Time the plan's products and judge the times; an emulator's times are not judged.

    Args:
        sweep: what times; None: this machine.

    Raises InputError: what the timed process met; MissingDependency: onnxruntime, onnx, scipy or torch; on a GPU
    triton.
    """
    progress, count = progress or (lambda share, words: None), len(plan.threads)
    rows: list[Row] = []
    judged: dict[int, Sequence[Verdict]] = {}
    advice: dict[int, Verdict] = {}
    linears = [linear.model_dump() for linear in plan.shapes.distinct()]
    for i, threads in enumerate(plan.threads):

        def report(share: float, words: str, i: int = i, threads: int = threads) -> None:
            of = f", {threads} threads" if count > 1 else ""
            progress((i + share) / count, f"{words}{of}")

        asked = (plan.variants, plan.batches, threads, plan.asked.seconds / count, plan.asked.seed)
        job = SweepJob(linears, plan.shapes.name, plan.on.baseline, *asked, bisections=0 if threads else _BISECTIONS)
        swept = (sweep or ops_run.run)(job, report)
        rows += swept
        if not any(EMULATED in row.flags for row in swept):
            judged[threads], advice[threads] = judge(swept, plan)
    first = [row for row in rows if row.settings.get("threads") in (None, plan.threads[0], 0)]
    ways = plan.ways.said(first, plan.shapes, plan.batches) if plan.ways is not None and advice else []
    return TaxAnswer(plan, rows, judged, advice, [*ways, *_notes(rows)], plan.asked.traffic)


def _timing(row: Row) -> KernelTiming:
    """Read one row as the dispatcher takes it."""
    op, place = row.op, "config."
    assert op is not None
    assert op.N and op.K and op.M
    tiles = {name.removeprefix(place): int(size or 0) for name, size in row.settings.items() if name.startswith(place)}
    kernel = str(row.settings["kernel"])
    return KernelTiming(kernel, (op.N, op.K), op.M, row.value or 0.0, row.resident_bytes or 0, tiles or None)


def record(answer: TaxAnswer) -> None:
    """Put kernels chosen on a GPU into the requested bundle, if there is one; remember them all."""
    plan = answer.plan
    # what a device says that it is does not teach this machine's forecasts
    efficiency.keep([row.as_dict() for row in answer.rows if row.on is None])
    if plan.records and plan.bundle is not None and (choices := answer.choices(plan.subject)):
        plan.bundle.put(FILE, choices.as_bytes())


def judge(rows: Sequence[Row], plan: TaxPlan) -> tuple[list[Verdict], Verdict]:
    """Return (the verdict on each variant, what to do), from the rows of one thread count."""
    layer, traffic = ALL if plan.shapes.name else None, plan.asked.traffic
    timed = [row for row in rows if row.name == "latency.op" and row.op is not None and row.op.layer == layer]
    measured = [
        MeasuredFormat(name, [row for row in timed if row.settings.get("variant") == name]) for name in plan.variants
    ]
    # a bundle's other packing is the same format; `TaxAnswer.choices` takes the faster one
    asked = [one for one in measured if not plan.subject or one.format != f"{plan.subject}{OTHER_PACKING}"]
    advice = advise(asked, plan.batches, traffic=traffic, subject=plan.subject)
    return verdicts(measured, plan.batches, traffic), advice


def _notes(rows: Sequence[Row]) -> list[str]:
    """Make notes from the flags of the rows."""
    notes = []
    wrong = sorted({str(row.settings.get("variant")) for row in rows if "wrong-result" in row.flags})
    if wrong:
        notes.append(f"not timed, because the runtime gave wrong numbers: {', '.join(wrong)}")
    if any(EMULATED in row.flags for row in rows):
        notes.append("an emulator: what it computes counts, how long it takes says nothing of any machine: no verdict")
    if slowed := [row for row in rows if "throttled" in row.flags]:
        which = "GPU" if slowed[0].device is not None and slowed[0].device.kind == "gpu" else "processor"
        less = ", or lower its power limit," if which == "GPU" else ""
        notes.append(f"the {which}'s clocks fell while it was timed: let it cool{less} and time it again")
    return notes
