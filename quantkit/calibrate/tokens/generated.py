"""Text that a model writes itself, to calibrate it on.

What a model writes when nothing is asked of it is of every kind that it was trained on, and needs no text at all (Liu
et al., "LLM-QAT", 2023, arXiv 2305.17888; Williams et al., "Self-calibration for Language Model Quantization and
Pruning", 2024, arXiv 2410.17170). Each next token is drawn from the model's own probabilities, at temperature 1 and
from the whole vocabulary; where a text ends, another begins. Ids depend on how a processor adds up: what was drawn is
kept in the user's cache, so that later compiles on this machine see the same.
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
# of the weights in float32: what a step takes besides
_ROOM = 1.2


def generated(source: Source, *, samples: int, tokens: int, seed: int, before: Sequence[int]) -> torch.Tensor | None:
    """Ids [samples, tokens], int64, that a decoder writes; None where it does not fit in memory whole.

    Args:
        source: the original.
        seed: of what is drawn.
        before: what the tokenizer puts before a text: each begins with it. Where it is nothing, the model is begun with
            the token that its config names as the first (or last) of a text, which is then left out.
    """
    start = list(before) or [_first(source)]
    key = {
        "source": source.sha256,
        "drawn": [samples, tokens, seed, start, bool(before)],
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
    found = _drawn(source, start, samples, tokens + len(start) - len(before), seed)[:, len(start) - len(before) :]
    if source.sha256:
        cached.keep_tensor(place, found)
    return found


def fits(source: Source) -> bool:
    """Tell whether a model has room in memory to write."""
    return _ROOM * _float_bytes(source) <= machine.memory_available()


def _drawn(source: Source, start: list[int], samples: int, length: int, seed: int) -> torch.Tensor:
    """Ids [samples, length], those of `start` included."""
    from transformers import GenerationConfig

    from quantkit.model.source.open import quiet_loading

    with quiet_loading():
        model = source.load()
    # of the model's own settings none counts: they stop where a text ends, and cut off what is rare
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_length=length, pad_token_id=start[0])
    begun = torch.tensor([start]).repeat(samples, 1).split(_TOGETHER)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return torch.cat([model.generate(part, attention_mask=torch.ones_like(part)) for part in begun])


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
