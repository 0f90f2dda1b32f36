"""A float ONNX graph + recipe + target -> bundle: the compile of what is no transformers model.

    open -> fuse -> ranges -> codes -> biases -> pairs -> onnx/ -> reload and check -> score -> gates -> page -> bundle

What a recipe's passes mean here: `gptq` and `rtn` choose codes (convolutions as products of patches), biases are always
corrected; the others know only the blocks of a transformer and are declined, each with a decision.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import quantkit
from quantkit.bundle import (
    Build,
    Bundle,
    CalibrationEntry,
    Decision,
    ModelEntry,
    SourceEntry,
    content_sha256,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, MissingDependency
from quantkit.measure.rows import Data, Device, Row, write_rows
from quantkit.measure.size import size_rows
from quantkit.passes import NOTE, decision
from quantkit.pipeline.gates import judge
from quantkit.pipeline.graph_prepared import Prepared, prepare
from quantkit.pipeline.graph_quantized import BATCH, MODEL, Quantized
from quantkit.pipeline.manifest import manifest_of, with_documents
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request
from quantkit.pipeline.strict import refuse
from quantkit.pipeline.worth import decide, runs_here
from quantkit.plan import machine

if TYPE_CHECKING:
    from quantkit.model.alias import Alias

FOLDER = "onnx"
# samples of a pass that is timed, and how long a compile looks at them
_TIMED, _SECONDS = (1, 32), 40.0


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
    if request.strict:
        refuse(prepared.decisions)
    build = Build.open(prepared.out, _fingerprint(prepared), resume=request.resume)
    if build.finished is not None:
        rows = [Row.model_validate(row) for row in build.finished.measurements]
        return Outcome(build.finished, rows, {"quantize_cpu": None, "total": 0.0}, list(prepared.graph.notes))
    with build, stopping_when_full(build.folder):
        quantized = Quantized(prepared, progress)
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
            baseline_bytes=prepared.graph.bytes,
            folder=FOLDER,
        )
        timed, untimed = _speed(prepared, build.bundle / FOLDER, subject, progress)
        rows += timed
        judged, unjudged = judge(request.recipe.gates, rows)
        decisions = [*prepared.decisions, *unjudged, *untimed]
        write_rows(build.bundle / MEASUREMENTS, rows)
        manifest = manifest_of(
            request,
            *_entries(prepared),
            build.bundle,
            decisions=decisions,
            layers=layers,
            checks=[*checks, *judged],
            subject=subject,
        )
        manifest = manifest.model_copy(update={"verdict": decide(rows, manifest.checks, layers, request.target)})
        manifest = with_documents(manifest, rows, list(prepared.graph.notes), build.bundle)
        bundle = build.finish(manifest)
    seconds = {"quantize_cpu": cpu, "total": time.perf_counter() - started}
    return Outcome(bundle, rows, seconds, list(prepared.graph.notes))


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


def _scored(prepared: Prepared, path: Path, subject: str, progress: Progress) -> list[Row]:
    """Accuracy of the file against the float graph on the scoring set."""
    from quantkit.graph.run import Runner, batches
    from quantkit.measure.labelled import About, classification, outputs

    data, scoring = prepared.scoring.images, prepared.scoring
    runners = Runner(prepared.graph.model), Runner(path)
    found: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    for number, feed in enumerate(batches(prepared.graph.inputs[0].name, data, 4 * BATCH)):
        for runner, kept in zip(runners, found, strict=True):
            for name, value in runner(feed).items():
                kept.setdefault(name, []).append(value)
        progress.at("score", min(1.0, (number + 1) * 4 * BATCH / len(data)))
    original, own = ({name: np.concatenate(values) for name, values in each.items()} for each in found)
    about = About(
        subject=subject,
        baseline=prepared.graph.sha256,
        runtime="onnxruntime",
        data=Data(set=scoring.name, split=scoring.split, sha256=scoring.sha256, items=len(data)),
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
    )
    wide = [name for name, value in original.items() if value.ndim == 2 and value.shape[1] > 1]
    # of several outputs none says that it tells classes apart, unless there are labels for just one
    if len(wide) == 1 and (len(original) == 1 or scoring.labels is not None):
        return classification(original[wide[0]], own[wide[0]], scoring.labels, about=about)
    return outputs(original, own, about=about)


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
        theirs=Side(str(graph.path), graph.sha256, "float32", float(graph.bytes)),
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


def _entries(prepared: Prepared) -> tuple[ModelEntry, CalibrationEntry]:
    graph, calib = prepared.graph, prepared.calib
    origin = SourceEntry(ref=prepared.ref, sha256=graph.sha256, dtype="float32", was=None)
    seen = {"set": calib.name, "split": calib.split, "ids_sha256": calib.sha256}
    return (
        ModelEntry(name=graph.name, kind="vision", source=origin),
        # images are not cut into tokens
        CalibrationEntry(**seen, samples=len(calib.images), tokens=0),
    )
