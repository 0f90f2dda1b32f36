"""Prepare a bundle and its float model for a measurement on a device: files, data to score, rows from the answers.

The device's answers are reassembled here, and refused if they differ from the request.

For a transformer in torch or in an engine, the device's own torch runs the float model block by block, without an
export. Only the files that the runtime reads are sent; an engine must be built for the device's GPU and match the
manifest's hashes. Nothing else is executed. A checkpoint is scored on the device's processor, as on this machine. Its
steps are timed on quantkit's own kernels if the device has a GPU that its torch and Triton can use, with the choices
recorded by `quantkit tax`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import limits
from quantkit.bundle import Bundle, Decision, LayerEntry
from quantkit.bundle.disk import walk
from quantkit.devices.answers import Cells, SampleOutputs, ScoredStretch, SessionSettings, invalid
from quantkit.devices.probed import Probed
from quantkit.errors import InputError
from quantkit.kernels.dispatch import FILE
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.size import saved_bytes
from quantkit.measurement.timing.schedule import Shape, TimingPlan
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.structure import built
from quantkit.pipeline.graphs.bundles import MODEL
from quantkit.pipeline.measure import MeasuredAgainst, fitting
from quantkit.pipeline.verdict import RUNTIME, export_of, format_of
from quantkit.planning.compiling import CompileSpec, peaks
from quantkit.planning.memory import Footprint, cache_of, taken_by
from quantkit.recipe import ExportStep, Recipe
from quantkit.runtimes import load_runtime, of_graphs
from quantkit.runtimes.generate import demand_decoder
from quantkit.runtimes.tensorrt.file import choose, descriptions, verified
from quantkit.runtimes.tensorrt.library import InstalledLibrary

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.measurement.accuracy.purpose import TextResults

# bytes of an element in ONNX Runtime and OpenVINO on a CPU; bytes of a float weight on a GPU
_WIDTH, _GPU_WIDTH = 4, 2
_Files = dict[str, Path]


class _Sides:
    """A bundle and its float model, of any kind.

    Attributes:
        subject: name of the float model in rows.
        runtime, floats: runtimes of the judged side and of the float model.
        files: files to load of each side: relative path -> local file.
        opened: file to open on each side, below its folder; empty for the folder itself.
        weights: bytes of all constants of graphs.
        untimed: reason for timing nothing, if the user has to know it.
        on_gpu: True if a GPU runs the timed steps.
        streams: True if torch scores both sides block by block.
        built: required hashes of an engine.
        saved: bytes that an engine's weights save against 16 bits.
        layers: storage of each layer of a checkpoint on quantkit's kernels.
        pooled: pooling of vectors there.
    """

    of: Any
    form = "float32"
    timed, untimed, on_gpu, scored_on_gpu, streams = True, "", False, False, False
    saved = 0.0
    layers: Sequence[LayerEntry] = ()

    def __init__(self, bundle: Bundle, against: MeasuredAgainst, runtime: str, floats: str) -> None:
        self.bundle, self.against, self.subject = bundle, against, against.subject
        self.runtime, self.floats, self.own_form = runtime, floats, format_of(bundle.manifest.layers)
        self.files: tuple[_Files, _Files] = ({}, {})
        self.opened, self.weights = ("", ""), (0.0, 0.0)
        self.pooled: dict[str, Any] = {"pooling": ["mean"], "skip": 0}
        self.built: dict[str, str] = {}

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """Return the files loaded there at once, and further bytes needed while they run.

        Args:
            plan: shapes to time; None for no timing.
        """
        # both sides have one architecture, and both are loaded at once
        beside = 2 * running(self.bundle.path, plan.shapes(), self.runtime) if plan else 0.0
        return [path for files in self.files for path in files.values()], beside

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """Return samples to time a graph on, multiply-accumulates and outputs of one sample; None for a transformer."""
        return None


class GraphSides(_Sides):
    """A network, or an encoder from a graph, compared with its float graph, an ONNX file in any runtime.

    Raises InputError `runtime-unsupported`.
    """

    of = "network"

    def __init__(self, bundle: Bundle, against: MeasuredAgainst, runtime: str) -> None:
        assert against.graph is not None and against.samples is not None
        super().__init__(bundle, against, runtime, RUNTIME)
        own = load_runtime(runtime)
        if not own.graph:
            rule = f"graphs run in {' and '.join(of_graphs())}"
            raise InputError("runtime-unsupported", "--runtime", runtime, rule)
        self.graph, self.inputs = against.graph, against.samples
        ours, theirs = own.folder(bundle) / own.graph, self.graph.path
        beside = sorted(theirs.parent.glob(f"{theirs.name}*"))
        self.files = (
            {path.name: path for path in sorted(ours.parent.glob(f"{ours.stem}.*"))},
            {MODEL if path == theirs else path.name: path for path in beside},
        )
        self.opened = f"/{ours.name}", f"/{MODEL}"
        self.weights = float(sum(path.stat().st_size for path in self.files[0].values())), float(self.graph.bytes)

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """Return the shapes of the plan supported by both sides."""
        sizes = [self.inputs.batch] if self.inputs.batch else plan.batches
        return replace(plan, batches=(), contexts=(), prefills=(1,), prefill_batches=tuple(sizes))

    def data(self) -> dict[str, Any]:
        """Return the arrays to score, for an .npz."""
        feeds = list(self.inputs.feeds(len(self.inputs)))
        return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}

    def rows(self, answers: Cells) -> list[Row]:
        """Return rows of accuracy. Raises InputError `answer-invalid`."""
        from quantkit.pipeline.graphs.answers import agreement, kinds_of
        from quantkit.pipeline.graphs.answers import answers as expected

        theirs, known = outputs_of(answers, len(self.inputs)), expected(self.graph.model, self.inputs)
        if {name: array.shape for name, array in known.items()} != {n: array.shape for n, array in theirs.items()}:
            raise invalid(answers.on, "outputs of other names or shapes")
        how = {"subject": self.bundle.manifest.content_sha256, "baseline": self.subject, "runtime": self.runtime}
        rows, about = agreement(known, theirs, self.inputs, kinds_of(self.graph.model), **how), answers.about
        there = {"device": Device.model_validate(about.device(answers.on)), "versions": about.versions}
        return [row.model_copy(update=there) for row in rows]

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """Return samples: see `_Sides`."""
        costs = self.against.costs()
        return dict(self.inputs.first(max(sizes))), float(sum(costs.macs.values())), float(costs.outputs)


class _TransformerSides(_Sides):
    """A transformer in any runtime.

    Args:
        calibration, decisions: see `measure_bundle`.
    """

    # a graph may have two ways to multiply: see `measurement.accuracy.score`
    ways = frozenset({"", "prompts", "steps"})

    def __init__(
        self,
        bundle: Bundle,
        against: MeasuredAgainst,
        runtime: str,
        calibration: str | None,
        decisions: list[Decision],
        floats: str,
    ) -> None:
        from quantkit.pipeline.blocks import tokens

        super().__init__(bundle, against, runtime, floats)
        self.of, stream = bundle.manifest.model.kind, against.stream
        self.tokens: TokenSet | None = None
        self.result: TextResults | None = None
        if stream is None:
            return
        seen = bundle.manifest.calibration
        self.tokens = tokens.again(Recipe.done(bundle.manifest.recipe), stream.source, calibration, seen, decisions)
        if self.of == "encoder" and self.tokens is not None:
            from quantkit.measurement.accuracy.purpose import TextResults

            self.result = TextResults(stream, self.tokens, vectors=True)
            self.pooled = {"pooling": list(self.result.purpose.pooling), "skip": self.result.skip}
            decisions += self.result.decisions()

    def data(self) -> dict[str, Any]:
        """Return the arrays to score, for an .npz; empty if there is nothing to compare with."""
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

    def rows(self, answers: Cells) -> list[Row]:
        """Return rows of accuracy. Raises InputError `answer-invalid`."""
        from quantkit.measurement.accuracy import score
        from quantkit.measurement.accuracy.labelled import About as What
        from quantkit.measurement.accuracy.positions import data_of
        from quantkit.measurement.accuracy.purpose import rows_of

        assert self.tokens is not None and self.against.stream is not None
        about, session = answers.about, answers.one(SessionSettings, "settings")
        what = What(
            subject=self.bundle.manifest.content_sha256,
            baseline=self.subject,
            runtime=self.runtime,
            data=data_of(self.tokens),
            device=Device.model_validate(about.device(answers.on, gpu=self.scored_on_gpu)),
            versions={**about.versions, **session.versions},
            settings=session.settings,
        )
        if self.result is not None:
            vectors = outputs_of(answers, len(self.result.ids))["pooled"]
            try:
                after = self.result.behind(vectors.astype(np.float32))
                return rows_of(self.against.stream, list(after), self.tokens, self.result, what)
            except (ValueError, RuntimeError):
                raise invalid(answers.on, f"vectors of shape {vectors.shape}") from None
        rows, ways = list[Row](), items_of(answers, self.tokens)
        if not set(ways) <= self.ways:
            raise invalid(answers.on, f"ways to multiply: {', '.join(ways)}")
        for way, items in ways.items():
            rows += items.rows(replace(what, settings={**what.settings, **({"way": way} if way else {})}))
        return score.flagged(rows, self.bundle.manifest.model.source.was)


class ModelSides(_TransformerSides):
    """A transformer in a runtime without torch, beside the same exporter's float model."""

    def __init__(
        self, bundle: Bundle, against: MeasuredAgainst, runtime: str, calibration: str | None, decisions: list[Decision]
    ) -> None:
        own = load_runtime(runtime)
        super().__init__(bundle, against, runtime, calibration, decisions, str(own.floats))
        theirs, self.form = against.floats(bundle, runtime)
        self._folders = own.folder(bundle), theirs
        ours, floats = ({path.relative_to(at).as_posix(): path for path in walk(at)} for at in self._folders)
        self.files = ours, floats

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """Return the shapes of the plan supported by both sides."""
        sides = zip((self.runtime, self.floats), self._folders, strict=True)
        context = min(load_runtime(name).context(folder) for name, folder in sides)
        return fitting(plan, context, self.bundle.manifest.model.kind)


class StreamedSides(_TransformerSides):
    """A transformer in torch, or in an engine: see the module.

    Args:
        about: facts of the device, which an engine must be built for.
        name: name of the device.

    Raises InputError: `bundle-without-checkpoint`, `-engine`; `gpu-absent`, `runtime-not-here`, `engine-foreign`.
    """

    form, streams = "bfloat16", True
    ways = frozenset({""})

    def __init__(
        self,
        bundle: Bundle,
        against: MeasuredAgainst,
        runtime: str,
        calibration: str | None,
        decisions: list[Decision],
        about: Probed,
        name: str,
    ) -> None:
        runner, layers = load_runtime(runtime), bundle.manifest.layers
        folder, decodes = runner.folder(bundle), bundle.manifest.model.kind == "decoder"
        ours = _engine(bundle, runtime, about, name) if runner.engines else None
        super().__init__(bundle, against, runtime, calibration, decisions, "torch")
        assert against.stream is not None, "there is nothing to score against without torch"
        self._about, self._name, self.scored_on_gpu = about, name, runner.engines
        self._source = against.stream.source.in_files()
        if ours is not None:
            hashes = verified(bundle)
            self.built = {place: hashes[path] for place, path in ours.items()}
            self.saved, self.timed = saved_bytes(layers), decodes
        else:
            ours = {path.relative_to(bundle.path).as_posix(): path for path in walk(folder)}
            # without a GPU, nothing is timed in torch, as on this machine
            why_not = about.why_no_kernels()
            self.untimed = why_not if decodes and about.gpus else ""
            self.timed = decodes and not why_not
            if self.timed:
                self.layers, recorded = layers, bundle.path / FILE
                ours |= {FILE: recorded} if recorded.is_file() else {}
        self.on_gpu = runner.engines or self.timed
        # an encoder's baseline stays here
        theirs = self._source.files() if decodes else []
        self.files = ours, {path.relative_to(self._source.path).as_posix(): path for path in theirs}

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """Return files and bytes: see `_Sides`. Raises InputError `out-of-memory` for the GPU; `baseline-needed`."""
        assert self.tokens is not None
        recipe, (sequences, length) = Recipe.done(self.bundle.manifest.recipe), self.tokens.ids.shape
        need = streaming(self._source.path, recipe, sequences, length)
        if not (self.scored_on_gpu or (self.on_gpu and plan is not None)):
            return [], need
        held, floats = float(sum(path.stat().st_size for path in self.files[0].values())), 0.0
        if plan is not None:
            entries = self.against.floats_in_torch().source.weights.entries
            floats = float(_GPU_WIDTH * sum(prod(entry.shape) for entry in entries.values()))
        self._about.demand_gpu(held + floats, self._name, "engine" if self.scored_on_gpu else "bundle")
        # a GPU without its own memory uses the machine's; the float model passes through the machine's memory anyway
        return [], max(need, floats) if self._about.gpus[0].memory else need + held + floats

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """Return the shapes of the plan supported by both sides: within an engine's cache, or the model's positions."""
        context = None
        with contextlib.suppress(StopIteration, OSError, ValueError, LookupError, TypeError):
            described = (path for place, path in self.files[0].items() if place.endswith(".json"))
            profiles = json.loads(limits.read(next(described)))["profiles"] if self.scored_on_gpu else []
            context = max(int(profile["inputs"]["attention_mask"][2][1]) for profile in profiles)
        return fitting(plan, context or load_runtime(self.floats).context(self._source.path), self.of)


class ApartSides(_TransformerSides):
    """A decoder's checkpoint in a runtime with a Python of its own there, which opens the float model too.

    Args:
        about: facts of the device.

    Raises InputError: `not-a-decoder`, `bundle-without-checkpoint`.
    """

    timed, untimed = False, "its speed is measured under load: --load rate=1,2,4"
    ways = frozenset({""})

    def __init__(
        self,
        bundle: Bundle,
        against: MeasuredAgainst,
        runtime: str,
        calibration: str | None,
        decisions: list[Decision],
        about: Probed,
    ) -> None:
        demand_decoder(bundle)
        folder = load_runtime(runtime).folder(bundle)
        super().__init__(bundle, against, runtime, calibration, decisions, runtime)
        assert against.stream is not None, "there is nothing to score against without torch"
        self.scored_on_gpu = bool(about.gpus)
        self.files = files_below(folder), files_below(against.stream.source.in_files().path)

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """Return files and bytes: see `_Sides`; one model is open at a time."""
        return largest(self.files), float(APART)

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """Return the plan: nothing is timed."""
        return plan


# bytes that a runtime of its own takes besides the weights
APART = 3 << 30
# files of a checkpoint and its tokenizer
_KINDS = (".json", ".safetensors", ".model", ".txt", ".jinja")


def files_below(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint and its tokenizer: place below the folder -> path."""
    return {path.relative_to(folder).as_posix(): path for path in walk(folder) if path.suffix in _KINDS}


def largest(sides: Iterable[_Files]) -> list[Path]:
    """Return the files of the largest side."""
    return max((list(files.values()) for files in sides), key=lambda of: sum(path.stat().st_size for path in of))


def _engine(bundle: Bundle, runtime: str, about: Probed, name: str) -> dict[str, Path]:
    """Return the engine for a device's GPU and library, and its description: path in the bundle -> file."""
    about.demand_gpu(0.0, name)
    package = runtime.replace("_", "-")
    version = about.installed([package], name, f"{runtime} on the device runs the engine")[package]
    verified(bundle)
    library = InstalledLibrary(runtime, version)  # type: ignore[arg-type]
    try:
        path = choose(bundle.path, descriptions(bundle.path), library, about.gpus[0].model_dump())
    except InputError as problem:
        fields = problem.as_dict() | {"remedy": f"{problem.remedy} --on {name}"}
        raise InputError(**fields) from None
    return {file.relative_to(bundle.path).as_posix(): file for file in (path, path.with_suffix(".json"))}


def _architecture(model: Path) -> Architecture | None:
    with contextlib.suppress(InputError):
        return built.read(str(model.absolute()))
    return None


def running(model: Path, shapes: Iterable[Shape], runtime: str) -> float:
    """Return bytes of cache, activations and logits in the smallest of several shapes.

    Larger shapes that do not fit are skipped there, each with its reason, but one has to fit.

    Args:
        model: bundle, or folder with `config.json`; any other gives 0.
        runtime: its runtime.
    """
    architecture = _architecture(model)
    if architecture is None:
        return 0.0
    # without weights, which are counted by their files: a graph runs as stored
    footprint = Footprint(
        architecture,
        (),
        cache_of(None, load_runtime(runtime).cache if runtime else "float32"),
        _WIDTH,
        shared=False,
        runtime=taken_by(runtime, "cpu"),
        capacity=None,
        chunk=None,
        tables=0.0,
        others=0.0,
    )
    parts = (footprint.parts(shape.batch, shape.context + shape.tokens, prompt=shape.tokens) for shape in shapes)
    return min((sum(part.values()) for part in parts), default=0.0)


def streaming(model: Path, recipe: Recipe, sequences: int, length: int) -> float:
    """Return the bytes for scoring a checkpoint beside its float model, both block by block in torch, as in a compile.

    Args:
        model: folder of the float model; a config that a plan does not know gives 0.
        recipe: recipe of the finished bundle.
        sequences: scored sequences of `length` tokens.
    """
    architecture = _architecture(model)
    if architecture is None:
        return 0.0
    name = export_of("torch")
    as_compiled = recipe.model_copy(update={"export": [ExportStep(name=name, options={"layout": "pack-quantized"})]})
    return peaks(CompileSpec(architecture, as_compiled, {}, 0, 0, sequences * length, length))[f"score {name}"]


def items_of(answers: Cells, tokens: TokenSet) -> dict[str, Any]:
    """Join the numbers of all positions, in order: way -> items. Raises InputError `answer-invalid`."""
    from quantkit.measurement.accuracy.positions import DTYPES, Items

    ways: dict[str, list[ScoredStretch]] = {}
    for _, stretch in answers.all(ScoredStretch, "scored-"):
        ways.setdefault(stretch.way, []).append(stretch)
    count, length = tokens.ids.shape
    joined = {}
    for way, parts in ways.items():
        arrays: dict[str, list[Any]] = {name: [] for name in DTYPES}
        for part in parts:
            sizes = {len(values) for values in part.numbers.values()}
            if set(part.numbers) != {*DTYPES} - {"sequence"} or len(sizes) != 1:
                raise invalid(answers.on, f"scored: {', '.join(part.numbers)}"[:200])
            arrays["sequence"].append(np.full(next(iter(sizes)), part.sequence))
            for name, values in part.numbers.items():
                arrays[name].append(np.array(values))
        items = Items(**{name: np.concatenate(parts).astype(DTYPES[name]) for name, parts in arrays.items()})
        if not np.array_equal(items.sequence, np.repeat(np.arange(count), length - 1)):
            raise invalid(answers.on, f"{items.n} positions, not the requested {count * (length - 1)}")
        joined[way] = items
    if not joined:
        raise invalid(answers.on, "no position")
    return joined


def outputs_of(answers: Cells, count: int) -> dict[str, Any]:
    """Join the outputs: name -> [count, ...]. Raises InputError `answer-invalid`."""
    parts: dict[str, list[Any]] = {}
    done, numbers = 0, np.empty(0, np.float32)
    for cell, part in answers.all(SampleOutputs, "outputs-"):
        if part.first != done or part.at != len(numbers):
            raise invalid(answers.on, f"{cell}: not the samples that were asked for")
        numbers = np.concatenate([numbers, np.array(part.numbers, np.float32)])
        if cell != f"outputs-{done}":  # more of the same samples follow
            continue
        try:
            arrays = part.arrays(numbers)
        except ValueError:
            raise invalid(answers.on, f"{cell}: numbers that do not fit their shape") from None
        sizes = {array.shape[:1] for array in arrays.values()}
        if len(sizes) != 1 or sizes == {()}:
            raise invalid(answers.on, f"{cell}: not the samples that were asked for")
        done, numbers = done + sizes.pop()[0], np.empty(0, np.float32)
        for name, array in arrays.items():
            parts.setdefault(name, []).append(array)
    if done != count:
        raise invalid(answers.on, f"{done} samples, not {count}")
    try:
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}
    except ValueError:
        raise invalid(answers.on, "samples of several shapes") from None
