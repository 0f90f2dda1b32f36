"""Accuracy and size of what was exported, each export in its own runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.bundle import Build, Check, Decision, FileEntry, LayerEntry
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.rows import Row
from quantkit.measurement.size import folder_of, read_rows, size_rows
from quantkit.passes import NOTE, decision
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.confirm import confirm
from quantkit.pipeline.blocks.prepared import Prepared
from quantkit.pipeline.blocks.quantize import results
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import HARM, worst_positions
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Candidate

# how the part that plain transformers does is called
CONFIRMING = "a few of them by plain transformers"
# of an export's score, how much has passed when its positions have: they are confirmed, and the harm is looked for
_SCORED = 0.8


def score_exports(
    prepared: Prepared,
    build: Build,
    progress: Progress,
    *,
    subject: str,
    layers: list[LayerEntry],
    files: list[FileEntry],
    built: Mapping[str, str],
    whole: bool = True,
) -> tuple[list[Row], list[Check]]:
    """Accuracy of every export, each in its own runtime, and sizes; `harm.json` is written with the first.

    Args:
        built: hashes of what was compiled for it, by path in it.
        whole: whether the model fits into memory, so that plain transformers can confirm a few of the scores.

    Returns:
        rows, and the checks of `pipeline/blocks/confirm.py`.
    """
    from quantkit.measurement.accuracy import score
    from quantkit.measurement.accuracy.harm import through_depth
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    exports = prepared.request.recipe.export
    source, scoring = prepared.source, prepared.scoring
    original = prepared.unchanged()
    rows: list[Row] = []
    checks: list[Check] = []
    for number, step in enumerate(exports):
        runtime = reader(step.name, step.options)
        sizes = size_rows(
            layers,
            files,
            subject=subject,
            baseline=source.sha256,
            baseline_bytes=prepared.original.weights.total_bytes(),
            folder=folder_of(step.name),
        )
        rows += sizes if number == 0 else [row for row in sizes if row.name == "size.bytes"]
        candidate: Candidate
        here = runs_here(runtime, build.bundle)
        if not here and number > 0:
            continue
        if not here:  # the values that it was built from, since nothing else was exported that runs here
            runtime, candidate = "torch", _dense(prepared, build, step)
        else:
            candidate = load_runtime(runtime).open(build.bundle, torch_threads(), built=built)
            candidate = prepared.placed(candidate) if isinstance(candidate, StreamedModel) else candidate
        if isinstance(candidate, OnnxModel):
            rows += read_rows(candidate.ways, subject=subject, folder=folder_of(step.name))
        count, unit = score.counted(original, scoring)
        progress.at("score", number / len(exports), f"{count} {unit}s of {scoring.name}, {runtime}")
        found, items = score.rows(
            original,
            candidate,
            scoring,
            subject=subject,
            runtime=runtime,
            progress=functools.partial(_scored, progress, number, len(exports)),
        )
        if items is not None:
            items.save(build.bundle / ("items.safetensors" if number == 0 else f"items-{runtime}.safetensors"))
        rows += score.flagged(found, source.was)
        tensors = load_exporter(step.name).stores == "tensors"
        if whole and (number == 0 or tensors):
            progress.at("score", (number + _SCORED) / len(exports), CONFIRMING)
            folder = build.bundle / "model" if tensors else None
            checks += confirm(original, folder, scoring.ids, items)
        if number == 0 and layers:
            dense = candidate if isinstance(candidate, StreamedModel) else _dense(prepared, build, step)
            harm = through_depth(
                prepared.stream,
                dense,
                scoring.ids,
                layers=[layer.name for layer in layers],
                before=original if prepared.stream.transforms else None,
            )
            if items is not None:
                where = worst_positions(items, scoring, source)
                harm = harm.model_copy(update={"worst": where.worst, "worst_share": where.worst_share})
            (build.bundle / HARM).write_text(harm.model_dump_json() + "\n", encoding="utf-8")
        if tensors and prepared.request.recipe.scheme.kv_cache is not None:
            rows += _score_long(prepared, build.bundle, original, subject, progress)
    # of two exports, the original is confirmed with each
    return rows, list({check.name: check for check in checks}.values())


def runs_here(runtime: str, bundle: Path | None = None) -> bool:
    """Whether what a runtime reads, of a bundle, can be run on this machine: an engine needs its GPU."""
    return load_runtime(runtime).why_not_here(bundle) is None


def unscored(exports: Sequence[ExportStep], bundle: Path) -> list[Decision]:
    """What was exported and could not be run here, each with the reason."""
    found = []
    for step in exports:
        runtime = reader(step.name, step.options)
        if not runs_here(runtime, bundle):
            reason = load_runtime(runtime).why_not_here(bundle)
            found.append(decision("measure", NOTE, folder_of(step.name), f"not run: {reason}"))
    return found


def _score_long(
    prepared: Prepared, bundle: Path, original: StreamedModel, subject: str, progress: Progress
) -> list[Row]:
    """What the quantized cache costs at a long context, beside what the rest costs there."""
    from quantkit.measurement.accuracy import score
    from quantkit.runtimes.torch import RUNTIME as TORCH

    recipe = prepared.request.recipe
    progress.at("score", 0.9, f"up to {score.CONTEXT:,} tokens, with a quantized and a float cache")
    folder = bundle / "model"
    found = score.long_rows(
        original,
        {
            score.named(recipe.scheme.kv_cache): prepared.placed(TORCH.stream(folder)),
            score.FLOAT: prepared.placed(TORCH.stream(folder, cache=False)),
        },
        tokens.long(recipe, prepared.source, score.CONTEXT, score.SAMPLES),
        subject=subject,
        runtime=TORCH.name,
        settings={"dtype": "float32"},
    )
    return score.flagged(found, prepared.source.was)


def _dense(prepared: Prepared, build: Build, step: ExportStep) -> StreamedModel:
    """The model with the values that an export holds, inputs quantized, where no checkpoint holds it."""
    from quantkit.exporters.values import Values

    values = Values.of_results(prepared.source, prepared.stream, results(prepared, build))
    return prepared.placed(load_exporter(step.name).held(values, step.settings).running())


def _scored(progress: Progress, number: int, count: int, done: float) -> None:
    progress.at("score", (number + _SCORED * done) / count)


def torch_threads() -> int:
    """Threads that torch computes with; a session that is scored takes as many."""
    import torch

    return torch.get_num_threads()
