"""Estimate how much slower a candidate is than its baseline, from interleaved times, as evidence for a decision.

The comparison goes block by block, so that a machine's effect on both at that moment cancels:

    d_b      log( the candidate's fastest step in block b / the baseline's fastest step in it )
    effect   median of d_b ;  shown as exp(effect) − 1: +0.05 is 5 % slower

Other programs can only make a step longer, so the fastest of a few neighbours is the least disturbed (Chen and Revels,
Robust Benchmarking in Noisy Environments, HPEC 2016). On a busy machine it found as many slowdowns as their median, or
several times as many (`benchmarks/nightly_power.py`). It misses a slowdown of only some steps: use `quantile` 0.5 for
one that affects half of them, and look at the 99th percentiles of `stats.abba` for rarer ones.

The bootstrap draws whole groups of blocks (`stats.abba`): the rounds, if there are six or more, else stretches of
neighbouring blocks, since consecutive steps are alike. In each round both models are best loaded anew, in a random
order: the order of loading, and a load's place in memory, make a difference that lasts as long as the load, and no
repetition within it shows that. The margin is the smallest slowdown that matters, on the logarithm too, so that the two
sides can change places: a candidate more than 2 % slower than its baseline, or a baseline more than 2 % slower than its
candidate.

`ROUNDS` of `BLOCKS` blocks are the default budget; `benchmarks/nightly_power.py` shows its power.

`Noise` models the noise of a machine, to simulate a budget of blocks before it is spent. Consecutive steps take

    t_i = exp(σ·z_i) · (spike size, with a small chance, else 1) ,   z_i = ρ·z_{i−1} + √(1 − ρ²)·e_i ,  e_i normal ,

log-normal with the coefficient of variation √(exp(σ²) − 1) and the lag-1 correlation ρ of its logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.stats.abba import resampled_groups
from quantkit.stats.evidence import Resampled, is_hidden

Array = NDArray[Any]

# default budget of a comparison: rounds, ABBA blocks in each, timed steps a visit, untimed steps before them
ROUNDS, BLOCKS, BURST, SETTLE = 10, 4, 2, 1
MARGIN = 0.02
_TOSSES = 400


def slowdown(
    candidate: Array,
    baseline: Array,
    *,
    rounds: Sequence[int] = (),
    margin: float = MARGIN,
    quantile: float = 0.0,
    where: str = "",
    resamples: int = 1999,
    seed: int = 0,
) -> Resampled:
    """Estimate how much slower the candidate is, from times of `interleave`.

    Args:
        candidate, baseline: `[blocks, 2, burst]` seconds, in the order of measurement.
        rounds: blocks of each round, if something else ran between rounds.
        margin: smallest slowdown that matters: 0.02 is 2 %.
        quantile: quantile that stands for the steps of a block: 0 is the fastest, 0.5 the median.

    Raises InputError: `times-invalid`, a time that is NaN, infinite or zero, too few blocks, sides that do not pair;
    `clock-backwards`, a time below zero; MissingDependency: scipy.
    """
    sides = {"candidate": np.asarray(candidate, np.float64), "baseline": np.asarray(baseline, np.float64)}
    for side, times in sides.items():
        _check(times, f"{where}, {side}" if where else side)
    if sides["candidate"].shape != sides["baseline"].shape:
        shapes = " and ".join(str(list(times.shape)) for times in sides.values())
        raise InputError("times-invalid", where=where, value=f"sides of {shapes}", rule="both have the same blocks")
    if rounds and sum(rounds) != len(sides["baseline"]):
        value = f"rounds of {sum(rounds)} blocks in all, of {len(sides['baseline'])}"
        raise InputError("times-invalid", where=where, value=value, rule="every block belongs to a round")
    above, below = (np.log(np.quantile(times, quantile, axis=(1, 2))) for times in sides.values())
    groups = resampled_groups(len(above), rounds)
    ratios = (above - below)[groups]
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(groups), (resamples, len(groups)))
    spread = max(_aa_spread(np.quantile(times, quantile, axis=2), generator) for times in sides.values())
    effect = float(np.median(ratios))
    return Resampled(
        effect=effect,
        draws=np.median(ratios[drawn].reshape(resamples, -1), axis=1),
        groups=len(groups),
        alarm=log1p(margin),
        margin=log1p(margin),
        logarithm=True,
        doubt="noise" if is_hidden(effect, spread) else "",
    )


def _aa_spread(visits: Array, generator: np.random.Generator) -> float:
    """Return the A/A spread of one side from a value for each of its visits, [blocks, 2].

    Block by block, as for the effect: a coin decides which visit belongs to the first measurement.
    """
    differences = np.log(visits[:, 0] / visits[:, 1])
    signs = generator.choice((-1.0, 1.0), (_TOSSES, len(visits)))
    return expm1(float(np.quantile(np.abs(np.median(signs * differences, axis=1)), 0.95)))


def _check(times: Array, where: str) -> None:
    """Refuse times of a shape other than [blocks, 2, burst]."""
    if times.ndim != 3 or times.shape[0] < 2 or times.shape[1] != 2 or times.shape[2] < 1:
        raise InputError(
            "times-invalid", where=where, value=f"times of {list(times.shape)}", rule="two blocks [blocks, 2, burst]"
        )
    wrong = np.argwhere(~(np.isfinite(times) & (times > 0)))
    if not len(wrong):
        return
    block, visit, step = (int(i) for i in wrong[0])
    bad = float(times[block, visit, step])
    value = f"{bad:g} s for step {step} of visit {visit} in block {block} ({len(wrong)} such of {times.size})"
    if bad < 0:
        raise InputError(
            "clock-backwards", where=where, value=value, rule="a clock only rises", remedy="use a monotonic one"
        )
    raise InputError(
        "times-invalid", where=where, value=value, rule="times are above zero and finite", remedy="measure again"
    )


@dataclass(frozen=True)
class Noise:
    """Noise of a machine; the module has the model.

    Args:
        cv: coefficient of variation of a step, without spikes: 0.01 is 1 %.
        spikes: share of interrupted steps.
        size: factor on the time of an interrupted step.
        lag: correlation between the logarithms of consecutive steps.
    """

    cv: float = 0.01
    spikes: float = 0.01
    size: float = 3.0
    lag: float = 0.5

    def night(
        self, generator: np.random.Generator, blocks: int, burst: int = 1, settle: int = 0
    ) -> tuple[Array, Array]:
        """Draw times [blocks, 2, burst] of two equal sides whose steps take about 1, in the order of `interleave`."""
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
