"""How much slower a candidate is than its baseline, from interleaved times, as evidence for a decision.

Block by block, so that what a machine does to both at that moment cancels:

    d_b      log( the candidate's fastest step in block b / the baseline's fastest step in it )
    effect   median of d_b ;  told as exp(effect) − 1: +0.05 is 5 % slower

What other programs do to a step can only make it longer, so the fastest of a few neighbours is the one that they have
spared most (Chen and Revels, Robust Benchmarking in Noisy Environments, HPEC 2016); on a busy machine it found as many
slowdowns as their median, or several times as many (`benchmarks/nightly_power.py`). It does not see what slows only
some of the steps: ask for `quantile` 0.5 for what slows half of them, and look at the 99th percentiles of `stats.abba`
for less.

What is drawn again is whole groups of blocks (`stats.abba`): the rounds, where there are six or more, else stretches of
neighbouring blocks, since steps that follow each other are alike. In each round both models are best loaded anew, in an
order that is drawn: which was loaded first, and where a load lies in memory, makes a difference that lasts as long as
the load does, and no repetition within it shows that. The margin is the smallest slowdown that anybody cares for, on
the logarithm too, so that the two sides can change places: a candidate more than 2 % slower than its baseline, or a
baseline more than 2 % slower than its candidate.

`ROUNDS` of `BLOCKS` blocks are the default budget: `benchmarks/nightly_power.py` says what they find.

The noise of a machine as a model: what a budget of blocks would find on it can be simulated before it is spent.

Steps that follow each other take

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

# the default budget of a comparison: rounds, ABBA blocks in each, timed steps a visit after one that is not counted
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
    """Tell how much slower the candidate is, from times that `interleave` took.

    Args:
        candidate, baseline: `[blocks, 2, burst]` seconds, in the order in which they were taken.
        rounds: blocks of each round, where they were taken in rounds with something else between them.
        margin: a slowdown of less is nobody's concern: 0.02 is 2 %.
        quantile: of the steps of a block that stands for them: 0 is the fastest, 0.5 the median.

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
    """What two measurements of one side differ by as a share, from what stands for its visits, [blocks, 2].

    As the effect does it, block by block: which visit is the first measurement's is the toss of a coin.
    """
    differences = np.log(visits[:, 0] / visits[:, 1])
    signs = generator.choice((-1.0, 1.0), (_TOSSES, len(visits)))
    return expm1(float(np.quantile(np.abs(np.median(signs * differences, axis=1)), 0.95)))


def _check(times: Array, where: str) -> None:
    """Refuse what is no times [blocks, 2, burst]."""
    if times.ndim != 3 or times.shape[0] < 2 or times.shape[1] != 2 or times.shape[2] < 1:
        raise InputError(
            "times-invalid", where=where, value=f"times of {list(times.shape)}", rule="two blocks [blocks, 2, burst]"
        )
    wrong = np.argwhere(~(np.isfinite(times) & (times > 0)))
    if not len(wrong):
        return
    block, visit, step = (int(i) for i in wrong[0])
    found = float(times[block, visit, step])
    value = f"{found:g} s for step {step} of visit {visit} in block {block} ({len(wrong)} such of {times.size})"
    if found < 0:
        raise InputError(
            "clock-backwards", where=where, value=value, rule="a clock only rises", remedy="use a monotonic one"
        )
    raise InputError(
        "times-invalid", where=where, value=value, rule="times are above zero and finite", remedy="measure again"
    )


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
