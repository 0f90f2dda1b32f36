"""How much a mean over the same items has risen, KL divergence or negative log-likelihood, as evidence for a decision.

    effect   mean of (candidate − baseline) over items: Σ s_c / Σ n_c over clusters c

What is drawn again in the bootstrap is whole clusters, both sides of an item together: tokens of one sequence are
alike, so the sequence is what was drawn. A mean of negative log-likelihoods is the logarithm of a perplexity: a rise
of 0.01 nats is a perplexity 1 % higher. Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), 8.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.stats.deciding.evidence import Resampled
from quantkit.stats.deciding.flips import same_items

Array = NDArray[Any]

# indices of resamples that are in memory at one time
_DRAWS = 5_000_000


def increase(
    before: Array,
    after: Array,
    *,
    margin: float,
    alarm: float = 0.0,
    clusters: Array | None = None,
    items: tuple[Array, Array] | None = None,
    where: str = "",
    resamples: int = 1999,
    seed: int = 0,
) -> Resampled:
    """How much the mean has risen from `before` to `after`, both [n], in their unit.

    Args:
        before: `[n]`, of the baseline: KL against the original, or −log p of the token that follows, nats.
        after: `[n]`, of the candidate.
        margin: a rise of less is nobody's concern.
        alarm: an alarm says that it rose by more than this.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.
        items: `[n]` of each side, what the items are; refused where they differ.

    Raises:
        InputError: `items-differ`, `nothing-scored`; `values-invalid`, one that is NaN or infinite, or fewer than two
            clusters.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    same_items(before, after, items, where)
    for side, values in (("baseline", before), ("candidate", after)):
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            value = f"the {side} has {values[wrong[0]]} at item {wrong[0]} ({wrong.size} such of {values.size})"
            raise InputError("values-invalid", where=where, value=value, rule="values are finite")
    labels = np.arange(before.size) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    sizes = np.bincount(labels).astype(np.float64)
    if sizes.size < 2:
        raise InputError("values-invalid", where=where, value="one cluster", rule="what is drawn again is clusters")
    sums = np.bincount(labels, weights=after - before)
    return Resampled(
        effect=float(np.mean(after - before)),
        draws=_draws(sums, sizes, resamples, np.random.default_rng(seed)),
        groups=sizes.size,
        alarm=alarm,
        margin=margin,
    )


def _draws(sums: Array, sizes: Array, resamples: int, generator: np.random.Generator) -> Array:
    found = []
    at_once = max(1, _DRAWS // sizes.size)
    for start in range(0, resamples, at_once):
        index = generator.integers(0, sizes.size, (min(at_once, resamples - start), sizes.size))
        found.append(sums[index].sum(axis=1) / sizes[index].sum(axis=1))
    return np.concatenate(found)
