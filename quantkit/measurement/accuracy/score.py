"""Score a candidate against its original on held-out text, both streamed block by block.

**What a quantized KV cache costs as the context grows** (`long_rows`): every later token reads the cache again, with
its errors. Long sequences are scored twice, with the cache as it is stored and with a float one, and the mean KL
divergence is given over the positions up to 512, 1,024, ... of each: `accuracy.kl` rows with `shape.context` and
`settings.kv_cache`.
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
    from torch import nn

    from quantkit.model.streaming.stream import Answers, StreamedModel
    from quantkit.runtimes import Scored
    from quantkit.scheme import CacheScheme

# logits of one model that are in memory at one time
_LOGITS, _ON_GPU = 1 << 23, 1 << 25


def original_answers(model: StreamedModel, tokens: TokenSet) -> Answers:
    """Return the original's answers; its last hidden states are computed once and kept in the user's cache.

    The key has everything that they depend on: source, token ids, versions, instruction set and threads.
    """
    from quantkit.model.streaming.stream import Answers

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
    before = original_answers(original, tokens)
    tell(0.3)
    after = candidate.scores(tokens.ids, at_once)
    tell(0.6)
    accuracy = Accuracy()
    # final norm and head look at one position at a time, so a few at a time is enough
    few = max(1, (_LOGITS if original.device.type == "cpu" else _ON_GPU) // vocabulary(original.skeleton))
    for index in range(tokens.ids.shape[0]):
        ids = tokens.ids[index : index + 1]
        for start in range(0, ids.shape[1] - 1, few):
            part = slice(start, min(start + few, ids.shape[1] - 1))
            logits = before(index, part), after(index, part)
            accuracy.add_positions(index, ids[0, part.start + 1 : part.stop + 1], *logits)
        tell(0.6 + 0.4 * (index + 1) / tokens.ids.shape[0])
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
            return items.rows(about), items
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
