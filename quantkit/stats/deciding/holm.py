"""Many tests at once: p-values adjusted so that a night with a hundred cells is not a hundred chances of an alarm.

The m p-values in rising order, p₁ ≤ … ≤ p_m, become

    adjusted p_i = max over j ≤ i of min(1, (m − j + 1) · p_j) .

Whatever is called at adjusted p ≤ α, the chance of even one false call among all m is at most α, however the tests
depend on each other. Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of
Statistics 6 (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def holm(p: Sequence[float] | Array) -> Array:
    """Adjusted p-values [m], in the order given: `holm([0.01, 0.04, 0.03])` is [0.03, 0.06, 0.06].

    Raises:
        ValueError: one is not within 0 and 1.
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError("p-values [m] lie within 0 and 1")
    order = np.argsort(values, kind="stable")
    rising = np.maximum.accumulate(np.minimum(1.0, values[order] * np.arange(values.size, 0, -1)))
    adjusted = np.empty_like(rising)
    adjusted[order] = rising
    return adjusted
