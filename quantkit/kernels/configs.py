"""Tile sizes to try, as plain data; the fastest on a device is found by measuring, `dispatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, log
from typing import Any


@dataclass(frozen=True)
class Config:
    """How a kernel cuts its work.

    Args:
        block_n: rows of the weight a program; 16 a warp and fragment.
        block_m: rows of x.
        unroll: tiles of the weight along K a step: 64 columns each of 4 bits, 32 of 8.
        split: programs that share K.
        warps: of 32 threads.
        stages: of the pipeline of asynchronous copies.
    """

    block_n: int
    block_m: int
    unroll: int
    split: int
    warps: int
    stages: int

    def as_dict(self) -> dict[str, int]:
        """Plain data, for a bundle."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `as_dict`."""
        return cls(**data)


# block_n, block_m, unroll, split, warps, stages; by the number of rows of x. The first of a list is the best alone over
# the four shapes of a block of Llama-3-8B on an H200, each next one what was missed most without it; all of a list are
# within 6 % of the best of seven to ten that were tried (`configs` of benchmarks/results/gpu-run-20261126.json). Their
# counts of instructions for a weight foretold nothing: what counts is how many programs there are, `_PROGRAMS`. None
# spills, for any format (benchmarks/kernel_resources.py). Four warps or eight, so that Hopper multiplies by warpgroups
_WEIGHT_ONLY = {
    16: (
        (64, 16, 2, 8, 4, 3),
        (64, 16, 2, 16, 4, 3),
        (128, 16, 2, 2, 4, 3),
        (128, 16, 2, 4, 4, 3),
        (128, 16, 2, 8, 4, 4),
        (64, 16, 4, 8, 4, 3),
        (64, 16, 4, 4, 4, 3),
    ),
    32: ((64, 32, 4, 4, 4, 3), (128, 32, 2, 4, 4, 3), (64, 32, 4, 8, 4, 3), (64, 32, 4, 2, 4, 3)),
    64: ((64, 64, 4, 4, 4, 3), (128, 64, 2, 1, 8, 4), (64, 64, 4, 2, 4, 3)),
    128: ((256, 64, 2, 4, 8, 3), (128, 128, 2, 1, 8, 3), (256, 64, 2, 2, 8, 3)),
}
# the width of all batches beyond 128: no split, and a scale product a group of 128, not one for every 64 columns
PREFILL = 256
_WEIGHT_ONLY[PREFILL] = ((128, 128, 2, 1, 8, 4), (128, 128, 2, 1, 8, 3), (256, 64, 2, 1, 8, 3))
# by width: programs for each multiprocessor of those that were the fastest there
_PROGRAMS = {16: 7.0, 32: 2.5, 64: 1.7, 128: 1.0}
# products of 8-bit codes: beyond 32 rows torch multiplies (`rows`), or this as it can
_NATIVE = {
    16: ((128, 16, 8, 4, 4, 3), (128, 16, 4, 8, 4, 4), (64, 16, 8, 4, 4, 4), (64, 16, 4, 8, 4, 4)),
    32: ((128, 32, 8, 4, 4, 3), (128, 32, 4, 8, 4, 4), (64, 32, 8, 4, 4, 4), (64, 32, 4, 8, 4, 4)),
}


def width(batch: int) -> int:
    """Batches of one width have the same candidates, and what is the fastest for one is taken for all of them."""
    return next((wide for wide in (16, 32, 64, 128) if batch <= wide), PREFILL)


def candidates(batch: int, *, native: bool = False) -> list[Config]:
    """Configurations worth timing at a batch of M = `batch` rows of x, the most promising first.

    Args:
        batch: M.
        native: of products of 8-bit codes; `unroll` counts 32 columns there.
    """
    wide = width(batch)
    return [Config(*cut) for cut in (_NATIVE[min(wide, 32)] if native else _WEIGHT_ONLY[wide])]


def unmeasured(rows: int, batch: int, multiprocessors: int, *, native: bool = False) -> Config:
    """What to run where nothing was measured: of the candidates the one with the most usual number of programs.

    Args:
        rows: N of the weight.
        batch: M, rows of x.
        multiprocessors: of the device.
        native: see `candidates`.
    """
    able, wide = candidates(batch, native=native), width(batch)
    if native or wide not in _PROGRAMS:
        return able[0]
    usual = _PROGRAMS[wide] * multiprocessors

    def off(config: Config) -> float:
        programs = ceil(rows / config.block_n) * ceil(wide / config.block_m) * config.split
        return abs(log(programs / usual))

    return min(able, key=off)
