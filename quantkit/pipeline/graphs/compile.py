"""A float ONNX graph + recipe + target -> bundle: the compile of what is no transformers model.

    open -> fuse -> ranges -> [product: codes, bias -> commit] -> pairs -> onnx/ -> reload and check -> score -> gates
         -> page -> bundle

Ranges and every product that is solved are committed, so a killed compile solves the others and ends with the same
`content_sha256` (`graph_steps.py`).

What a recipe's passes mean here: `gptq`, `rtn` and `hqq` choose codes (convolutions as products of patches), `round`
moves them, biases are always corrected, whether `bias_correct` stands there or not. The others are declined, each with
a decision and the reason that it states itself (`on_graphs`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quantkit
from quantkit import machine
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
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.rows import Row, write_rows
from quantkit.measurement.size import size_rows
from quantkit.passes import NOTE, decision
from quantkit.pipeline.estimate import demand_space
from quantkit.pipeline.finished import engine
from quantkit.pipeline.gates import judge, warnings
from quantkit.pipeline.graphs.engine import wanted
from quantkit.pipeline.graphs.measure import Timed, scored, speed
from quantkit.pipeline.graphs.mixed import NAME, mix
from quantkit.pipeline.graphs.network import Network
from quantkit.pipeline.graphs.plan import disk
from quantkit.pipeline.graphs.plan import seconds as seconds_of
from quantkit.pipeline.graphs.prepared import Prepared, prepare
from quantkit.pipeline.graphs.quantized import MODEL, Quantized
from quantkit.pipeline.graphs.steps import Steps
from quantkit.pipeline.manifest import manifest_of, with_documents
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request, runs_here
from quantkit.pipeline.resume import given_back, stopping_when_interrupted
from quantkit.pipeline.strict import refuse
from quantkit.pipeline.verdict import HARM, decide

if TYPE_CHECKING:
    from quantkit.model.source.alias import Alias


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
        Stopped: interrupted or disk full; what is done is kept.
    """
    started, begun = time.perf_counter(), time.process_time()
    prepared = prepare(request, path, ref, name, alias)
    request = prepared.request
    progress.plan(seconds_of(prepared))
    if request.strict:
        refuse(prepared.decisions)
    if not request.resume:
        demand_space(sum(disk(prepared).values()), prepared.out)
    build = Build.open(prepared.out, _fingerprint(prepared), resume=request.resume)
    if build.finished is not None:
        source, calib = prepared.graph.sha256, prepared.calib.sha256
        rows, notes = given_back(build.finished, request, source=source, calibration=calib)
        return Outcome(build.finished, rows, {"quantize_cpu": None, "total": 0.0}, [*prepared.graph.notes, *notes])
    with stopping_when_interrupted(build, prepared.out), build, stopping_when_full(build.folder):
        steps = Steps(build)
        quantized: Network | Quantized
        if wanted(request.recipe) is not None:
            quantized = Network(prepared, progress, steps)
            taken = quantized.decisions
        else:
            quantized = Quantized(prepared, progress, steps)
            taken = _mixed(prepared, quantized, build.bundle, progress)
            taken = [*quantized.decisions, *taken]
        if request.strict:
            refuse(taken)
        file = build.bundle / quantized.file
        file.parent.mkdir(parents=True, exist_ok=True)
        quantized.save(file)
        cpu = steps.cpu_before + time.process_time() - begun
        checks = quantized.checks(file)
        taken = [*taken, *engine.notes(build.bundle, quantized.build(build.bundle))]
        files = inventory(build.bundle)
        subject = content_sha256(files)
        progress.at("score", 0.0, f"{len(prepared.scoring)} samples of {prepared.scoring.name}")
        rows = scored(
            prepared.graph.model,
            quantized.runner(file),
            prepared.scoring,
            subject=subject,
            baseline=prepared.graph.sha256,
            progress=progress,
        )
        layers = quantized.layers()
        rows += size_rows(
            layers,
            files,
            subject=subject,
            baseline=prepared.graph.sha256,
            baseline_bytes=prepared.graph.bytes,
            folder=file.parent.name,
        )
        judged, unjudged = judge(request.recipe.gates, rows, request.gates_asked)
        if request.strict:
            refuse(unjudged)
        notes = [*prepared.graph.notes, *warnings([*prepared.decisions, *unjudged])]
        timed, untimed = _speed(prepared, file.parent, subject, progress)
        rows += timed
        decisions = [*prepared.decisions, *taken, *unjudged, *quantized.notes(), *untimed]
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
        manifest = with_documents(manifest, rows, notes, build.bundle)
        bundle = build.finish(manifest)
    seconds = {"quantize_cpu": cpu, "total": time.perf_counter() - started}
    return Outcome(bundle, rows, seconds, notes)


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Everything that a bundle's content depends on, and what its choices were made on."""
    import torch

    versions, target = machine.versions(), prepared.request.target
    relevant = ("python", "torch", "onnx", "onnx-ir", "onnxruntime", "numpy", "safetensors")
    return {
        "quantkit": quantkit.__version__,
        "source": prepared.graph.sha256,
        "recipe": prepared.request.recipe.as_dict(),
        "calibration": prepared.calib.sha256,
        "scoring": prepared.scoring.sha256,
        "held": prepared.held.sha256 if prepared.held is not None else None,
        # kinds of codes are the target's
        "target": {"name": target.name, "build": target.build},
        "threads": torch.get_num_threads(),
        "isa": machine.isa(),
        "versions": {name: versions[name] for name in relevant if name in versions},
    }


def _mixed(prepared: Prepared, quantized: Quantized, folder: Path, progress: Progress) -> list[Decision]:
    """Keep in floats what the recipe's gates need, if it asks for that; the search goes into the bundle."""
    settings = next((step.settings for step in prepared.request.recipe.passes if step.name == NAME), None)
    if settings is None or prepared.held is None:
        return []
    found = mix(quantized, prepared.held, settings, progress)
    quantized.take(found.solved)
    (folder / HARM).write_text(Harm(mixed=found.mixed).model_dump_json() + "\n", encoding="utf-8")
    return found.decisions


def _speed(prepared: Prepared, folder: Path, subject: str, progress: Progress) -> tuple[list[Row], list[Decision]]:
    """Against the float graph as it came, where the target is this machine; what prevents it is a decision."""
    request, graph = prepared.request, prepared.graph
    if not request.speed:
        return [], []
    if not runs_here(request.target):
        return [], [decision("measure", NOTE, "speed", f"target {request.target.name} is another machine")]
    size = sum(path.stat().st_size for path in folder.iterdir())
    ours = Timed(folder / MODEL, subject, "int8", size)
    theirs = Timed(graph.path, graph.sha256, "float32", graph.bytes)
    try:
        return speed(ours, theirs, prepared.calib, prepared.cost, progress), []
    except (InputError, MissingDependency) as problem:
        return [], [decision("measure", "speed-not-measured", "onnxruntime", problem.line())]


def _entries(prepared: Prepared) -> tuple[ModelEntry, CalibrationEntry]:
    graph, calib = prepared.graph, prepared.calib
    origin = SourceEntry(ref=prepared.ref, sha256=graph.sha256, dtype="float32", was=None)
    seen = {"set": calib.name, "split": calib.split, "ids_sha256": calib.sha256}
    return (
        ModelEntry(name=graph.name, kind=graph.kind, source=origin),
        # samples of a graph are not cut into tokens
        CalibrationEntry(**seen, samples=len(calib), tokens=0),
    )
