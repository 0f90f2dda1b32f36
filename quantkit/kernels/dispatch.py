"""Which kernel multiplies at which batch: the fastest that was measured, within the memory one allows.

Candidates are ours (`weight_only`, `native`), torch's own (`_weight_int4pack_mm`, `_int_mm`, `_scaled_mm`), a peer's,
or dequantize-then-matmul. What they took comes from outside, as plain data; choosing is a pure function of it:

    choice(shape, M) = the candidate of the smallest seconds at M among those that hold no copy in high precision
                       (unless asked otherwise); ties go to fewer resident bytes, then by name

Between two measured batches the choice of the larger one holds: what a kernel does for 17 rows is what it does for a
tile of 32. The table is plain data again, so that a bundle can carry it; and so are the tile sizes to try.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, log
from typing import Any

from quantkit.errors import InputError

FILE = "kernels.json"
# what a layer can run (`kernels.linear`): the format's own kernel, torch's product with an expanded weight, torch's own
# products of 8-bit codes; another library's kernel, of formats that ours lack
OURS, EXPANDED, INT_MM, SCALED_MM = "quantkit", "dequantize_matmul", "torch._int_mm", "torch._scaled_mm"
HUMMING = "humming"
LAYERS = (OURS, EXPANDED, INT_MM, SCALED_MM, HUMMING)


@dataclass(frozen=True)
class Config:
    """Cuts of a kernel's work.

    Args:
        block_n: rows of the weight a program; 16 a warp and fragment.
        block_m: rows of x.
        unroll: tiles of the weight along K a step: 64 columns each of 4 bits, 32 of 8.
        split: programs that share K.
        stages: of the pipeline of asynchronous copies.
    """

    block_n: int
    block_m: int
    unroll: int
    split: int
    warps: int
    stages: int

    def as_dict(self) -> dict[str, int]:
        """Return plain data, for a bundle."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Config:
        """Invert `as_dict`."""
        return cls(**data)


# block_n, block_m, unroll, split, warps, stages; by the number of rows of x. The first of a list is the best alone over
# the four shapes of a block of Llama-3-8B on an H200, each next one what was missed most without it; all of a list are
# within 6 % of the best of seven to ten that were tried (`configs` of benchmarks/results/gpu-run-20261126.json). Their
# counts of instructions for a weight foretold nothing: what counts is how many programs there are, `_PROGRAMS`. None
# spills, for any format (benchmarks/kernel_resources.py). Four warps or eight, so that Hopper multiplies by warpgroups
_WEIGHT_ONLY = {
    16: (
        *((64, 16, 2, 8, 4, 3), (64, 16, 2, 16, 4, 3), (128, 16, 2, 2, 4, 3), (128, 16, 2, 4, 4, 3)),
        *((128, 16, 2, 8, 4, 4), (64, 16, 4, 8, 4, 3), (64, 16, 4, 4, 4, 3)),
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
    """Round a batch up to its width: all of one have the same candidates, and what is the fastest for one is taken."""
    return next((wide for wide in (16, 32, 64, 128) if batch <= wide), PREFILL)


def candidates(batch: int, *, native: bool = False) -> list[Config]:
    """List configurations worth timing at a batch of M = `batch` rows of x, the most promising first.

    Args:
        native: of products of 8-bit codes; `unroll` counts 32 columns there.
    """
    wide = width(batch)
    return [Config(*cut) for cut in (_NATIVE[min(wide, 32)] if native else _WEIGHT_ONLY[wide])]


def unmeasured(rows: int, batch: int, multiprocessors: int, *, native: bool = False) -> Config:
    """Choose where nothing was measured: of the candidates the one with the most usual number of programs.

    Args:
        rows: N of the weight; `batch` is M.
    """
    able, wide = candidates(batch, native=native), width(batch)
    if native or wide not in _PROGRAMS:
        return able[0]
    usual = _PROGRAMS[wide] * multiprocessors

    def off(config: Config) -> float:
        programs = ceil(rows / config.block_n) * ceil(wide / config.block_m) * config.split
        return abs(log(programs / usual))

    return min(able, key=off)


@dataclass(frozen=True)
class KernelTiming:
    """One candidate at one shape and batch.

    Args:
        candidate: its name: `quantkit`, `torch._int_mm`, `dequantize_matmul`, ...
        shape: (N, K) of the weight.
        batch: M, rows of x.
        seconds: median.
        resident_bytes: all that stays in memory between calls: the packed weight, and any copy of it.
        config: of ours: what `Config.as_dict` gives; None of others.
        copy: whether a copy of the weight in high precision stays resident.
    """

    candidate: str
    shape: tuple[int, int]
    batch: int
    seconds: float
    resident_bytes: int
    config: Mapping[str, int] | None = None
    copy: bool = False


@dataclass(frozen=True)
class Choice:
    """What to run up to and including a batch: a candidate, with its tile sizes, what it took and keeps."""

    batch: int
    candidate: str
    config: Mapping[str, int] | None
    seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Table:
    """The choices of a device: (N, K) -> by rising batch."""

    choices: Mapping[tuple[int, int], Sequence[Choice]]

    def choose(self, shape: tuple[int, int], batch: int) -> Choice:
        """Return the choice for M = `batch`: that of the next batch that was measured; beyond the largest, its choice.

        Raises:
            InputError: `shape-unmeasured`, `batch-invalid`.
        """
        if batch < 1:
            raise InputError("batch-invalid", value=f"a batch of {batch}", rule="a batch is 1 or more")
        if shape not in self.choices:
            raise InputError(
                "shape-unmeasured",
                value=f"N {shape[0]}, K {shape[1]}",
                rule="a kernel is chosen from what was measured on the device",
                remedy=f"measured: {', '.join(f'{n}x{k}' for n, k in sorted(self.choices)) or 'none'}",
            )
        known = self.choices[shape]
        place = bisect_left([choice.batch for choice in known], batch)
        return known[min(place, len(known) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for a bundle: `{"schema": 1, "choices": [{"N", "K", "by_batch": [...]}]}`."""
        shapes = [
            {"N": n, "K": k, "by_batch": [asdict(choice) for choice in choices]}
            for (n, k), choices in sorted(self.choices.items())
        ]
        return {"schema": 1, "choices": shapes}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Table:
        """Invert `as_dict`. Raises InputError `dispatch-invalid`."""
        try:
            if data["schema"] != 1:
                raise KeyError("schema 1")
            shapes = {(s["N"], s["K"]): tuple(Choice(**choice) for choice in s["by_batch"]) for s in data["choices"]}
        except (KeyError, TypeError) as error:
            rule = "a table as `Table.as_dict` writes it"
            raise InputError("dispatch-invalid", value=str(error), rule=rule, remedy="measure again") from None
        return cls(shapes)


def fastest(timings: Iterable[KernelTiming], *, copies: bool = False) -> Table:
    """Choose the fastest candidate for every shape and batch measured.

    Args:
        timings: any number for each shape and batch; those without a finite time above zero are passed over.
        copies: whether candidates may keep a copy of the weight in high precision.

    Raises:
        InputError: `nothing-measured`: a shape and batch of which nothing may be chosen.
    """
    groups: dict[tuple[tuple[int, int], int], list[KernelTiming]] = {}
    for timing in timings:
        able = groups.setdefault((timing.shape, timing.batch), [])
        if 0 < timing.seconds < float("inf") and (copies or not timing.copy):
            able.append(timing)
    choices: dict[tuple[int, int], list[Choice]] = {}
    for (shape, batch), able in sorted(groups.items()):
        if not able:
            raise InputError(
                "nothing-measured",
                value=f"N {shape[0]}, K {shape[1]}, batch {batch}",
                rule="a time of at least one candidate without a copy in high precision",
                remedy="measure dequantize_matmul: it always runs",
            )
        best = min(able, key=lambda t: (t.seconds, t.resident_bytes, t.candidate))
        choice = Choice(batch, best.candidate, best.config, best.seconds, best.resident_bytes)
        choices.setdefault(shape, []).append(choice)
    return Table({shape: tuple(by_batch) for shape, by_batch in choices.items()})


@dataclass(frozen=True)
class Recorded:
    """The choices that were measured on a device, as a bundle carries them: `kernels.json`.

        {"schema": 1, "device": {"id", "kind", "name"}, "versions": {"torch", "triton", ...},
         "variant": "int4.g64.zeros", "table": what `Table.as_dict` gives}

    They hold for the device alone: tile sizes that are the fastest on one card spill or starve on another. `device` is
    as in rows of measurements, `variant` the format that was timed.
    """

    device: Mapping[str, str]
    versions: Mapping[str, str]
    variant: str
    table: Table

    def as_bytes(self) -> bytes:
        """Write the file."""
        data = {"schema": 1, "device": dict(self.device), "versions": dict(self.versions), "variant": self.variant}
        return (json.dumps({**data, "table": self.table.as_dict()}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def of(cls, data: bytes) -> Recorded:
        """Invert `as_bytes`. Raises InputError `dispatch-invalid`."""
        try:
            file = json.loads(data)
            if file["schema"] != 1:
                raise KeyError("schema 1")
            return cls(file["device"], file["versions"], file["variant"], Table.of(file["table"]))
        except (ValueError, KeyError, TypeError) as error:
            rule, remedy = "a file as `quantkit tax BUNDLE --device cuda` writes it", "run that again"
            raise InputError("dispatch-invalid", FILE, str(error), rule, remedy) from None
