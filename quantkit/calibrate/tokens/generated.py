"""Calibration text that the model writes itself.

Unprompted text of a model covers all kinds of its training data, and needs no other text (Liu et al., "LLM-QAT", 2023,
arXiv 2305.17888; Williams et al., "Self-calibration for Language Model Quantization and Pruning", 2024, arXiv
2410.17170). Each token is drawn from the model's own probabilities, at temperature 1 and from the whole vocabulary; at
the end of a text, another begins. Ids depend on the processor's order of sums, so they are cached for later compiles on
this machine.
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
# memory of a step, as a multiple of the weights in float32
_ROOM = 1.2


def generated(source: Source, *, samples: int, tokens: int, seed: int, before: Sequence[int]) -> torch.Tensor | None:
    """Return ids [samples, tokens], int64, that a decoder writes; None if it does not fit in memory whole.

    Args:
        source: the original model.
        seed: seed of the draw.
        before: ids with which the tokenizer begins a text; each sequence begins with them. If there are none, the model
            starts from the first (or last) token of a text in its config, which is then dropped.
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
    ids = _drawn(source, start, samples, tokens + len(start) - len(before), seed)[:, len(start) - len(before) :]
    if source.sha256:
        cached.keep_tensor(place, ids)
    return ids


def fits(source: Source) -> bool:
    """Tell whether a model fits in memory for writing."""
    return _ROOM * _float_bytes(source) <= machine.memory_available()


def _drawn(source: Source, start: list[int], samples: int, length: int, seed: int) -> torch.Tensor:
    """Return ids [samples, length], including `start`."""
    from transformers import GenerationConfig

    from quantkit.model.source.places import quiet_loading

    with quiet_loading():
        model = source.load()
    # without the model's own settings, which stop at the end of a text and cut off rare tokens
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_length=length, pad_token_id=start[0])
    begun = torch.tensor([start]).repeat(samples, 1).split(_TOGETHER)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return torch.cat([model.generate(part, attention_mask=torch.ones_like(part)) for part in begun])


def _first(source: Source) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        token = source.config.get(name)
        if isinstance(token, list):
            token = token[0] if token else None
        if isinstance(token, int):
            return token
    return 0


def _float_bytes(source: Source) -> float:
    return source.weights.total_bytes() * 4 / {"float32": 4}.get(source.dtype, 2)
