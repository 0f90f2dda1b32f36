"""Score every export in its own runtime, measure its size, and verify the scores.

The stream's scores are verified against the original and the reloaded export in plain transformers, on the beginnings
of a few scored sequences: for a decoder the original's mean loss and the candidate's mean KL, for other models their
outputs, token by token. No code of quantkit runs on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import Build, Bundle, Check, Decision
from quantkit.calibrate.tokens.ids import CONFIRMED
from quantkit.errors import InputError
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.rows import Row
from quantkit.measurement.size import folder_of
from quantkit.passes import NOTE, decision
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.prepared import Prepared
from quantkit.pipeline.gates import near
from quantkit.pipeline.measure import MeasuredAgainst, measure, sizes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import HARM
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.measurement.accuracy.harm import Depth, Harm
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.calls import Pictures
    from quantkit.model.streaming.own_forward import Answering
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Scored

# how the part that plain transformers does is called
CONFIRMING = "a few of them by plain transformers"
# of an export's score, how much has passed when its positions have: they are confirmed, and the harm is looked for
_SCORED = 0.8
LOSS, KL, ORIGINAL, OUTPUT = "score.loss", "score.kl", "score.original", "score.output"
# nats; of outputs, of the Euclidean norm of a token's. Where a library multiplies in kernels of its own, more is
# allowed: `model/streaming/transforms.py`
LIMIT = 1e-3
_SEQUENCES, _TOKENS = CONFIRMED
# files of what plain transformers answers for these, of the original and of the export
BEFORE, AFTER = "before.safetensors", "after.safetensors"
# positions of a second export of a decoder, whose logits the reload check has compared with those of its weights
_AGAIN = 500
# positions whose logits are in float64 at one time
_PART = 8


def original_of(prepared: Prepared) -> MeasuredAgainst:
    """Return the original of a compile, which is open."""
    return MeasuredAgainst(prepared.source.sha256, stream=prepared.unchanged().as_it_runs(), tokens=prepared.scoring)


def score_exports(
    prepared: Prepared, build: Build, progress: Progress, bundle: Bundle, built: Mapping[str, str], *, whole: bool
) -> tuple[list[Row], list[Check]]:
    """Score and weigh every export in its own runtime; `harm.json` is written with the first.

    The first export of a decoder is scored on all of the text, the others on `_AGAIN` positions of it. Where the limit
    of a gate then lies inside the interval, they are scored on all of it too.

    Args:
        bundle: as it was just written.
        built: hashes of what was compiled for it, by path in it.
        whole: whether the model fits into memory, so that plain transformers can confirm a few of the scores.

    Returns:
        rows, and the checks of `confirm`.
    """
    from quantkit.measurement.accuracy import score
    from quantkit.model.streaming.stream import StreamedModel

    exports, scoring, against = prepared.request.recipe.export, prepared.scoring, original_of(prepared)
    original = against.stream
    assert original is not None
    rows: list[Row] = []
    checks: list[Check] = []
    for number, step in enumerate(exports):
        runtime, folder = reader(step.name, step.options), folder_of(step.name)
        candidate: Scored
        if runs_here(runtime, bundle.path):
            candidate = load_runtime(runtime).open(bundle.path, torch_threads(), built=built)
            candidate = prepared.placed(candidate) if isinstance(candidate, StreamedModel) else candidate
        elif number > 0:
            rows += _without_bits(sizes(bundle, against, folder))
            continue
        else:  # the values that it was built from, since nothing else was exported that runs here
            runtime, candidate = "torch", _dense(prepared, build, step)
        few = scoring if number == 0 or original.source.kind != "decoder" else _few(scoring)
        count, unit = score.counted(original, few)
        progress.at("score", number / len(exports), f"{count} {unit}s of {scoring.name}, {runtime}")

        def tell(done: float, number: int = number) -> None:
            progress.at("score", (number + _SCORED * done) / len(exports))

        depth: Depth | None = None
        silent = tokens.unheard(prepared.source, scoring, prepared.decisions)
        harmed = number == 0 and bool(bundle.manifest.layers) and not silent
        if scoring.lengths is not None:
            score.listens(candidate, scoring)
        # a decoder is scored in one pass over its blocks
        if harmed and isinstance(candidate, StreamedModel) and original.source.kind == "decoder":
            candidate = candidate.on(candidate.device, candidate.place)
            depth = _depth(prepared, original, candidate, bundle)
            candidate.meanwhile = depth.visit
        how: dict[str, Any] = {"candidate": candidate, "weighed": folder, "scored": tell}
        scored, items = measure(bundle, replace(against, tokens=few), runtime, **how)
        if few is not scoring and near(prepared.request.recipe.gates, scored):
            scored, items = measure(bundle, against, runtime, **how)
        rows += scored if number == 0 else _without_bits(scored)
        if items is not None:
            items.save(bundle.path / ("items.safetensors" if number == 0 else f"items-{runtime}.safetensors"))
        if harmed:
            if depth is None:
                dense = candidate if isinstance(candidate, StreamedModel) else _dense(prepared, build, step)
                depth = _depth(prepared, original, dense, bundle)
                for stage, index in enumerate(dense.visits):
                    depth.visit(stage, dense.load(index))
            harm = _harm(prepared, depth.harm, items)
            (bundle.path / HARM).write_text(harm.model_dump_json() + "\n", encoding="utf-8")
            del depth, candidate, how  # they hold the ends of both models, and to confirm them loads others
        tensors = load_exporter(step.name).stores == "tensors"
        if whole and (number == 0 or tensors) and is_confirmed(original):
            progress.at("score", (number + _SCORED) / len(exports), CONFIRMING)
            kept = {name: build.temporary(name) for name in (BEFORE, AFTER)}
            checks += confirm(
                original, bundle.path / "model" if tensors else None, few_ids(scoring, prepared.source), items, kept
            )
        if tensors and prepared.request.recipe.scheme.kv_cache is not None:
            rows += _score_long(prepared, bundle, original, progress)
    # of two exports, the original is confirmed with each
    return rows, list({check.name: check for check in checks}.values())


def few_ids(scoring: TokenSet, source: Source) -> Tensor:
    """Return the beginnings of a few sequences, for plain transformers."""
    return scoring.beginnings(_SEQUENCES, _tokens(source) or scoring.ids.shape[1])


def _tokens(source: Source) -> int | None:
    """Count the tokens of a beginning; None is all, where an encoder reads the text: each answer rests on all of it."""
    return None if source.has_encoder and not source.hears else _TOKENS


def _few(scoring: TokenSet) -> TokenSet:
    return scoring.first(-(-_AGAIN // max(scoring.ids.shape[1] - 1, 1)))


def _without_bits(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a second export; bits per weight are those of the first."""
    return [row for row in rows if row.name != "size.bits_per_weight"]


def _depth(prepared: Prepared, original: StreamedModel, candidate: StreamedModel, bundle: Bundle) -> Depth:
    """Begin to measure how the error grows through the model."""
    from quantkit.measurement.accuracy.harm import Depth

    layers, before = [layer.name for layer in bundle.manifest.layers], original if prepared.stream.transforms else None
    return Depth(prepared.stream, candidate, prepared.scoring.ids, layers=layers, before=before)


def _harm(prepared: Prepared, harm: Harm, items: Items | None) -> Harm:
    """Add where the model differs most from its original: in words, or in ids where the source has no tokenizer."""
    from quantkit.measurement.accuracy.harm import worst

    ids = prepared.scoring.ids
    if items is None:
        return harm
    decode: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids))  # noqa: E731
    with suppress(InputError):
        decode = prepared.source.tokenizer().decode
    where = worst(items, ids, lambda ids: str(decode(ids)))
    return harm.model_copy(update={"worst": where.worst, "worst_share": where.worst_share})


def runs_here(runtime: str, bundle: Path | None = None) -> bool:
    """Tell whether this machine can run a bundle in a runtime: an engine needs its GPU."""
    return load_runtime(runtime).why_not_here(bundle) is None


def unscored(exports: Sequence[ExportStep], bundle: Path) -> list[Decision]:
    """Record the exports without a score here, each with the reason."""
    reasons = {step.name: load_runtime(reader(step.name, step.options)).why_not_here(bundle) for step in exports}
    return [
        decision("measure", NOTE, folder_of(name), f"not run: {reason}")
        for name, reason in reasons.items()
        if reason is not None
    ]


def _score_long(prepared: Prepared, bundle: Bundle, original: StreamedModel, progress: Progress) -> list[Row]:
    """Score the quantized cache at a long context, beside what the rest costs there."""
    from quantkit.measurement.accuracy import score
    from quantkit.runtimes.torch import RUNTIME as TORCH

    recipe, folder = prepared.request.recipe, bundle.path / "model"
    progress.at("score", 0.9, f"up to {score.CONTEXT:,} tokens, with a quantized and a float cache")
    rows = score.long_rows(
        original,
        {
            score.named(recipe.scheme.kv_cache): prepared.placed(TORCH.stream(folder)),
            score.FLOAT: prepared.placed(TORCH.stream(folder, cache=False)),
        },
        tokens.long(recipe, prepared.source, score.CONTEXT, score.SAMPLES),
        subject=bundle.manifest.content_sha256,
        runtime=TORCH.name,
        settings={"dtype": "float32"},
    )
    return score.flagged(rows, prepared.source.was)


def _dense(prepared: Prepared, build: Build, step: ExportStep) -> StreamedModel:
    """Return the model with the values that an export holds, inputs quantized, where no checkpoint holds it."""
    return prepared.placed(load_exporter(step.name).held(prepared.values(build), step.settings).running())


def torch_threads() -> int:
    """Count torch's threads; a scored session takes as many."""
    import torch

    return torch.get_num_threads()


def answering(like: StreamedModel, ids: Tensor, place: Path | None, folder: Path | None = None) -> Answering:
    """Make the request for plain transformers' answers of the original, or of a checkpoint in `folder`."""
    from quantkit.model.streaming.own_forward import Answering

    cached = folder is not None and bool((_quantization(folder) or {}).get("kv_cache_scheme"))
    changes = like.transforms if folder is None else ()
    return Answering(like, ids[:_SEQUENCES, : _tokens(like.source)], place, cached, changes)


def is_confirmed(original: StreamedModel) -> bool:
    """Tell whether plain transformers can run an original too: it merges experts, and their inputs are not rounded."""
    from quantkit.model.structure.experts import found_in

    return not original.transforms or not any(found_in(block) for block in original.blocks)


def confirm(
    original: StreamedModel,
    folder: Path | None,
    ids: Tensor,
    items: Items | None,
    kept: Mapping[str, Path] = MappingProxyType({}),
) -> list[Check]:
    """Check `score.loss` and `score.kl` of a decoder; of another model `score.original`, and `score.output` of the
    export.

    Args:
        folder: of the written checkpoint; None confirms the original alone.
        ids: [samples, tokens] that were scored.
        items: of every scored position of a decoder.
        kept: `BEFORE` and `AFTER` -> file of the answers; a model without one is loaded.
    """
    from quantkit.model.streaming.transforms import DEPARTURES, departure

    few = ids[:_SEQUENCES, : _tokens(original.source)]
    machine.let_go()  # embeddings and heads that were scored with
    before = _given(original.source, answering(original, ids, kept.get(BEFORE)))
    after = streamed = rounded = None
    how: dict[str, Any] = {"ids": few, "pictures": original.pictures}
    if folder is not None:
        after = _reloaded(folder, answering(original, ids, kept.get(AFTER), folder))
    if folder is not None and after is not None:
        alike = items is None or original.transforms or _rounds_inputs(folder)
        streamed = _streamed(folder, **how) if alike else None
        rounded = _streamed(folder, **how, rounded=True) if _has_kernels(folder) else None
    if original.source.kind == "decoder":
        expected = original.answers(few).all() if original.transforms or items is None else None
        return _decoder(before, after, few, items, streamed, rounded, expected)
    checks = [_check(ORIGINAL, _apart(original.answers(few).all(), before), LIMIT)]
    if after is not None and streamed is not None:
        if rounded is None:
            checks.append(_check(OUTPUT, _apart(streamed, after), LIMIT))
        else:
            limit = LIMIT + DEPARTURES * departure(rounded, streamed)
            checks.append(_check(OUTPUT, departure(after, streamed), limit))
    return checks


def _decoder(
    before: Tensor,
    after: Tensor | None,
    ids: Tensor,
    items: Items | None,
    streamed: Tensor | None,
    rounded: Tensor | None,
    expected: Tensor | None,
) -> list[Check]:
    """Check the loss of the original and the KL of the candidate, in nats, against what was scored.

    Args:
        before, after: logits [samples, tokens, vocabulary] of plain transformers, of the original and of the export.
        items: scored positions; None if nothing is scored, with `expected` and `streamed`.
        streamed: logits of the scored candidate on `ids` alone, taken instead of its items; None takes those.
        rounded: the same with the products rounded that a library may round; None where it multiplies as torch does.
        expected: logits of the scored original on `ids` alone, likewise; None takes its items.
    """
    import numpy as np

    from quantkit.model.streaming.transforms import DEPARTURES

    positions = ids.shape[1] - 1
    chosen = np.empty(0, np.int64)
    if items is not None:
        chosen = np.concatenate([np.flatnonzero(items.sequence == row)[:positions] for row in range(len(ids))])

    def loss(logits: Tensor) -> float:
        return -float(_of_positions(logits, lambda one, part: one.gather(-1, ids[:, part + 1, None])[..., 0]).mean())

    scored_loss = float(items.nll_original[chosen].mean()) if items is not None and expected is None else 0.0
    if expected is not None:
        scored_loss = loss(expected)
    checks = [_check(LOSS, abs(loss(before) - scored_loss), LIMIT)]
    if after is not None:
        like = before if expected is None else expected
        scored = np.empty(0) if items is None else items.kl[chosen]
        if streamed is not None:
            scored = _divergences(like, streamed).numpy()
        # a mean of positions whose errors need not be independent
        apart = 0.0 if rounded is None else np.sqrt(np.square(_divergences(like, rounded).numpy() - scored).mean())
        error = abs(float(_divergences(before, after).mean()) - float(scored.mean()))
        # an original that rounds its inputs departs from itself by the last bit of a sum, and so does the export
        noise = 0.0 if expected is None else 2 * float(_divergences(expected, before).mean())
        checks.append(_check(KL, error, LIMIT + DEPARTURES * (float(apart) + noise)))
    return checks


def _divergences(before: Tensor, logits: Tensor) -> Tensor:
    """KL from `before` at every position but the last, nats, sequence by sequence."""

    def divergence(one: Tensor, part: Tensor) -> Tensor:
        other = logits[:, part].double().log_softmax(dim=-1)
        # what the original rules out adds nothing; a NaN of the reloaded model is to be seen
        return (one.exp() * (one - other)).masked_fill_(one.isneginf(), 0.0).sum(dim=-1)

    return _of_positions(before, divergence)


def _of_positions(logits: Tensor, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Take a value of every position but the last, by log-probabilities [samples, some positions, vocabulary]."""
    import torch

    parts = torch.arange(logits.shape[1] - 1).split(_PART)  # in float64 a large vocabulary takes 2 MB a position
    values = [value(logits[:, part].double().log_softmax(dim=-1), part) for part in parts]
    return torch.cat(values, dim=1).flatten()


def _given(source: Source, asked: Answering) -> Tensor:
    """Return the answers of plain transformers; the model is loaded if none are kept."""
    from quantkit.model.source.places import quiet_loading

    if (answers := asked.kept()) is None:
        with quiet_loading():
            answers = asked.run(source.load())
        machine.let_go()
    return answers


def _reloaded(folder: Path, asked: Answering) -> Tensor | None:
    """Run a written checkpoint, expanded by its library; None where transformers leaves out what was scored."""
    from quantkit.model import layouts, run_time
    from quantkit.model.source.open import open_written
    from quantkit.runtimes.torch.reloaded import unread

    config = _quantization(folder)
    packed = {} if config is None or run_time.weights_are_dense(config) else config
    if packed and (layouts.missing(layouts.of(packed)) or unread(folder)):
        return None
    if run_time.expands_at_load(folder) and run_time.is_named(config):
        return None  # weights alone are expanded: inputs and cache stay floats there
    return _given(open_written(folder), asked)


def _streamed(folder: Path, ids: Tensor, pictures: Pictures, *, rounded: bool = False) -> Tensor:
    """Run the scoring stream of a written checkpoint on ids [samples, tokens]; `rounded`: as kernels may."""
    from quantkit.model.finished import DenseWeights
    from quantkit.model.streaming.transforms import RoundedProducts
    from quantkit.runtimes.torch.reloaded import reloaded

    stream = reloaded(folder, library=True)
    stream.pictures = pictures
    if rounded and isinstance(weights := stream.source.weights, DenseWeights):
        packed = {name.removesuffix(".weight") for name, file in stream.files.items() if file in weights.packed}
        stream.transforms.append(RoundedProducts(stream.block_names, packed))
    return stream.answers(ids, chunk=len(ids)).all()  # tokens of one call may share a scale


def _quantization(folder: Path) -> dict[str, Any] | None:
    """Read the `quantization_config` of a written checkpoint."""
    from quantkit.exporters.checkpoint.reload import config_json

    config: dict[str, Any] | None = config_json(folder).get("quantization_config")
    return config


def _rounds_inputs(folder: Path) -> bool:
    """Tell whether inputs or the cache are rounded as the model runs.

    A number between two codes then goes either way by the last bit of a sum, which the length of a sequence changes:
    plain transformers on two threads, run on 96 tokens, departs from itself, run on 512, by 0.015 nats (SmolLM2-135M,
    `int8`; on one thread by nothing; `benchmarks/rounded_inputs.py`). So both sides see the same tokens.
    """
    from quantkit.model import run_time

    return run_time.is_named(_quantization(folder))


def _has_kernels(folder: Path) -> bool:
    """Tell whether a written checkpoint is multiplied in kernels of its library."""
    from quantkit.model import layouts, run_time

    config = _quantization(folder)
    return config is not None and not run_time.weights_are_dense(config) and layouts.of(config).kernels


def _apart(values: Tensor, expected: Tensor) -> float:
    """Return the worst token's difference, of its norm."""
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.cpu().double(), expected.cpu().double()  # one side may come from a GPU
    size = expected.norm(dim=-1).clamp(min=1e-30)
    return float(((values - expected).norm(dim=-1) / size).max())


def _check(name: str, value: float, limit: float) -> Check:
    finite = value if value < float("inf") else None
    return Check(name=name, value=finite, limit=limit, ok=finite is not None and finite <= limit)
