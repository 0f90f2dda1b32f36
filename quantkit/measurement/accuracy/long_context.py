"""What a quantized KV cache costs as the context grows: every later token reads the cache again, with its errors.

Long sequences are scored twice, with the cache as it is stored and with a float one, and the mean KL divergence is
given over the positions up to 512, 1,024, ... of each: `accuracy.kl` rows with `shape.context` and `settings.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import machine
from quantkit.calibrate.tokens.ids import TokenSet
from quantkit.measurement.accuracy import score
from quantkit.measurement.accuracy.positions import Items, data_of
from quantkit.measurement.rows import Baseline, Device, Row

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.scheme import CacheScheme

# tokens a sequence, where the model has as many positions, and how many sequences
CONTEXT, SAMPLES = 2048, 4
_SHORTEST = 512
# what `settings.kv_cache` says of a cache that is not quantized
FLOAT = "float"


def named(cache: CacheScheme | None) -> str:
    """`settings.kv_cache` of a row: `fp8_e4m3, tensor`."""
    return FLOAT if cache is None else f"{cache.format}, {cache.granularity}"


def rows(
    original: StreamedModel,
    candidates: Mapping[str, StreamedModel],
    tokens: TokenSet,
    *,
    subject: str,
    runtime: str,
    settings: Mapping[str, Any],
    progress: Callable[[float], None] | None = None,
) -> list[Row]:
    """`accuracy.kl` of each candidate, cumulated over growing contexts.

    Args:
        candidates: `settings.kv_cache` -> the model with that cache.
        subject: `content_sha256` of the bundle.
    """
    tell = progress or (lambda done: None)
    found: list[Row] = []
    for number, (cache, candidate) in enumerate(candidates.items()):
        items = score.score(original, candidate, tokens)
        found += [
            Row(
                name="accuracy.kl",
                value=part.mean(part.kl).value,
                unit="nat",
                stat="mean",
                better="lower",
                ci95=part.mean(part.kl).ci95,
                n=part.n,
                subject=subject,
                baseline=Baseline(subject=original.source.sha256, value=0.0),
                shape={"sequences": int(tokens.ids.shape[0]), "context": context},
                runtime=runtime,
                settings={**settings, "kv_cache": cache},
                device=Device.model_validate(score.device_of(candidate)),
                versions=machine.versions(),
                data=data_of(tokens),
                flags=[f"ci95-by-{part.clusters()[1]}"],
            )
            for context in contexts(tokens.ids.shape[1])
            for part in (up_to(items, context),)
        ]
        tell((number + 1) / len(candidates))
    return found


def contexts(tokens: int) -> Sequence[int]:
    """512, 1024, ... and the whole length."""
    found = [_SHORTEST * 2**power for power in range(12) if _SHORTEST * 2**power < tokens]
    return [*found, tokens]


def up_to(items: Items, context: int) -> Items:
    """The items of the first `context` tokens of each sequence."""
    starts = np.searchsorted(items.sequence, items.sequence)
    chosen = np.arange(items.n) - starts < context - 1
    return Items(**{name: getattr(items, name)[chosen] for name in Items.__dataclass_fields__})
