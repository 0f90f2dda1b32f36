"""Rows of nights with planted effects."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.nightly.records import Item, NightCell, Side, Time
from quantkit.stats.slowdown import BLOCKS, BURST, ROUNDS

from .conftest import FIRST

STEP = 0.02


def timed(
    cell: NightCell,
    *,
    slower: float = 0.0,
    other: Side = "baseline",
    attempt: int = 1,
    seed: int = 0,
    noise: float = 0.01,
    rounds: int = ROUNDS,
    blocks: int = BLOCKS,
    night: str = FIRST,
) -> list[Time]:
    """Times of a cell in ABBA blocks, the candidate `slower` than the other by that share; lognormal noise."""
    generator = np.random.default_rng(seed)
    found: list[Time] = []
    for number in range(rounds):
        for block in range(blocks):
            order: Sequence[Side] = ("candidate", other) if generator.integers(2) else (other, "candidate")
            sides = [side for side in (*order, *order[::-1]) for _ in range(BURST)]
            for position, side in enumerate(sides):
                seconds = STEP * np.exp(generator.normal(0, noise)) * (1 + slower * (side == "candidate"))
                began = 1.7e9 + len(found)
                # what is against the release stands in blocks of its own
                at = block if other == "baseline" else block + blocks
                found.append(Time(night, cell.key, attempt, side, number, at, position, float(seconds), began))
    return found


def answered(
    cell: NightCell, *, n: int = 2000, lost: int = 0, gained: int = 0, kl: float = 0.0, nll: float = 0.0, **others: Any
) -> list[Item]:
    """Items of a build: the baseline is right in the first half; the candidate loses and gains so many."""
    generator = np.random.default_rng(1)
    right = np.arange(n) < n // 2
    right = generator.permutation(right)
    after = right.copy()
    after[generator.permutation(np.flatnonzero(right))[:lost]] = False
    after[generator.permutation(np.flatnonzero(~right))[:gained]] = True
    base_kl, base_logp = generator.gamma(2, 0.05, n), -generator.gamma(2, 1.5, n)
    moved = generator.normal(0, 0.02, (2, n)) if kl or nll else np.zeros((2, n))
    found: list[Item] = []
    for i in range(n):
        sides: dict[Side, tuple[bool, float, float]] = {
            "candidate": (bool(after[i]), base_kl[i] + kl + moved[0, i], base_logp[i] - nll + moved[1, i]),
            others.get("other", "baseline"): (bool(right[i]), base_kl[i], base_logp[i]),
        }
        found += [Item(FIRST, cell.build, 1, i, side, *values, i // 100) for side, values in sides.items()]
    return found
