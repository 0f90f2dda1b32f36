"""Score a candidate against its original on held-out text, both streamed block by block.

**What a quantized KV cache costs as the context grows** (`long_rows`): every later token reads the cache again, with
its errors. Long sequences are scored twice, with the cache as it is stored and with a float one, and the mean KL
divergence is given over the positions up to 512, 1,024, ... of each: `accuracy.kl` rows with `shape.context` and
`settings.kv_cache`.

**In an engine with kernels and types of its own** (`apart_rows`): three comparisons, baseline | candidate.

    accuracy.*                     the float model in the engine | the checkpoint in it
    across.kl, .top1_agreement     the checkpoint in torch, float32 | itself in the engine
    the same, with settings.floor  the float model in torch, float32 | itself in the engine: the noise floor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import machine
from quantkit.bundle import cached
from quantkit.calibrate.tokens.ids import TokenSet
from quantkit.measurement.accuracy.labelled import About, Drawn
from quantkit.measurement.accuracy.positions import Accuracy, Items, data_of
from quantkit.measurement.accuracy.purpose import kept_at, result_rows
from quantkit.measurement.rows import Device, Row

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from quantkit.model.streaming.answers import Answers
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Scored
    from quantkit.runtimes.child import Report
    from quantkit.runtimes.generate import Scores
    from quantkit.scheme import CacheScheme

# logits of one model that are in memory at one time
_LOGITS, _ON_GPU = 1 << 23, 1 << 25


def original_answers(model: StreamedModel, tokens: TokenSet) -> Answers:
    """Return the original's answers; its last hidden states are computed once and kept in the user's cache.

    The key has everything that they depend on: source, token ids, versions, instruction set and threads.
    """
    from quantkit.model.streaming.answers import Answers

    count, length = tokens.ids.shape
    place = kept_at(model, tokens.whole or tokens.sha256)
    kept = cached.read_tensor(place)
    if kept is None or len(kept) < count or kept.shape[1] != length:
        calls = model.through(tokens.ids)
        if calls.live:  # what its blocks leave for each other cannot be kept
            return Answers(calls, tokens.ids)
        kept = calls.hidden
        cached.keep_tensor(place, kept)
    return model.answers_of(None, tokens.ids, kept[:count])


def vocabulary(model: nn.Module) -> int:
    """Count the logits of a position."""
    return int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]


def counted(original: StreamedModel, tokens: TokenSet) -> tuple[int, str]:
    """Return the number of items to score and their unit; an encoder has no next word, so its items are sequences."""
    if original.source.kind == "decoder" or tokens.pairs is not None:
        return tokens.items, tokens.unit
    return len(tokens.ids), "sequence"


def score(
    original: StreamedModel,
    candidate: Scored,
    tokens: TokenSet,
    progress: Callable[[float], None] | None = None,
    *,
    at_once: int | None = None,
) -> Items:
    """Score every position of `tokens` under both models.

    Memory: one block, two heads and a few positions of logits; for a candidate in a session, the session. `at_once`:
    most tokens to feed such a candidate at a time; None: as many as fit.
    """
    tell = progress or (lambda done: None)
    for side in (original, candidate):
        listens(side, tokens)
    before = original_answers(original, tokens)
    tell(0.3)
    after = candidate.scores(tokens.ids, at_once)
    tell(0.6)
    few = at_a_time(original)
    return compared(before, after, tokens.ids, few, lambda done: tell(0.6 + 0.4 * done), tokens.lengths)


def listens(model: Any, tokens: TokenSet) -> None:
    """Give a model the recordings of a set, if it has any."""
    if tokens.lengths is not None:
        model.pictures = tokens.pictures


def at_a_time(model: StreamedModel) -> int:
    """Count the positions for one comparison of logits; final norm and head need one position alone."""
    return max(1, (_LOGITS if model.device.type == "cpu" else _ON_GPU) // vocabulary(model.skeleton))


def compared(
    before: Scores,
    after: Scores,
    ids: Tensor,
    few: int,
    progress: Callable[[float], None] | None = None,
    lengths: Sequence[int] | None = None,
) -> Items:
    """Compare two models' logits of ids [n, T], `few` positions at a time; `lengths` leave out padding."""
    accuracy = Accuracy()
    for index, whole in enumerate(ids):
        row = whole if lengths is None else whole[: lengths[index]]
        for start in range(0, len(row) - 1, few):
            part = slice(start, min(start + few, len(row) - 1))
            accuracy.add_positions(index, row[part.start + 1 : part.stop + 1], before(index, part), after(index, part))
        if progress is not None:
            progress((index + 1) / len(ids))
    return accuracy.items()


def flagged(rows: list[Row], was: str | None) -> list[Row]:
    """Flag rows with the original format of a converted source."""
    if was is None:
        return rows
    flag = f"source-was-{was.replace(' ', '-').lower()}"
    return [row.model_copy(update={"flags": [*row.flags, flag]}) for row in rows]


def _about(
    original: StreamedModel, candidate: Scored, tokens: TokenSet, subject: str, runtime: str, settings: Any
) -> About:
    device, versions = Device.model_validate(dict(candidate.where)), machine.versions()
    return About(subject, original.source.sha256, runtime, data_of(tokens), device, versions, settings)


def rows(
    original: StreamedModel,
    candidate: Scored,
    tokens: TokenSet,
    *,
    subject: str,
    runtime: str,
    progress: Callable[[float], None] | None = None,
) -> tuple[list[Row], Items | None]:
    """Return the accuracy rows of a candidate, and its items (None for encoders).

    A graph with two ways to multiply has rows for each, distinguished by `settings.way`: whole sequences, as in
    prompts, whose items are returned, then a few tokens at a time, as in steps.
    """
    about = _about(original, candidate, tokens, subject, runtime, dict(candidate.settings))
    if original.source.kind == "decoder":
        if not candidate.ways:
            items = score(original, candidate, tokens, progress)
            return [*items.rows(about), *_spoken(original, candidate, tokens, about)], items
        all_rows, scored, count = [], [], len(candidate.ways)
        for number, way in enumerate(candidate.ways):

            def tell(done: float, number: int = number) -> None:
                (progress or (lambda done: None))((number + done) / count)

            at_once = candidate.prompt_rows - 1 if way == "steps" else None
            scored.append(score(original, candidate, tokens, tell, at_once=at_once))
            all_rows += scored[-1].rows(replace(about, settings={**about.settings, "way": way}))
        return all_rows, scored[0]
    from quantkit.measurement.accuracy.purpose import TextResults

    return result_rows(original, candidate, tokens, TextResults(original, tokens), about, progress), None


def _spoken(original: StreamedModel, candidate: Scored, tokens: TokenSet, about: About) -> list[Row]:
    from quantkit.measurement.accuracy import spoken

    return spoken.rows(original, candidate, tokens, about) if any(tokens.spoken) else []


# shares of the whole that have passed before the checkpoint, the float model and their comparisons are done
_PARTS = (0.0, 0.4, 0.75, 1.0)


def apart_rows(
    opens: Callable[[Path, Report], Any],
    checkpoint: StreamedModel,
    original: StreamedModel | None,
    tokens: TokenSet,
    *,
    subject: str,
    baseline: str,
    runtime: str,
    progress: Report,
) -> tuple[list[Row], Items | None]:
    """Return the rows of a checkpoint in another engine, and its items; see the module.

    Two models are opened one after the other, the checkpoint first: what the engine refuses costs no wait. Without the
    original there are only the rows against itself in torch.

    Args:
        opens: function that opens a folder in the engine: `Scored`, with the `versions` of its packages.
        checkpoint, original: the same folders in torch.
    """
    ids, few = tokens.ids, at_a_time(checkpoint)

    def told(part: int, of: str) -> Report:
        begin, end = _PARTS[part : part + 2]
        return lambda share, words: progress(begin + (end - begin) * share, f"{of}: {words}")

    def about(engine: Any, of: str, against: str, told: Mapping[str, Any]) -> About:
        versions = {**machine.versions(), **engine.versions}
        device = Device.model_validate(dict(engine.where))
        return About(of, against, runtime, data_of(tokens), device, versions, {**engine.settings, **told})

    def beside(items: Items, engine: Any, of: str, told: Mapping[str, Any]) -> list[Row]:
        scored = items.rows(about(engine, of, of, {"baseline_runtime": "torch", **told}))
        named = {row.name: row for row in scored}
        return [
            Row.model_validate({**named[f"accuracy.{name}"].as_dict(), "name": f"across.{name}"})
            for name in ("kl", "top1_agreement")
        ]

    engine = opens(checkpoint.source.path, told(0, "the bundle"))
    scores = engine.scores(ids)
    own = beside(compared(checkpoint.scores(ids), scores, ids, few), engine, subject, {})
    if original is None:
        return own, None
    floats = opens(original.source.in_files().path, told(1, "the float model"))
    before = floats.scores(ids)
    progress(_PARTS[2], "comparing")
    items = compared(before, scores, ids, few)
    floor = compared(original_answers(original, tokens), before, ids, few)
    against = about(engine, subject, baseline, {"baseline_runtime": runtime})
    return [*items.rows(against), *own, *beside(floor, floats, baseline, {"floor": True})], items


# tokens a sequence, where the model has as many positions, and how many sequences
CONTEXT, SAMPLES = 2048, 4
_SHORTEST = 512
# what `settings.kv_cache` says of a cache that is not quantized
FLOAT = "float"


def named(cache: CacheScheme | None) -> str:
    """Return a cache's name, as in `settings.kv_cache` of a row: `fp8_e4m3, tensor`."""
    return FLOAT if cache is None else f"{cache.format}, {cache.granularity}"


def long_rows(
    original: StreamedModel,
    candidates: Mapping[str, StreamedModel],
    tokens: TokenSet,
    *,
    subject: str,
    runtime: str,
    settings: Mapping[str, Any],
    progress: Callable[[float], None] | None = None,
) -> list[Row]:
    """Return `accuracy.kl` of each candidate (`settings.kv_cache` -> the model with that cache) over growing
    contexts."""
    tell = progress or (lambda done: None)
    all_rows: list[Row] = []
    for number, (cache, candidate) in enumerate(candidates.items()):
        items = score(original, candidate, tokens)
        about = _about(original, candidate, tokens, subject, runtime, {**settings, "kv_cache": cache})
        for context in contexts(tokens.ids.shape[1]):
            part = up_to(items, context)
            mean, drawn = part.mean(part.kl), Drawn(part.n, part.clusters()[1])
            shape = {"sequences": int(tokens.ids.shape[0]), "context": context}
            kl: dict[str, Any] = {"against": 0.0, "ci95": mean.ci95, "shape": shape, "unit": "nat", "better": "lower"}
            all_rows.append(about.row("accuracy.kl", mean.value, drawn, **kl))
        tell((number + 1) / len(candidates))
    return all_rows


def contexts(tokens: int) -> Sequence[int]:
    """List 512, 1024, ... and the whole length."""
    lengths = [_SHORTEST * 2**power for power in range(12) if _SHORTEST * 2**power < tokens]
    return [*lengths, tokens]


def up_to(items: Items, context: int) -> Items:
    """Keep the items of the first `context` tokens of each sequence."""
    starts = np.searchsorted(items.sequence, items.sequence)
    chosen = np.arange(items.n) - starts < context - 1
    return Items(**{name: getattr(items, name)[chosen] for name in Items.__dataclass_fields__})
