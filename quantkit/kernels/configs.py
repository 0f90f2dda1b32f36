"""Tile sizes to try, as plain data; the fastest on a device is found by measuring, `dispatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


# block_n, unroll, split, warps, stages; four warps or eight, so that Hopper multiplies by warpgroups. None spills
# there, for any format (benchmarks/kernel_resources.py)
_DECODE = (
    (64, 2, 2, 4, 4),
    (64, 4, 4, 4, 3),
    (128, 2, 4, 4, 4),
    (128, 2, 8, 4, 4),
    (128, 2, 4, 8, 4),
    (256, 2, 8, 8, 3),
)
_WIDE_64 = ((64, 2, 2, 4, 4), (128, 2, 2, 8, 4), (128, 2, 4, 8, 3))
_WIDE_128 = ((128, 1, 1, 8, 4), (128, 1, 2, 8, 4), (128, 1, 4, 8, 4))
# the width of all batches beyond 128
PREFILL = 256
# block_n, block_m, unroll, warps, stages
_PREFILL = ((128, 64, 2, 8, 3), (128, 128, 1, 8, 4), (128, 128, 1, 8, 3), (256, 64, 1, 8, 3))


def width(batch: int) -> int:
    """Batches of one width have the same candidates, and what is the fastest for one is taken for all of them."""
    return next((wide for wide in (16, 32, 64, 128) if batch <= wide), PREFILL)


def candidates(batch: int) -> list[Config]:
    """Configurations worth timing at a batch of M = `batch` rows of x: K is split up to 128, and prefill beyond."""
    wide = width(batch)
    if wide == PREFILL:
        return [Config(n, m, unroll, 1, warps, stages) for n, m, unroll, warps, stages in _PREFILL]
    cuts = _WIDE_128 if wide == 128 else _WIDE_64 if wide == 64 else _DECODE
    return [Config(n, wide, unroll, split, warps, stages) for n, unroll, split, warps, stages in cuts]
