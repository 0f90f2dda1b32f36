"""Text that a model writes itself, to calibrate it on.

A calibration set says what inputs are like in text of its own kind. What a model writes when nothing is asked of it is
of every kind that it was trained on, with code, lists and other languages among it, and needs no text at all (Liu et
al., "LLM-QAT", 2023, arXiv 2305.17888; Williams et al., "Self-calibration for Language Model Quantization and Pruning",
2024, arXiv 2410.17170).

Each next token is drawn from the model's own probabilities, out of the likeliest that make up nine tenths of them
(Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, arXiv 1904.09751): drawn from the whole
vocabulary, what small models write goes astray within a hundred tokens. Where a text ends, another begins. Models that
were taught to converse may go in circles where nothing is asked: what does is written again from where a user would
speak (Xu et al., "Magpie", 2024, arXiv 2406.08464). The rest is not: conversations alone are of fewer kinds.

Ids depend on how a processor adds up: what was drawn is kept in the user's cache, so that later compiles on this
machine see the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantkit import content, machine
from quantkit.bundle import cached
from quantkit.lazy import torch

if TYPE_CHECKING:
    from quantkit.model.source.open import Source

# sequences drawn at a time: a step reads all weights once for all of them
_TOGETHER = 32
# the share of probability that is drawn from
NUCLEUS = 0.9
# of a text's pairs of neighbours at least so many are new, or it goes in circles: what SmolLM2 writes has 0.7 to 0.95
CIRCLES = 0.5
# tokens that make it up, at most: to sort a whole vocabulary takes longer than a step
_WIDEST = 1000
# of the weights in float32: what a step takes besides
_ROOM = 1.2


def generated(
    source: Source, *, samples: int, tokens: int, seed: int, before: Sequence[int], opening: Sequence[int] = ()
) -> torch.Tensor | None:
    """Ids [samples, tokens], int64, that a decoder writes; None where it does not fit in memory whole.

    Args:
        source: the original.
        seed: of what is drawn.
        before: what the tokenizer puts before a text: each begins with it. Where it is nothing, the model is begun with
            the token that its config names as the first (or last) of a text, which is then left out.
        opening: what a conversation begins with, up to a user's words; empty where the model knows none, or where it
            leaves little of a sequence. What went in circles begins with it.
    """
    start = list(before) or [_first(source)]
    key = {
        "source": source.sha256,
        "drawn": [samples, tokens, seed, start, bool(before), list(opening), NUCLEUS, CIRCLES],
        "versions": machine.versions(),
        "isa": machine.isa(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    place = content.cache_dir() / "generated" / f"{name}.safetensors"
    kept = cached.read_tensor(place) if source.sha256 else None
    if kept is not None and kept.shape == (samples, tokens):
        return kept
    if not fits(source):
        return None
    extra = len(start) - len(before)
    found = _drawn(source, start, samples, tokens + extra, seed)[:, extra:]
    circles = (news(found) < CIRCLES).nonzero().squeeze(1)
    if opening and len(circles):
        instead = _drawn(source, list(opening), len(circles), tokens, seed)
        better = news(instead) > news(found[circles])
        found[circles[better]] = instead[better]
    if source.sha256:
        cached.keep_tensor(place, found)
    return found


def news(ids: torch.Tensor) -> torch.Tensor:
    """Of each text's pairs of neighbours the share that is new, [samples]: ids [samples, tokens]."""
    pairs = ids[:, :-1] * (int(ids.max()) + 1) + ids[:, 1:]
    return torch.tensor([len(row.unique()) for row in pairs]) / pairs.shape[1]


def fits(source: Source) -> bool:
    """Whether a model has room in memory to write."""
    return _ROOM * _float_bytes(source) <= machine.memory_available()


def _drawn(source: Source, start: list[int], samples: int, length: int, seed: int) -> torch.Tensor:
    """Ids [samples, length], those of `start` included."""
    from transformers import GenerationConfig, LogitsProcessorList

    from quantkit.model.source.open import quiet_loading

    with quiet_loading():
        model = source.load()
    # of the model's own settings none counts: they stop where a text ends, and cut off what is rare
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_length=length, pad_token_id=start[0])
    begun = torch.tensor([start]).repeat(samples, 1).split(_TOGETHER)
    how = {"logits_processor": LogitsProcessorList([_likeliest])}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return torch.cat([model.generate(part, attention_mask=torch.ones_like(part), **how) for part in begun])


def _likeliest(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits [samples, vocabulary] of the nucleus; of all other tokens none."""
    falling, order = logits.softmax(-1).topk(min(_WIDEST, logits.shape[-1]))
    inside = falling.cumsum(-1) - falling < NUCLEUS
    kept = logits.gather(1, order).masked_fill(~inside, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, kept)


def _first(source: Source) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        found = source.config.get(name)
        if isinstance(found, list):
            found = found[0] if found else None
        if isinstance(found, int):
            return found
    return 0


def _float_bytes(source: Source) -> float:
    return source.weights.total_bytes() * 4 / {"float32": 4}.get(source.dtype, 2)
