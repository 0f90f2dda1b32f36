"""The noise of a machine as a model: what a budget of blocks would find on it can be simulated before it is spent.

Steps that follow each other take

    t_i = exp(σ·z_i) · (spike size, with a small chance, else 1) ,   z_i = ρ·z_{i−1} + √(1 − ρ²)·e_i ,  e_i normal ,

log-normal with the coefficient of variation √(exp(σ²) − 1) and the lag-1 correlation ρ of its logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Noise:
    """See the module.

    Args:
        cv: coefficient of variation of a step, spikes aside: 0.01 is 1 %.
        spikes: share of steps that are interrupted.
        size: how many times as long such a step takes.
        lag: correlation of a step's logarithm with that of the one before it.
    """

    cv: float = 0.01
    spikes: float = 0.01
    size: float = 3.0
    lag: float = 0.5

    def night(
        self, generator: np.random.Generator, blocks: int, burst: int = 1, settle: int = 0
    ) -> tuple[Array, Array]:
        """Times [blocks, 2, burst] of two equal sides whose steps take about 1, in the order of `abba.interleave`."""
        steps = blocks * 4 * (burst + settle)
        pushes = generator.normal(size=steps)
        pushes[1:] *= (1 - self.lag**2) ** 0.5
        z = np.empty(steps)
        last = 0.0
        for i, push in enumerate(pushes):
            z[i] = last = self.lag * last + push
        times = np.exp(np.log1p(self.cv**2) ** 0.5 * z)
        times[generator.random(steps) < self.spikes] *= self.size
        visits = times.reshape(blocks, 4, burst + settle)[:, :, settle:]
        swap = (generator.random(blocks) < 0.5)[:, None, None]
        outer, inner = visits[:, [0, 3]], visits[:, [1, 2]]
        return np.where(swap, outer, inner), np.where(swap, inner, outer)
