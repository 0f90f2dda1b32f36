"""A float ONNX graph + recipe + target -> bundle: the compile of what is no transformers model.

    open -> fuse -> ranges -> codes -> biases -> pairs -> onnx/ -> reload and check -> score -> gates -> page -> bundle

What a recipe's passes mean here: `gptq` and `rtn` choose codes (convolutions as products of patches), biases are always
corrected; the others know only the blocks of a transformer and are declined, each with a decision.
"""

from __future__ import annotations

import datetime
import fnmatch
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import quantkit
from quantkit.bundle import (
    Build,
    Bundle,
    CalibrationEntry,
    Check,
    Decision,
    LayerEntry,
    Manifest,
    ModelEntry,
    SourceEntry,
    content_sha256,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import GateError, InputError, MissingDependency
from quantkit.measure.rows import Data, Device, Row, write_rows
from quantkit.measure.size import size_rows
from quantkit.passes import NOTE, decision
from quantkit.pipeline import tokens
from quantkit.pipeline.gates import judge
from quantkit.pipeline.manifest import with_documents
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request, default_out
from quantkit.pipeline.worth import decide, runs_here
from quantkit.plan import machine
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, WeightScheme

if TYPE_CHECKING:
    from quantkit.calibrate.images import ImageSet
    from quantkit.graph.open import FloatGraph
    from quantkit.graph.placement import Placement
    from quantkit.graph.qdq import Codes, Range
    from quantkit.graph.sites import Site
    from quantkit.model.alias import Alias

FOLDER, MODEL, DATA = "onnx", "model.onnx", "model.onnx.data"
# samples of one run: calibration, scoring
_BATCH = 8
# batches that codes are solved on: each site runs all of them
_SOLVING = 8
# what integer kernels may differ by from the pairs as they are written: codes that lie between two go either way
_RELOAD_LIMIT = 0.05
_CODES = ("gptq", "rtn")
_INTEGER_SHARE = 0.95
# weights up to so many bytes stand in the file itself
_INLINE = 1 << 28
# samples of a pass that is timed, and how long a compile looks at them
_TIMED, _SECONDS = (1, 32), 40.0


@dataclass(frozen=True)
class Prepared:
    """Opened and found good; nothing has been written.

    Args:
        request: as asked.
        graph: float, fused.
        ref: `alias:fashion-mnist-cnn` or `path:model.onnx`.
        sites: that are quantized.
        calib: what calibrates.
        scoring: what scores.
        macs: site -> multiply-accumulates of one sample.
        outputs: numbers that come out for one sample.
        out: the bundle's place.
        decisions: so far.
    """

    request: Request
    graph: FloatGraph
    ref: str
    sites: Sequence[Site]
    calib: ImageSet
    scoring: ImageSet
    macs: Mapping[str, int]
    outputs: int
    out: Path
    decisions: list[Decision]


@dataclass(frozen=True)
class Outcome:
    """What the compile of a graph yields, as `pipeline.compile.Compiled` takes it."""

    bundle: Bundle
    rows: list[Row]
    seconds: Mapping[str, float | None]
    warnings: list[str]


def compile_graph(
    request: Request, path: Path, ref: str, name: str, progress: Progress, alias: Alias | None = None
) -> Outcome:
    """Compile a graph.

    Args:
        request: whose recipe and target hold.
        path: of the ONNX file.
        ref: what it is called in the manifest.
        name: what the bundle is named after.
        progress: told how far it is.
        alias: of a shipped model, which has a calibration set of its own, and says what becomes of images before it.

    Raises:
        InputError: anything that would make it fail later; GateError: a check failed, or `--strict`.
    """
    started, begun = time.perf_counter(), time.process_time()
    prepared = prepare(request, path, ref, name, alias)
    progress.plan({"ranges": 5.0, "codes": 60.0, "score": 10.0, "speed": _SECONDS})
    build = Build.open(prepared.out, _fingerprint(prepared), resume=request.resume)
    with build, stopping_when_full(build.folder):
        quantized = _Quantized(prepared, progress)
        (build.bundle / FOLDER).mkdir(parents=True, exist_ok=True)
        quantized.save(build.bundle / FOLDER / MODEL)
        cpu = time.process_time() - begun
        files = inventory(build.bundle)
        subject = content_sha256(files)
        checks = quantized.checks(build.bundle / FOLDER / MODEL)
        progress.at("score", 0.0, f"{len(prepared.scoring.images)} images of {prepared.scoring.name}")
        rows = _scored(prepared, build.bundle / FOLDER / MODEL, subject, progress)
        layers = quantized.layers()
        rows += size_rows(
            layers,
            files,
            subject=subject,
            baseline=prepared.graph.sha256,
            baseline_bytes=prepared.graph.path.stat().st_size,
            folder=FOLDER,
        )
        timed, untimed = _speed(prepared, build.bundle / FOLDER, subject, progress)
        rows += timed
        judged, unjudged = judge(request.recipe.gates, rows)
        decisions = [*prepared.decisions, *unjudged, *untimed]
        write_rows(build.bundle / MEASUREMENTS, rows)
        manifest = _manifest(prepared, build.bundle, decisions, layers, [*checks, *judged], subject)
        manifest = manifest.model_copy(update={"verdict": decide(rows, manifest.checks, layers, request.target)})
        manifest = with_documents(manifest, rows, list(prepared.graph.notes), build.bundle)
        bundle = build.finish(manifest)
    seconds = {"quantize_cpu": cpu, "total": time.perf_counter() - started}
    return Outcome(bundle, rows, seconds, list(prepared.graph.notes))


def prepare(request: Request, path: Path, ref: str, name: str, alias: Alias | None = None) -> Prepared:
    """Open and check everything. Raises InputError."""
    from quantkit.graph.fuse import fuse
    from quantkit.graph.open import open_graph
    from quantkit.graph.run import Runner
    from quantkit.graph.sites import sites

    recipe = request.recipe
    if "vision" not in recipe.models:
        raise InputError(
            "model-kind",
            where=ref,
            value="an ONNX graph",
            rule=f"recipe {recipe.name} is for {', '.join(recipe.models)}",
            remedy="choose another recipe: int8",
        )
    _schemes(recipe)
    graph = open_graph(path, name)
    if len(graph.inputs) != 1:
        listed = ", ".join(each.name for each in graph.inputs) or "none"
        raise InputError(
            "onnx-inputs", where=path.name, value=f"inputs: {listed}", rule="graphs of one input are compiled so far"
        )
    decisions: list[Decision] = []
    calib, scoring = (_images(request, graph, split, alias) for split in ("calib", "eval"))
    feed = {graph.inputs[0].name: calib.images[:2]}
    fused, _ = fuse(graph.model, [feed])
    missed = [each for each in fused if not each.done]
    decisions += [decision(each.fusion, NOTE, each.node, each.reason) for each in missed]
    found = sites(graph.model)
    chosen = [site for site in found if not _kept(site.name, recipe)]
    if not chosen:
        raise InputError(
            "no-linears",
            where=path.name,
            value=f"{len(found)} products with constant weights, all kept",
            rule="something is quantized",
            remedy="--set keep=[]",
        )
    for step in recipe.passes:
        if step.name not in _CODES:
            reason = "it knows the blocks of a transformer; this is a graph"
            decisions.append(decision(step.name, "declined", graph.name, reason))
    decisions += [decision("calibrate", NOTE, calib.name, note) for note in calib.notes]
    shown = Runner(graph.model, [site.output for site in found])(feed)
    macs = {site.name: site.macs(shown[site.output].shape) for site in found}
    out = request.out or default_out(graph.name, recipe.name, resume=request.resume)
    given = [str(value.name) for value in graph.model.graph.outputs]
    outputs = sum(shown[each].size // len(feed[graph.inputs[0].name]) for each in given)
    return Prepared(request, graph, ref, chosen, calib, scoring, macs, outputs, out, decisions)


def _schemes(recipe: Recipe) -> tuple[WeightScheme, ActivationScheme]:
    """What a graph can be quantized to. Raises InputError `scheme-unsupported`."""
    weights, activations = recipe.scheme.weights, recipe.scheme.activations
    able = weights is not None and weights.format in ("int8", "int7") and weights.symmetric
    able = able and weights is not None and weights.granularity in ("channel", "tensor")
    if not able or activations is None or activations.format != "int8" or activations.dynamic:
        names = [weights.format if weights else "float", activations.format if activations else "float"]
        raise InputError(
            "scheme-unsupported",
            where=f"recipe {recipe.name}",
            value=f"weights {names[0]}, activations {names[1]}",
            rule="a graph is quantized to int8 or int7 weights, symmetric, and int8 activations with fixed scales",
            remedy="--recipe int8",
        )
    assert weights is not None
    return weights, activations


def _kept(name: str, recipe: Recipe) -> bool:
    patterns = [*recipe.keep, *(each.match for each in recipe.overrides if each.weights is None)]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _images(request: Request, graph: FloatGraph, split: Literal["calib", "eval"], alias: Alias | None) -> ImageSet:
    """The recipe's set where it is of images, else the model's own. Raises InputError."""
    from quantkit.calibrate.images import load_images

    recipe, given = request.recipe, graph.inputs[0]
    samples = recipe.calibration.images if split == "calib" else None

    def load(name: str) -> ImageSet:
        asked: dict[str, Any] = {"shape": given.shape, "dtype": given.dtype, "where": given.name}
        how = alias.preprocess if alias is not None else None
        return load_images(name, split, samples=samples, seed=recipe.seed, preprocess=how, **asked)

    try:
        return load(recipe.calibration.set)
    except InputError as problem:
        if problem.code != "calibration-kind" or alias is None:
            raise
        return load(alias.calibration)


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    versions = machine.versions()
    return {
        "quantkit": quantkit.__version__,
        "source": prepared.graph.sha256,
        "recipe": prepared.request.recipe.as_dict(),
        "calibration": prepared.calib.sha256,
        "scoring": prepared.scoring.sha256,
        "isa": machine.isa(),
        "versions": {name: versions[name] for name in ("torch", "onnx", "onnx-ir", "onnxruntime") if name in versions},
    }


class _Quantized:
    """A graph while it is quantized."""

    def __init__(self, prepared: Prepared, progress: Progress) -> None:
        from quantkit.graph import placement, qdq, solve
        from quantkit.graph.run import batches

        self.prepared, self.progress = prepared, progress
        self.weights, self.activations = _schemes(prepared.request.recipe)
        model, sites = prepared.graph.model, prepared.sites
        self.input = prepared.graph.inputs[0].name
        feeds = list(batches(self.input, prepared.calib.images, _BATCH))
        self.sites = {site.name: site for site in sites}
        asked = prepared.request.target.build.get("onnxruntime", {}).get("weight_codes", "uint8")
        # sums of 7-bit weights never saturate, so the fastest kernel is exact
        kind: qdq.WeightType = "int8" if asked == "int8" or self.weights.format == "int7" else "uint8"
        self.placement: Placement = placement.place(model, sites, self.sites)
        self.ranges: dict[str, Range] = solve.ranges(
            model,
            self.placement,
            feeds,
            self.activations,
            report=lambda done, words: progress.at("ranges", done, words),
            total=len(feeds),
        )
        settings = next((step.settings for step in prepared.request.recipe.passes if step.name == "gptq"), None)

        def made(found: Mapping[str, Codes]) -> Any:
            return qdq.insert(model, self.placement, self.ranges, found, self.sites, weight_type=kind)

        self.codes = solve.solved(
            model,
            made,
            sites,
            feeds[:_SOLVING],
            self.weights,
            self.ranges,
            self.placement,
            **({} if settings is None else {name: getattr(settings, name) for name in ("damping", "shrink", "ridge")}),
            report=lambda done, words: progress.at("codes", done, words),
        )
        self.model = made(self.codes)

    def save(self, path: Path) -> None:
        """Write the graph, with its weights beside it."""
        import onnx_ir as ir

        self.model.producer_name, self.model.producer_version = "quantkit", quantkit.__version__
        for node in self.model.graph:
            node.metadata_props.clear()  # where in torch's source it came from: half of a small file
        apart = sum(value.const_value.nbytes for value in self.model.graph.initializers.values() if value.const_value)
        ir.save(self.model, path, external_data=DATA if apart > _INLINE else None)

    def checks(self, path: Path) -> list[Check]:
        """The file, reloaded and run by integer kernels, against its pairs as they are written. Raises GateError."""
        from quantkit.graph.run import Runner

        feed = {self.input: self.prepared.calib.images[:_BATCH]}
        written, loaded = Runner(self.model, optimised=False)(feed), Runner(path)(feed)
        apart = max(
            float(np.linalg.norm(loaded[name] - expected) / (np.linalg.norm(expected) or 1.0))
            for name, expected in written.items()
            if expected.dtype.kind == "f"
        )
        check = Check(name="reload.onnxruntime", value=apart, limit=_RELOAD_LIMIT, ok=apart <= _RELOAD_LIMIT)
        if not check.ok:
            raise GateError(
                "check-failed",
                where="onnxruntime",
                value=f"{check.name} is {apart:.3g}",
                rule=f"at most {_RELOAD_LIMIT}",
                remedy="the export is not what was decided on; nothing was delivered. Please report it",
            )
        return [check, self._kernels(path)]

    def _kernels(self, path: Path) -> Check:
        """Whether ONNX Runtime multiplies what was quantized in integers. Raises GateError where it does not."""
        from quantkit.graph import integer
        from quantkit.graph.qdq import stem_of
        from quantkit.graph.run import Runner

        macs = self.prepared.macs
        sites = [
            integer.Site(site.name, f"{stem_of(site)}.codes", float(macs[site.name]), site.output)
            for site in self.prepared.sites
        ]
        with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as place:
            found = integer.found(Runner.optimised(path, Path(place) / MODEL), sites)
        where = "; ".join(f"{name} runs as {kind}" for name, kind in list(found.floating.items())[:3])
        ok = found.share >= _INTEGER_SHARE and not found.floating
        check = Check(name="integer.macs", value=found.share, limit=_INTEGER_SHARE, ok=ok, where=where)
        if not ok:
            raise GateError(
                "check-failed",
                where=where or path.name,
                value=f"{found.share:.1%} of the multiply-accumulates run in integers",
                rule=f"what is quantized is multiplied in integers, at least {_INTEGER_SHARE:.0%} of all",
                remedy="keep these layers in floats: --set 'keep=[NAME]'",
            )
        return check

    def layers(self) -> list[LayerEntry]:
        """What the manifest says of each quantized product."""
        found = []
        for name, codes in self.codes.items():
            site = self.sites[name]
            matrix = site.matrix()
            stored = 8 * codes.codes.size + 32 * codes.scale.size
            error = np.linalg.norm(codes.values() - matrix) / (np.linalg.norm(matrix) or 1.0)
            own = self.ranges[self.placement.same.get(site.input, site.input)]
            found.append(
                LayerEntry(
                    name=name,
                    shape=list(matrix.shape),
                    scheme=self.weights.model_dump(mode="json", exclude_none=True),
                    bits_per_weight=stored / matrix.size,
                    error=float(error),
                    activations=self.activations.model_dump(mode="json", exclude_none=True),
                    input_scale=own.scale,
                )
            )
        return found


def _scored(prepared: Prepared, path: Path, subject: str, progress: Progress) -> list[Row]:
    """Accuracy of the file against the float graph on the scoring set."""
    from quantkit.graph.run import Runner, batches
    from quantkit.measure.labelled import About, classification, outputs

    data, scoring = prepared.scoring.images, prepared.scoring
    runners = Runner(prepared.graph.model), Runner(path)
    found: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    for number, feed in enumerate(batches(prepared.graph.inputs[0].name, data, 4 * _BATCH)):
        for runner, kept in zip(runners, found, strict=True):
            for name, value in runner(feed).items():
                kept.setdefault(name, []).append(value)
        progress.at("score", min(1.0, (number + 1) * 4 * _BATCH / len(data)))
    original, own = ({name: np.concatenate(values) for name, values in each.items()} for each in found)
    about = About(
        subject=subject,
        baseline=prepared.graph.sha256,
        runtime="onnxruntime",
        data=Data(set=scoring.name, split=scoring.split, sha256=scoring.sha256, items=len(data)),
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
    )
    logits = next((name for name, value in original.items() if value.ndim == 2 and value.shape[1] > 1), None)
    if logits is None:
        return outputs(original, own, about=about)
    return classification(original[logits], own[logits], scoring.labels, about=about)


def _speed(prepared: Prepared, folder: Path, subject: str, progress: Progress) -> tuple[list[Row], list[Decision]]:
    """Against the float graph as it came, where the target is this machine; what prevents it is a decision."""
    from quantkit.measure.speed_graph import Job, Side, run

    request, graph = prepared.request, prepared.graph
    if not request.speed:
        return [], []
    if not runs_here(request.target):
        return [], [decision("measure", NOTE, "speed", f"target {request.target.name} is another machine")]
    ours = sum(path.stat().st_size for path in folder.iterdir())
    job = Job(
        ours=Side(str(folder / MODEL), subject, "int8", float(ours)),
        theirs=Side(str(graph.path), graph.sha256, "float32", float(graph.path.stat().st_size)),
        input=graph.inputs[0].name,
        shape=prepared.calib.images.shape[1:],
        macs=float(sum(prepared.macs.values())),
        outputs=float(prepared.outputs),
        batches=_TIMED,
        threads=machine.cores(),
        seconds=_SECONDS,
    )
    try:
        return run(job, lambda share, words: progress.at("speed", share, words)), []
    except (InputError, MissingDependency) as problem:
        return [], [decision("measure", "speed-not-measured", "onnxruntime", problem.line())]


def _manifest(
    prepared: Prepared,
    folder: Path,
    decisions: list[Decision],
    layers: list[LayerEntry],
    checks: list[Check],
    subject: str,
) -> Manifest:
    import torch

    request, graph = prepared.request, prepared.graph
    calib = prepared.calib
    failed = any(not check.ok for check in checks)
    return Manifest(
        quantkit=quantkit.__version__,
        content_sha256=subject,
        state="gate_failed" if failed else "complete",
        model=ModelEntry(
            name=graph.name,
            kind="vision",
            source=SourceEntry(ref=prepared.ref, sha256=graph.sha256, dtype="float32", was=None),
        ),
        recipe=tokens.without_paths(request.recipe.as_dict()),
        target=request.target.as_dict(),
        calibration=CalibrationEntry(
            set=calib.name, split=calib.split, ids_sha256=calib.sha256, samples=len(calib.images), tokens=0
        ),
        seed=request.recipe.seed,
        threads=torch.get_num_threads(),
        isa=machine.isa(),
        device=dict(machine.device()),
        versions=machine.versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        files=inventory(folder),
        decisions=decisions,
        checks=checks,
        verdict=None,
    )
