"""A bundle and its float model, as a measuring on a device takes them: files, what is scored, rows of what came back.

What a device said is put together again here, and refused where it is not what was asked for.

Of a transformer in torch, or in an engine, the device's own torch runs the float model beside it, block by block:
nothing is exported for that. Of a bundle goes there what its runtime reads; of an engine the one that is for the
device's GPU, with the hashes that the manifest has of it. Nothing else is executed. A checkpoint is scored on the
device's processor, as it is on this one. Its steps are timed on quantkit's own kernels, where the device has a GPU, and
a torch and Triton that use it; the choices that `quantkit tax` has recorded go along.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import limits
from quantkit.bundle import Bundle, Decision, LayerEntry
from quantkit.bundle.disk import walk
from quantkit.devices.answers import Cells, SampleOutputs, ScoredStretch, SessionSettings, invalid, read
from quantkit.devices.probed import Probed
from quantkit.errors import InputError
from quantkit.kernels.dispatch import FILE
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.size import saved_bytes
from quantkit.measurement.timing.schedule import Shape, TimingPlan
from quantkit.model.sizes import configs
from quantkit.model.source.open import Source
from quantkit.pipeline.graphs.bundles import MODEL
from quantkit.pipeline.measure import MeasuredAgainst, fitting
from quantkit.pipeline.verdict import RUNTIME, export_of, format_of
from quantkit.planning.compiling import CompileSpec, peaks
from quantkit.planning.memory import Footprint, cache_of, taken_by
from quantkit.recipe import ExportStep, Recipe
from quantkit.runtimes import load_runtime, of_graphs
from quantkit.runtimes.tensorrt.file import choose, descriptions, verified
from quantkit.runtimes.tensorrt.library import InstalledLibrary

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.measurement.accuracy.purpose import TextResults

# bytes of an element that ONNX Runtime and OpenVINO compute in on a processor
_WIDTH = 4
# bytes of a weight of the float model, as a GPU's times have it
_GPU_WIDTH = 2
# keys and values: llama.cpp keeps them in 16 bits, the others in what they compute in
_CACHES = {"llama_cpp": "float16"}


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
    # whether torch runs both block by block where they are scored
    streams = False
    # of an engine the hashes that it has to have, and bytes that its weights take less than in 16 bits
    built: Mapping[str, str] = {}
    saved = 0.0
    # of a checkpoint on quantkit's kernels, how each is stored
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

    def pooled(self) -> dict[str, Any]:
        """How vectors are pooled there; nothing where none are."""
        return {"pooling": ["mean"], "skip": 0}

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """The plan's shapes that both have."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """What is scored: arrays of an .npz."""
        raise NotImplementedError

    def rows(self, answers: Cells) -> list[Row]:
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


class GraphSides(DeviceSides):
    """A network, or an encoder that came as a graph, set against its float graph."""

    # the float graph is an ONNX file, whatever runs the bundle's
    of, floats = "network", RUNTIME

    def __init__(self, bundle: Bundle, theirs: MeasuredAgainst, runtime: str) -> None:
        assert theirs.graph is not None and theirs.samples is not None
        self.bundle, self.theirs, self.subject, self.runtime = bundle, theirs, theirs.subject, runtime
        self.graph, self.inputs = theirs.graph, theirs.samples
        own = load_runtime(runtime)
        if not own.graph:
            rule = f"a graph's runtimes are {' and '.join(of_graphs())}"
            raise InputError("runtime-unsupported", where="--runtime", value=runtime, rule=rule)
        self.path = own.folder(bundle) / own.graph

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

    def rows(self, answers: Cells) -> list[Row]:
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


def _there(row: Row, answers: Cells) -> Row:
    """A row that was made here of what a device said."""
    about = answers.about
    device = Device.model_validate(about.device(answers.on))
    return row.model_copy(update={"device": device, "versions": about.versions})


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
        if self.result is None:
            return super().pooled()
        return {"pooling": list(self.result.purpose.pooling), "skip": self.result.skip}

    def rows(self, answers: Cells) -> list[Row]:
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
            from quantkit.measurement.accuracy.purpose import rows_of

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
        ours, theirs = load_runtime(self.runtime), load_runtime(self.floats)
        context = min(ours.context(self.folder), theirs.context(self.theirs))
        return fitting(plan, context, self.bundle.manifest.model.kind)


class StreamedSides(TransformerSides):
    """A transformer in torch, or in an engine: see the module.

    Args:
        about: the device, which an engine has to be for.
        name: of it.

    Raises:
        InputError: `bundle-without-checkpoint`, `-engine`; `gpu-absent`, `runtime-not-here`, `engine-foreign`.
    """

    # that times are set against
    floats, form, streams = "torch", "bfloat16", True
    ways = frozenset({""})

    def __init__(
        self,
        bundle: Bundle,
        found: MeasuredAgainst,
        runtime: str,
        calibration: str | None,
        decisions: list[Decision],
        about: Probed,
        name: str,
    ) -> None:
        runner = load_runtime(runtime)
        folder = runner.folder(bundle)
        decodes = bundle.manifest.model.kind == "decoder"
        self._about, self._name, self.scored_on_gpu = about, name, runner.engines
        self._own = {path.relative_to(bundle.path).as_posix(): path for path in walk(folder)}
        if runner.engines:
            self._own = _engine(bundle, runtime, about, name)
            hashes = verified(bundle)
            self.built = {place: hashes[path] for place, path in self._own.items()}
            self.saved = saved_bytes(bundle.manifest.layers)
            self.timed = decodes
        else:
            # a device without a GPU times nothing in torch, as this machine does not
            self.untimed = about.why_no_kernels() if decodes and about.gpus else ""
            self.timed = decodes and not about.why_no_kernels()
        if self.timed and not runner.engines:
            self.layers = bundle.manifest.layers
            recorded = bundle.path / FILE
            self._own |= {FILE: recorded} if recorded.is_file() else {}
        self.on_gpu = runner.engines or self.timed
        super().__init__(bundle, found, runtime, calibration, decisions)

    @property
    def _source(self) -> Source:
        assert self.found.stream is not None, "there is nothing to score against without torch"
        return self.found.stream.source

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """See `DeviceSides`; what an encoder is held against stays here."""
        theirs = self._source.files() if self.of == "decoder" else []
        return self._own, {path.relative_to(self._source.path).as_posix(): path for path in theirs}

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """See `DeviceSides`. Raises InputError `out-of-memory`, the GPU's; `baseline-needed`."""
        assert self.tokens is not None
        recipe, (sequences, length) = Recipe.done(self.bundle.manifest.recipe), self.tokens.ids.shape
        need = streaming(self._source.path, recipe, sequences, length)
        if not (self.scored_on_gpu or (self.on_gpu and plan is not None)):
            return [], need
        held, floats = float(sum(path.stat().st_size for path in self._own.values())), 0.0
        if plan is not None:
            source = self.found.floats_in_torch().source
            floats = float(_GPU_WIDTH * sum(prod(entry.shape) for entry in source.weights.entries.values()))
        self._about.demand_gpu(held + floats, self._name, "engine" if self.scored_on_gpu else "bundle")
        # a GPU without memory of its own takes the machine's; into any, the float model goes by way of that
        return [], max(need, floats) if self._about.gpus[0].memory else need + held + floats

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """See `DeviceSides`."""
        return fitting(plan, self._capacity(), self.of)

    def _capacity(self) -> int:
        """Tokens that an engine's cache holds, as its description has it; else the model's positions."""
        with contextlib.suppress(StopIteration, OSError, ValueError, LookupError, TypeError):
            record = next(path for place, path in self._own.items() if place.endswith(".json") and self.scored_on_gpu)
            profiles = json.loads(limits.read(record))["profiles"]
            return max(int(each["inputs"]["attention_mask"][2][1]) for each in profiles)
        return load_runtime(self.floats).context(self._source.path)


def _engine(bundle: Bundle, runtime: str, about: Probed, name: str) -> dict[str, Path]:
    """The engine for a device's GPU and library, and what describes it: place in the bundle -> file."""
    about.demand_gpu(0.0, name)
    package = runtime.replace("_", "-")
    about.demand_own([package], name, f"an engine is run by {runtime} there")
    verified(bundle)
    library = InstalledLibrary(runtime, about.packages[package])  # type: ignore[arg-type]
    try:
        path = choose(bundle.path, descriptions(bundle.path), library, about.gpus[0].model_dump())
    except InputError as problem:
        fields = problem.as_dict() | {"remedy": f"{problem.remedy} --on {name}"}
        raise InputError(**fields) from None
    return {each.relative_to(bundle.path).as_posix(): each for each in (path, path.with_suffix(".json"))}


def running(model: Path, shapes: Iterable[Shape], runtime: str) -> float:
    """Bytes of cache, activations and logits in the smallest of some shapes: those that are too large are left out
    there, each with its reason, but one has to fit.

    Args:
        model: a bundle, or a folder with `config.json`; of any other, a graph say, nothing is known, and that is 0.
        runtime: that runs it.
    """
    try:
        architecture = configs.read(str(model.absolute()))
    except InputError:
        return 0.0
    # its weights are weighed by their files: a graph is run as it is stored
    footprint = Footprint(
        architecture,
        (),
        cache_of(None, _CACHES.get(runtime, "float32")),
        _WIDTH,
        shared=False,
        runtime=taken_by(runtime, "cpu"),
        capacity=None,
        chunk=None,
        tables=0.0,
        others=0.0,
    )
    found = (footprint.parts(each.batch, each.context + each.tokens, prompt=each.tokens) for each in shapes)
    return min((sum(parts.values()) for parts in found), default=0.0)


def streaming(model: Path, recipe: Recipe, sequences: int, length: int) -> float:
    """Bytes of scoring a checkpoint beside its float model, both block by block in torch, as a compile does.

    Args:
        model: the float model's folder; of a config that a plan does not know nothing is known, and that is 0.
        recipe: of the finished bundle.
        sequences: that are scored, of `length` tokens each.
    """
    try:
        architecture = configs.read(str(model.absolute()))
    except InputError:
        return 0.0
    name = export_of("torch")
    as_compiled = recipe.model_copy(update={"export": [ExportStep(name=name, options={"layout": "pack-quantized"})]})
    found = peaks(CompileSpec(architecture, as_compiled, {}, 0, 0, sequences * length, length))
    return found[f"score {name}"]


def items_of(answers: Cells, tokens: TokenSet) -> dict[str, Any]:
    """Way -> the numbers of all positions, in order. Raises InputError `answer-invalid`."""
    from quantkit.measurement.accuracy.positions import DTYPES, Items

    ways: dict[str, list[ScoredStretch]] = {}
    for cell, rows in answers.items():
        for row in rows if cell.startswith("scored-") else ():
            found = read(ScoredStretch, row, answers.on)
            ways.setdefault(found.way, []).append(found)
    count, length = tokens.ids.shape
    made = {}
    for way, parts in ways.items():
        arrays: dict[str, list[Any]] = {name: [] for name in DTYPES}
        for part in parts:
            sizes = {len(values) for values in part.found.values()}
            if set(part.found) != {*DTYPES} - {"sequence"} or len(sizes) != 1:
                raise invalid(answers.on, f"scored: {', '.join(part.found)}"[:200])
            arrays["sequence"].append(np.full(next(iter(sizes)), part.sequence))
            for name, values in part.found.items():
                arrays[name].append(np.array(values))
        items = Items(**{name: np.concatenate(parts).astype(DTYPES[name]) for name, parts in arrays.items()})
        if not np.array_equal(items.sequence, np.repeat(np.arange(count), length - 1)):
            raise invalid(answers.on, f"{items.n} positions, not the {count * (length - 1)} that were asked for")
        made[way] = items
    if not made:
        raise invalid(answers.on, "no position")
    return made


def outputs_of(answers: Cells, count: int) -> dict[str, Any]:
    """Name -> what came out, [count, ...]. Raises InputError `answer-invalid`."""
    parts: dict[str, list[Any]] = {}
    done, numbers = 0, np.empty(0, np.float32)
    for cell, rows in answers.items():
        for row in rows if cell.startswith("outputs-") else ():
            found = read(SampleOutputs, row, answers.on)
            if found.first != done or found.at != len(numbers):
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            numbers = np.concatenate([numbers, np.array(found.numbers, np.float32)])
            if cell != f"outputs-{done}":  # more of the same samples follows
                continue
            try:
                arrays = found.arrays(numbers)
            except ValueError:
                raise invalid(answers.on, f"{cell}: numbers that do not fit their shape") from None
            if len({array.shape[:1] for array in arrays.values()}) != 1 or not next(iter(arrays.values())).ndim:
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            done += len(next(iter(arrays.values())))
            numbers = np.empty(0, np.float32)
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
    if done != count:
        raise invalid(answers.on, f"{done} samples, not {count}")
    try:
        return {name: np.concatenate(found) for name, found in parts.items()}
    except ValueError:
        raise invalid(answers.on, "samples of several shapes") from None
