"""Choice of a layer's packing, and of the kernel for each batch, from measured times.

Candidates are our kernels (`weight_only`, `native`), torch's own (`_weight_int4pack_mm`, `_int_mm`, `_scaled_mm`),
dequantize-then-matmul, or humming's kernel. Timings come as plain data, and the choice is a pure function of them:

    t(packing, M)  = smallest seconds at M of the packing's candidates; ties go to fewer resident bytes, then by name
    packing(shape) = the one with the smallest sum over M of traffic(M) t(packing, M)

A weight is packed once, for our kernels, torch's product of slabs and torch's product of 8-bit codes, or for humming.
Between two measured batches the choice of the larger one holds: a kernel computes 17 rows as a tile of 32. The table
and the tile sizes to try are plain data too, so that a bundle can carry them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import ceil, log
from pathlib import Path
from typing import Any

from quantkit import limits, machine
from quantkit.errors import InputError

FILE = "kernels.json"
# ways for a layer to multiply (`kernels.linear`): the format's own kernel, torch's product with expanded slabs of the
# weight, torch's products of 8-bit codes; another library's kernel, which has a packing of its own
OURS, EXPANDED, INT_MM, SCALED_MM = "quantkit", "dequantize_matmul", "torch._int_mm", "torch._scaled_mm"
HUMMING = "humming"
LAYERS = (OURS, EXPANDED, INT_MM, SCALED_MM, HUMMING)
# ending of a variant's name in humming's packing, where our kernels have the format too
OTHER_PACKING = f".{HUMMING}"
# packages that the fastest kernel depends on
_PACKAGES = ("torch", "triton", "humming-kernels")


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of a kernel.

    Args:
        block_n: rows of the weight per program; 16 per warp and fragment.
        block_m: rows of x per program.
        unroll: tiles of the weight along K per step: 64 columns each for 4 bits, 32 for 8.
        split: programs that share K.
        warps: warps per program.
        stages: depth of the pipeline of asynchronous copies; 0 for the kernel of a whole K (`decode`), which has none.
            There `warps` share K: `unroll` counts the tiles of a warp, and `split` is 1.
    """

    block_n: int
    block_m: int
    unroll: int
    split: int
    warps: int
    stages: int

    @property
    def whole_k(self) -> bool:
        """True for the kernel of decode steps, with the whole K in one program."""
        return self.stages == 0

    def as_dict(self) -> dict[str, int]:
        """Return plain data, for a bundle."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Config:
        """Invert `as_dict`."""
        return cls(**data)


# block_n, block_m, unroll, split, warps, stages; by the number of rows of x. The first of a list is the best single
# choice over the four shapes of a block of Llama-3-8B on an H200, or within 1 % of it; each next one adds the largest
# gain. All of a list are within 6 % of the best of seven to ten that were tried (`configs` of
# benchmarks/results/gpu-run-20261126.json), at 16 rows within 9 %: K split over 16 programs was up to that much faster,
# and is left to the kernel of a whole K (docs/decisions/tax-on-a-gpu.md).
# Instruction counts per weight do not predict the time; the number of programs does (`_PROGRAMS`). None spills, for any
# format (benchmarks/kernel_resources.py). Four or eight warps, so that Hopper multiplies by warpgroups
_WEIGHT_ONLY = {
    16: (
        *((64, 16, 4, 8, 4, 3), (64, 16, 2, 8, 4, 3), (128, 16, 2, 2, 4, 3), (128, 16, 2, 4, 4, 3)),
        *((128, 16, 2, 8, 4, 4), (64, 16, 4, 4, 4, 3)),
    ),
    32: ((64, 32, 4, 4, 4, 3), (128, 32, 2, 4, 4, 3), (64, 32, 4, 8, 4, 3), (64, 32, 4, 2, 4, 3)),
    64: ((64, 64, 4, 4, 4, 3), (128, 64, 2, 1, 8, 4), (64, 64, 4, 2, 4, 3)),
    128: ((256, 64, 2, 4, 8, 3), (128, 128, 2, 1, 8, 3), (256, 64, 2, 2, 8, 3)),
}
# decode steps: the whole K in one program (`decode`). No GPU has timed these yet. Each width has tiles that keep 32 KiB
# of words in flight in a multiprocessor, for every format (benchmarks/kernel_resources.py --all); above 16 rows of x by
# reading words once for every 16. None spills, and all have whole steps in the shapes of Llama-3-8B's block
_WHOLE_K = {
    8: ((16, 8, 4, 1, 8, 0), (16, 8, 2, 1, 8, 0), (32, 8, 2, 1, 4, 0)),
    16: ((16, 16, 8, 1, 4, 0), (32, 16, 4, 1, 4, 0), (16, 16, 4, 1, 8, 0)),
    32: ((32, 16, 4, 1, 4, 0), (16, 16, 8, 1, 4, 0), (32, 32, 2, 1, 4, 0)),
}
# width of all batches above 128: no split, and one scale product per group of 128, not one per 64 columns
PREFILL = 256
_WEIGHT_ONLY[PREFILL] = ((128, 128, 2, 1, 8, 4), (128, 128, 2, 1, 8, 3), (256, 64, 2, 1, 8, 3))
# width -> programs per multiprocessor of the fastest configurations
_PROGRAMS = {8: 3.5, 16: 3.5, 32: 2.5, 64: 1.7, 128: 1.0}
# products of 8-bit codes; above 32 rows torch multiplies, and these only if it cannot
_NATIVE = {
    16: ((128, 16, 8, 4, 4, 3), (128, 16, 4, 8, 4, 4), (64, 16, 8, 4, 4, 4), (64, 16, 4, 8, 4, 4)),
    32: ((128, 32, 8, 4, 4, 3), (128, 32, 4, 8, 4, 4), (64, 32, 8, 4, 4, 4), (64, 32, 4, 8, 4, 4)),
}


def width(batch: int) -> int:
    """Round a batch up to its width; batches of one width share their candidates and their choice."""
    return next((wide for wide in (8, 16, 32, 64, 128) if batch <= wide), PREFILL)


def candidates(batch: int, *, native: bool = False) -> list[Config]:
    """List the configurations to time for M = `batch` rows of x, the most promising first; a whole K's second.

    Args:
        batch: M.
        native: True for products of 8-bit codes, where `unroll` counts 32 columns.
    """
    wide = width(batch)
    if native:
        return [Config(*cut) for cut in _NATIVE[min(max(wide, 16), 32)]]
    split, whole = _WEIGHT_ONLY[max(wide, 16)], _WHOLE_K.get(wide, ())
    return [Config(*cut) for cut in (*split[:1], *whole, *split[1:])]


def unmeasured(rows: int, batch: int, multiprocessors: int, *, native: bool = False) -> Config:
    """Choose a configuration without timings: the candidate whose number of programs is closest to the usual one.

    The kernel of a whole K is left out: it is chosen by a time.

    Args:
        rows: N of the weight.
        batch: M.
        multiprocessors: multiprocessors of the device.
        native: True for products of 8-bit codes.
    """
    able, wide = [config for config in candidates(batch, native=native) if not config.whole_k], width(batch)
    if native or wide not in _PROGRAMS:
        return able[0]
    usual = _PROGRAMS[wide] * multiprocessors

    def off(config: Config) -> float:
        programs = ceil(rows / config.block_n) * ceil(wide / config.block_m) * config.split
        return abs(log(programs / usual))

    return min(able, key=off)


@dataclass(frozen=True)
class KernelTiming:
    """Timing of one candidate at one shape and batch.

    Args:
        candidate: name: `quantkit`, `torch._int_mm`, `dequantize_matmul`, ...
        shape: (N, K) of the weight.
        batch: M, rows of x.
        seconds: median time.
        resident_bytes: bytes that stay in memory between calls: the packed weight, and any copy of it.
        config: `Config.as_dict` for our kernels, else None.
    """

    candidate: str
    shape: tuple[int, int]
    batch: int
    seconds: float
    resident_bytes: int
    config: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Choice:
    """Kernel for batches up to and including one.

    Args:
        batch: largest batch.
        candidate: name of the candidate.
        config: its tile sizes, for our kernels.
        seconds: its median time.
        resident_bytes: bytes that it keeps in memory.
    """

    batch: int
    candidate: str
    config: Mapping[str, int] | None
    seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Table:
    """Choices of a device.

    Args:
        choices: (N, K) -> choices by rising batch.
    """

    choices: Mapping[tuple[int, int], Sequence[Choice]]

    def choose(self, shape: tuple[int, int], batch: int) -> Choice:
        """Return the choice for M = `batch`: that of the next measured batch; above the largest, the last.

        Raises:
            InputError: `shape-unmeasured`, `batch-invalid`.
        """
        if batch < 1:
            raise InputError("batch-invalid", value=f"a batch of {batch}", rule="a batch is 1 or more")
        if shape not in self.choices:
            raise InputError(
                "shape-unmeasured",
                value=f"N {shape[0]}, K {shape[1]}",
                rule="a kernel is chosen from timings on the device",
                remedy=f"measured: {', '.join(f'{n}x{k}' for n, k in sorted(self.choices)) or 'none'}",
            )
        known = self.choices[shape]
        place = bisect_left([choice.batch for choice in known], batch)
        return known[min(place, len(known) - 1)]

    def seconds(self, traffic: Mapping[int, float]) -> float:
        """Return the sum over all shapes and M of traffic(M) t(M)."""
        return sum(
            weight * self.choose(shape, batch).seconds for shape in self.choices for batch, weight in traffic.items()
        )

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


def fastest(timings: Iterable[KernelTiming], *, traffic: Mapping[int, float] | None = None) -> Table:
    """Choose the packing of every measured shape, and its fastest candidate at every measured batch.

    A packing without a time at some batch of a shape is not chosen there.

    Args:
        timings: timings, any number for each shape and batch; those without a finite time above zero are skipped.
        traffic: M -> weight of a product with M rows; None: all measured batches weigh the same.

    Raises:
        InputError: `nothing-measured` if no packing has a candidate at every batch of a shape.
    """
    batches: dict[tuple[int, int], set[int]] = {}
    able: dict[tuple[tuple[int, int], bool, int], list[KernelTiming]] = {}
    for timing in timings:
        batches.setdefault(timing.shape, set()).add(timing.batch)
        if 0 < timing.seconds < float("inf"):
            able.setdefault((timing.shape, timing.candidate == HUMMING, timing.batch), []).append(timing)
    choices: dict[tuple[int, int], Sequence[Choice]] = {}
    for shape, measured in sorted(batches.items()):
        packings = [[able.get((shape, other, batch), []) for batch in sorted(measured)] for other in (False, True)]
        complete = [_by_batch(packing) for packing in packings if all(packing)]
        if not complete:
            value = f"N {shape[0]}, K {shape[1]}, batches {', '.join(map(str, sorted(measured)))}"
            rule, remedy = "one packing needs a time at each", f"measure {EXPANDED}: it always runs"
            raise InputError("nothing-measured", value=value, rule=rule, remedy=remedy)
        weights = traffic or dict.fromkeys(measured, 1.0)
        choices[shape] = min(complete, key=lambda own: Table({shape: own}).seconds(weights))
    return Table(choices)


def _by_batch(packing: Iterable[list[KernelTiming]]) -> tuple[Choice, ...]:
    best = [min(able, key=lambda t: (t.seconds, t.resident_bytes, t.candidate)) for able in packing]
    return tuple(Choice(t.batch, t.candidate, t.config, t.seconds, t.resident_bytes) for t in best)


@cache
def versions() -> dict[str, str]:
    """Return versions of packages, "absent" without one, and a hash of the kernels' sources: the fastest kernel depends
    on them.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(limits.read(path))
    installed = {name: machine.installed(name) or "absent" for name in _PACKAGES}
    return {**installed, "kernels": sources.hexdigest()[:12]}


@dataclass(frozen=True)
class Recorded:
    """Choices measured on a device, as a bundle carries them in `kernels.json`.

        {"schema": 1, "device": {"id", "kind", "name"}, "versions": {"torch", "triton", "kernels", ...},
         "variant": "int4.g64.zeros", "traffic": {"1": 0.5, ...}, "table": the result of `Table.as_dict`}

    They hold for this device and these versions alone: the fastest tile sizes of one card, or of one compiler, may
    spill or starve on another.

    Args:
        device: device, as in rows of measurements.
        versions: library -> version; `kernels`: see `versions`.
        variant: format that was timed.
        table: the choices.
        traffic: M -> weight by which packings were chosen; empty in files that chose among kernels of one packing.
    """

    device: Mapping[str, str]
    versions: Mapping[str, str]
    variant: str
    table: Table
    traffic: Mapping[int, float] = field(default_factory=dict)

    def unlike(self, device: str) -> str:
        """Return the reason against using them here, with a remedy; "" if there is none.

        Args:
            device: name of the device here.
        """
        pairs = [("device", str(self.device.get("name")), device)]
        pairs += [(name, self.versions.get(name, ""), here) for name, here in versions().items()]
        for name, then, here in pairs:
            if then != here:
                was = f"on {then}" if name == "device" else f"with {name} {then or 'of unknown version'}"
                again = "`quantkit tax BUNDLE --device cuda` measures again"
                return f"{FILE} was measured {was}, and here is {here}: it is not used; {again}"
        return ""

    def as_bytes(self) -> bytes:
        """Return the file's contents."""
        data = {"schema": 1, "device": dict(self.device), "versions": dict(self.versions), "variant": self.variant}
        data["traffic"] = {str(batch): weight for batch, weight in self.traffic.items()}
        return (json.dumps({**data, "table": self.table.as_dict()}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def of(cls, data: bytes) -> Recorded:
        """Invert `as_bytes`. Raises InputError `dispatch-invalid`."""
        try:
            file = json.loads(data)
            if file["schema"] != 1:
                raise KeyError("schema 1")
            traffic = {int(batch): float(weight) for batch, weight in file.get("traffic", {}).items()}
            return cls(file["device"], file["versions"], file["variant"], Table.of(file["table"]), traffic)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            rule, remedy = "a file as `quantkit tax BUNDLE --device cuda` writes it", "run that again"
            raise InputError("dispatch-invalid", FILE, str(error), rule, remedy) from None
