"""Ranges of activations from all values at once, by the definition: sorted, averaged in turn, counted bin by bin."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def moving_average(samples: Sequence[np.ndarray], least: float) -> tuple[float, float]:
    low, high = float(samples[0].min()), float(samples[0].max())
    for number, sample in enumerate(samples[1:], 2):
        weight = max(least, 1 / number)
        low = (1 - weight) * low + weight * float(sample.min())
        high = (1 - weight) * high + weight * float(sample.max())
    return low, high


def percentile(values: np.ndarray, covered: float, *, symmetric: bool) -> tuple[float, float]:
    def at(ordered: list[float], share: float) -> float:
        return next(value for place, value in enumerate(ordered, 1) if place >= share * len(ordered) * (1 - 1e-12))

    if symmetric:
        top = at(sorted(abs(float(value)) for value in values), covered)
        return -top, top
    ordered = sorted(float(value) for value in values)
    return at(ordered, (1 - covered) / 2), at(ordered, 1 - (1 - covered) / 2)


def divergence(bins: dict[int, int], edges: np.ndarray, low: float, high: float, levels: int = 255) -> float:
    """KL(P || Q) of a grid of levels + 1 codes from `low` to `high`; see `calibrate/statistics/observed.py`.

    Args:
        bins: bin -> how many values are in it.
        edges: of the bins.
    """
    middles = {place: float(edges[place] + edges[place + 1]) / 2 for place in bins}
    inside = {place: count for place, count in bins.items() if low <= middles[place] <= high}
    if not inside:
        return math.inf
    p = dict(inside)
    p[min(inside)] += sum(count for place, count in bins.items() if middles[place] < low)
    p[max(inside)] += sum(count for place, count in bins.items() if middles[place] > high)
    codes = {place: round((middles[place] - low) / (high - low) * levels) for place in inside}
    mass, width = Counter[int](), Counter[int]()
    for place, count in inside.items():
        mass[codes[place]] += count
        width[codes[place]] += 1
    q = {place: mass[codes[place]] / width[codes[place]] for place in inside}
    all_p, all_q = sum(p.values()), sum(q.values())
    return sum(count / all_p * math.log(count / all_p / (q[place] / all_q)) for place, count in p.items())
