"""One block of GGUF by trying: each scale of a fine grid, both signs, the offset in steps. Slow, obviously right."""

from collections.abc import Sequence

import numpy as np


def least_cost(
    weights: Sequence[float],
    costs: Sequence[float],
    values: Sequence[float],
    offset: bool,
    below: bool = False,
    steps: int = 400,
) -> float:
    """The least `sum a (s v + m - w)²` that was found, each weight at its nearest value.

    Args:
        values: what codes stand for, in units of the scale.
        offset: whether there is an m; else it is 0.
        below: whether m is at most 0.
    """
    w, a, v = (np.asarray(each, float) for each in (weights, costs, values))
    reach = np.abs(w).max()
    least = float((a * w * w).sum())
    scales = np.linspace(0.3, 1.5, steps) * (np.ptp(w) if offset else reach) / np.abs(v).max()
    for scale in scales if offset else [*scales, *-scales, *(scales * 2), *(-scales * 2)]:
        shifts = np.linspace(-1.3 * reach, 0.0 if below else 1.3 * reach, 120) if offset else [0.0]
        for shift in shifts:
            error = np.abs(w[:, None] - shift - scale * v[None, :]).min(axis=1)
            least = min(least, float((a * error**2).sum()))
    return least
