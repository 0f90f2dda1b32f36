"""Two candidates of one original, scored on the same text: what a decision between them rests on.

Each comes with its items (`measurement.accuracy`), position by position against the original. Set against each other:

    accuracy.next_word     the next words that one gets right and the other wrong         share of positions
    accuracy.kl            KL(original ‖ candidate) − KL(original ‖ baseline), the mean   nats
    accuracy.perplexity    the rise of the mean negative log-likelihood, log-perplexity   nats

An effect above zero is for the worse. Sequences, or blocks of positions where those are few, are what was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items
from quantkit.stats.deciding.evidence import Evidence
from quantkit.stats.deciding.flips import flips, increase, same_items

Array = NDArray[Any]

# nats, on average over positions: precisions of one original are hundredths apart, other texts are apart by whole nats
_SAME_ORIGINAL = 0.1


def against(baseline: Items, candidate: Items, margins: Mapping[str, float], *, where: str = "") -> dict[str, Evidence]:
    """Evidence by the name of the rows that it is about, for `stats.deciding`.

    Args:
        candidate: items of what is judged, at the same positions of the same text and against the same original.
        margins: by name, which are asked for: a share for `accuracy.next_word`, nats for the other two.

    Raises:
        InputError: `items-differ`, other positions, other text, or another original; `nothing-scored`.
    """
    items = (baseline.sequence, candidate.sequence)
    same_items(baseline.kl, candidate.kl, items, where)
    apart = float(np.mean(np.abs(baseline.nll_original - candidate.nll_original)))
    if not apart <= _SAME_ORIGINAL:
        raise InputError(
            "items-differ",
            where=where,
            value=f"the originals' log-likelihoods are {apart:.3g} nats apart on average",
            rule="both were scored on one text, against one original",
            remedy="score both again",
        )
    clusters = candidate.clusters()[0]
    means = {
        "accuracy.kl": (baseline.kl, candidate.kl),
        "accuracy.perplexity": (baseline.nll_candidate, candidate.nll_candidate),
    }
    found: dict[str, Evidence] = {}
    for name, margin in margins.items():
        if name == "accuracy.next_word":
            right = baseline.right_candidate, candidate.right_candidate
            found[name] = flips(*right, margin=margin, clusters=clusters, where=where)
        else:
            found[name] = increase(*means[name], margin=margin, clusters=clusters, where=where)
    return found


def flipped(baseline: Items, candidate: Items) -> Array:
    """Positions [k] at which one side's next word is right and the other's is not."""
    return np.flatnonzero(baseline.right_candidate != candidate.right_candidate)
