"""One candidate for every unit, the best there is under limits: a multiple-choice knapsack.

    minimise  Σ_u Σ_c goal[u, c] x[u, c]
    subject to  Σ_c x[u, c] = 1 for every unit,  Σ table[u, c] x[u, c] <= limit for every limit,  x in {0, 1}

Solved by HiGHS' branch and bound (scipy.optimize.milp) to a gap of `GAP`. A candidate that a unit does not have is nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Choice = NDArray[np.int64]

# relative; the harms themselves are known to a few per cent
GAP = 1e-5
# how far above a limit rounding may lead
_SLACK = 1e-9


def choose(goal: Table, limits: Sequence[tuple[Table, float]]) -> Choice | None:
    """The candidate of each unit.

    Args:
        goal: [U, C], what to make small; nan where a unit has no such candidate.
        limits: tables [U, C], none negative, with the most that their sums may be.

    Returns:
        [U]; None where no choice keeps to the limits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    units, candidates = goal.shape
    there = ~np.isnan(goal)
    one = np.kron(np.eye(units), np.ones(candidates))
    constraints = [LinearConstraint(csr_array(one), 1, 1)]
    for table, most in limits:
        row, scale = np.where(there, table, 0.0).reshape(1, -1), max(abs(most), 1e-300)
        constraints.append(LinearConstraint(csr_array(row / scale), -np.inf, most / scale * (1 + _SLACK)))
    cost = np.where(there, goal, 0.0).reshape(-1)
    found: Any = milp(
        cost / (np.abs(cost).max() or 1.0),
        constraints=constraints,
        integrality=np.ones(cost.size),
        bounds=Bounds(0, there.reshape(-1).astype(float)),
        options={"mip_rel_gap": GAP},
    )
    if found.x is None:
        return None
    picked: Choice = np.asarray(found.x).reshape(units, candidates).argmax(axis=1)
    return picked


def total(table: Table, choice: Choice) -> float:
    """What a choice sums up to."""
    return float(np.take_along_axis(table, choice[:, None], axis=1).sum())


def least(table: Table) -> Choice:
    """The candidate with the least of each unit."""
    picked: Choice = np.nanargmin(table, axis=1)
    return picked
