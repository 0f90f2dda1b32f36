"""Times over shapes, batches and formats: what a whole model needs first, int4 in all settings before the others.

A cell is a shape, a format and a batch. Its settings are timed alone, then the fastest of them beside the baseline, the
raw twin, torch's own operators, dequantize-then-matmul and peers, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from parts import peers
from parts.sections import RUN
from parts.shapes import (
    FIRST_BATCHES,
    FIRST_SETTINGS,
    INT4,
    OTHER_BATCHES,
    PARTS,
    SWEPT,
    VARIANTS,
    WHOLE_MODEL,
    settings,
)
from quantkit.errors import InputError
from quantkit.kernels.dispatch import OURS, Config, KernelTiming, width
from quantkit.measurement.cuda import sides
from quantkit.measurement.cuda.device import GpuDevice, Implementation, interleaved, of, ratio, summary
from quantkit.measurement.cuda.sides import FormatVariant, known

# what must be reached: seconds over the bound of int4 at M = 1, and of the choice over the baseline at any M
BOUND, BEHIND = 1.6, 1.02
# of the kernel of a whole K at M = 1: times the bound, and seconds beyond
WHOLE_K, WHOLE_K_S = 1.1, 3e-6
# seconds of the kernel over its raw twin's below which decoding counts as hidden
_HIDDEN = 1.05
# sides that nothing can be run by: a part of a step, a bound, and the baseline, of which no copy is kept
_NO_TIMING = {"quantize_tokens", "quantkit raw twin", "torch.linear"}
# names of passes
_INT4_FIRST, _INT4_OTHERS = "whole model in int4", "whole model in int4, other batches"
_FIRST, _SETTINGS, _OTHERS = "whole model", "whole model, all settings", "whole model, other batches"
Shape = tuple[int, int]


@dataclass(frozen=True)
class Pass:
    """Cells that are timed together.

    Args:
        name: for the record.
        shapes, batches, variants: of them.
        settings: how many of each width; None: all.
        peers: other libraries too, of which some compile for minutes.
    """

    name: str
    shapes: Sequence[Shape]
    batches: Sequence[int]
    variants: Sequence[FormatVariant]
    settings: int | None
    peers: bool = False


TINY = Pass("tiny", ((16, 64),), (3,), (known()["int4.g64"], known()["int8.dynamic"]), 1, peers=True)


def passes() -> Iterator[Pass]:
    """In the order in which time runs out: the format that lines of PENDING.md speak of, then the others."""
    swept = VARIANTS[:SWEPT]
    int4 = Pass(_INT4_FIRST, WHOLE_MODEL, FIRST_BATCHES, [each for each in swept if each.name in INT4], None)
    yield int4
    yield replace(int4, name=_INT4_OTHERS, batches=OTHER_BATCHES)
    rest = [each for each in swept if each.name not in INT4]
    first = Pass(_FIRST, WHOLE_MODEL, FIRST_BATCHES, rest, FIRST_SETTINGS)
    yield first
    found = peers.installed()
    if shared := [variant for variant in swept if peers.compared(variant, found)]:
        yield replace(first, name="peers", variants=shared, peers=True)
    yield replace(first, name=_SETTINGS, settings=None)
    yield replace(first, name=_OTHERS, batches=OTHER_BATCHES)
    every = tuple(sorted(FIRST_BATCHES + OTHER_BATCHES))
    yield replace(first, name="parts", shapes=PARTS, batches=every, variants=swept)


def timing_of(data: dict[str, Any]) -> KernelTiming:
    """Of an entry of the section `timings`."""
    known = {each.name for each in fields(KernelTiming)}
    return KernelTiming(**{**{k: v for k, v in data.items() if k in known}, "shape": tuple(data["shape"])})


@dataclass
class Sweep:
    """What is measured, with what is needed for it.

    Args:
        device: that it runs on.
        ceilings: rows of `ceilings.measured`.
        dtype: of activations and of the baseline.
        blocks: of A B B A.
        deadline: `time.monotonic()` after which nothing new begins.
        versions: of packages.
        give: a section of the record and one entry of it: `rows`, `timings`, `configs`, `skipped`.
    """

    device: GpuDevice
    ceilings: list[dict[str, Any]]
    dtype: torch.dtype
    blocks: int
    deadline: float
    versions: dict[str, str]
    give: Callable[[str, Any], None]
    # pass -> share of its cells that were timed
    reached: dict[str, float] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    # shape, variant, width -> seconds by configuration
    _settings: dict[tuple[Shape, str, int], dict[Config, float]] = field(default_factory=dict)
    # shape, variant, batch -> seconds by candidate, its bound, and with which configuration
    _cells: dict[tuple[Shape, str, int], tuple[dict[str, float], float | None, Config]] = field(default_factory=dict)

    def run(self, part: Pass) -> None:
        """Shapes outermost: weights are made once for all batches."""
        done = 0
        for shape in part.shapes:
            self.device.sample(f"{part.name}, {shape[0]}x{shape[1]}")
            for variant in part.variants:
                if self._late({"shape": list(shape), "variant": variant.name, "pass": part.name}):
                    continue
                held = sides.held_copies(variant, shape, self.device)
                for batch in part.batches:
                    where = {"shape": list(shape), "variant": variant.name, "batch": batch}
                    if not self._late(where):
                        self._batch(where, shape, batch, variant, held, part)
                        done += 1
                del held
                _free()
        self.reached[part.name] = done / (len(part.shapes) * len(part.variants) * len(part.batches))

    def tune(self, part: Pass) -> dict[str, list[KernelTiming]]:
        """Time our settings alone, without a baseline; return the fastest of each cell by variant."""
        found: dict[str, list[KernelTiming]] = {}
        for shape, variant in product(part.shapes, part.variants):
            held = sides.held_copies(variant, shape, self.device)
            for batch in part.batches:
                where = {"shape": list(shape), "variant": variant.name, "batch": batch}
                if self._late(where):
                    continue
                x = sides.inputs(batch, shape[1], self.dtype, self.device.torch_device)
                known = self._settings.setdefault((shape, variant.name, width(batch)), {})
                try:
                    config = self._tuned(where, held, x, variant, part.settings, known)
                except Exception as error:
                    self._skip(where, error)
                    continue
                timing = KernelTiming(OURS, shape, batch, known[config], held[0].resident_bytes, config.as_dict())
                found.setdefault(variant.name, []).append(timing)
            del held
            _free()
        return found

    def settled(self) -> list[tuple[str, bool, str]]:
        """(line of PENDING.md, whether it holds, by what), of what was timed: each of all cells that it speaks of."""
        found = []
        int4 = {key: cell for key, cell in self._cells.items() if key[1] in INT4}
        blocks = list(product(WHOLE_MODEL, INT4))
        of_bound = {
            f"{shape[0]}x{shape[1]} {name}": int4[shape, name, 1][0]["quantkit"] / bound
            for shape, name in blocks
            if (shape, name, 1) in int4 and (bound := int4[shape, name, 1][1])
        }
        if len(of_bound) == len(blocks):
            said = ", ".join(f"{name} {times:.2f}" for name, times in of_bound.items())
            found.append(("int4-bound", max(of_bound.values()) <= BOUND, f"M = 1, times the bound: {said}"))
        near = {}
        for (shape, name), bound in ((key, int4[*key, 1][1]) for key in blocks if (*key, 1) in int4):
            timed = self._settings.get((shape, name, width(1)), {})
            if bound and (whole := [seconds for config, seconds in timed.items() if config.whole_k]):
                near[f"{shape[0]}x{shape[1]} {name}"] = (min(whole), WHOLE_K * bound + WHOLE_K_S)
        if len(near) == len(blocks):
            said = ", ".join(
                f"{where} {1e6 * took:.1f} of {1e6 * meant:.1f} us" for where, (took, meant) in near.items()
            )
            found.append(("whole-k", all(took <= meant for took, meant in near.values()), f"M = 1: {said}"))
        behind = {
            key: min(s for name, s in seconds.items() if name in RUN) / seconds["torch.linear"]
            for key, (seconds, *_) in int4.items()
        }
        every = {(*block, batch) for block in blocks for batch in FIRST_BATCHES + OTHER_BATCHES}
        if self._reached(_INT4_FIRST, _INT4_OTHERS) and every <= behind.keys():
            (shape, name, batch), worst = max(behind.items(), key=lambda pair: pair[1])
            said = f"at worst {worst:.3f} of the baseline, {shape[0]}x{shape[1]} {name} at M = {batch}"
            found.append(("int4-never-behind", worst <= BEHIND, said))
        twin = {
            key: s["quantkit"] / s["quantkit raw twin"] for key, (s, *_) in int4.items() if "quantkit raw twin" in s
        }
        if (
            self._reached(_INT4_FIRST)
            and {(*block, batch) for block in blocks for batch in FIRST_BATCHES} <= twin.keys()
        ):
            worst = max(twin.values())
            found.append(("decoding-hidden", worst <= _HIDDEN, f"at worst {worst:.3f} of the raw twin"))
        if self._reached(_INT4_FIRST, _INT4_OTHERS, _FIRST, _OTHERS):
            found.append(("speeds", True, f"{len(self._cells)} cells"))
        if self._reached(_INT4_FIRST, _SETTINGS):
            found.append(("settings", True, "`configs`: every setting of every cell"))
        seen = {name for seconds, *_ in self._cells.values() for name in seconds} & set(peers.PEERS)
        if seen and self._reached("peers"):
            found.append(("peers", True, f"rows of {', '.join(sorted(seen))}; reasons of the others among `skipped`"))
        return found

    def _reached(self, *names: str) -> bool:
        return all(self.reached.get(name) == 1.0 for name in names)

    def _batch(
        self, where: dict[str, Any], shape: Shape, batch: int, variant: FormatVariant, held: Any, part: Pass
    ) -> None:
        """All candidates of one cell, the baseline first."""
        x = sides.inputs(batch, shape[1], self.dtype, self.device.torch_device)
        known = self._settings.setdefault((shape, variant.name, width(batch)), {})
        try:
            config = self._tuned(where, held, x, variant, part.settings, known)
        except Exception as error:
            self._skip(where, error)
            return
        if (cell := self._cells.get((shape, variant.name, batch))) is not None and cell[2] == config and not part.peers:
            return
        asked: list[Any] = [
            lambda: sides.baseline(shape, batch, self.dtype, self.device),
            lambda: sides.ours(held, x, config),
        ]
        if variant.native:
            asked.append(lambda: sides.tokens(variant, x))
        else:
            asked.append(lambda: sides.ours(held, x, config, decode=False))
            asked.append(lambda: sides.expanded(held, x))
        asked.append(lambda: sides.torch_own(variant, held, x))
        others = peers.PEERS if part.peers else ()
        asked += [lambda name=name: peers.side(name, variant, shape, x, self.device) for name in others]
        ready = []
        for make in asked:
            try:
                side = make()
                if self.device.dry:
                    side = replace(side, steps=side.steps[:1])
                ready.append((side, side.ready()))
            except Exception as error:  # a candidate that fails is listed, and the rest goes on
                self._skip(where, error)
        if [side.name for side, _ in ready[:2]] != ["torch.linear", "quantkit"]:
            return
        times = interleaved([sampler for _, sampler in ready], self.blocks, self.generator)
        self._record(shape, batch, variant, config, [side for side, _ in ready], times)

    def _tuned(
        self,
        where: dict[str, Any],
        held: Any,
        x: torch.Tensor,
        variant: FormatVariant,
        most: int | None,
        known: dict[Config, float],
    ) -> Config:
        """The fastest configuration for this width of x; those that were not timed yet are."""
        for config in settings(variant, len(x), dry=self.device.dry)[:most]:
            if config in known:
                continue
            try:
                sampler = sides.ours(held, x, config).ready()
            except Exception as error:
                self._skip(where | {"config": config.as_dict()}, error)
                continue
            if not self.device.dry:
                sampler()
            known[config] = float(np.median([sampler() for _ in range(1 if self.device.dry else 3)]))
            self.give("configs", where | {"config": config.as_dict(), "seconds": known[config]})
        if not known:
            raise RuntimeError("no configuration runs")
        return min(known, key=known.__getitem__)

    def _skip(self, where: dict[str, Any], error: Exception) -> None:
        """Listed with its reason. Raises InputError `gpu-lost` where nothing runs any more in this process."""
        reason = f"{type(error).__name__}: {error}"[:300]
        self.give("skipped", where | {"reason": reason})
        if self.device.torch_device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise InputError("gpu-lost", where=str(where), value=reason, remedy="--only sweep, again") from None

    def _record(
        self,
        shape: tuple[int, int],
        batch: int,
        variant: FormatVariant,
        config: Config,
        made: Sequence[Implementation],
        times: Sequence[Any],
    ) -> None:
        known = {side.name: taken for side, taken in zip(made, times, strict=True)}
        raw = known["quantkit"] if variant.native else known.get("quantkit raw twin")
        middle = {name: float(np.median(taken)) for name, taken in known.items()}
        bound, hp_bound = self._bound(shape, batch, variant), self._bound(shape, batch, None)
        self._cells[shape, variant.name, batch] = (middle, bound, config)
        op = {
            **{"layer": None, "K": shape[1], "N": shape[0], "M": batch, "format": variant.format},
            **{"bound_s": bound, "hp_bound_s": hp_bound, "hp_s": middle["torch.linear"]},
            "raw_s": None if raw is None else float(np.median(raw)),
        }
        for side, taken in zip(made, times, strict=True):
            better, interval = ratio(known["torch.linear"], taken, self.generator)
            how = {"variant": variant.name, "dtype": str(self.dtype), "spaced": side.spaced, **side.settings}
            common = (
                {"schema": 1, "better": "lower", "unit": "s", "stat": "median"}
                | {"subject": f"random {variant.name}", "batch": batch, "op": op, "runtime": side.name}
                | {"settings": how}
                | {"resident_bytes": side.resident_bytes, "device": self.device.identity()}
                | {"versions": self.versions}
            )
            against = {
                **{"subject": "torch.linear", "value": middle["torch.linear"]},
                **{"ratio": better, "ratio_ci95": interval},
            }
            row = common | {"name": "latency.op", **summary(taken, self.generator), "baseline": against}
            self.give("rows", row | {"flags": self._flags(side.name, interval)})
            if side.name in _NO_TIMING:
                continue
            tiles = config.as_dict() if side.name == "quantkit" else None
            timing = KernelTiming(side.name, shape, batch, middle[side.name], side.resident_bytes, tiles)
            self.give("timings", {"variant": variant.name, **asdict(timing)})
        taxes = {
            "tax.total": None if bound is None else middle["quantkit"] - bound,
            "tax.streaming": None if raw is None or bound is None else op["raw_s"] - bound,
            "tax.decode": None if raw is None else middle["quantkit"] - op["raw_s"],
            "tax.activation": middle.get("quantize_tokens"),
        }
        ours = next(side for side in made if side.name == "quantkit")
        for name, value in taxes.items():
            if value is not None:
                self.give(
                    "rows",
                    {**{"schema": 1, "name": name, "value": value, "unit": "s", "stat": "median", "better": "lower"}}
                    | {**{"subject": f"random {variant.name}", "batch": batch, "op": op, "runtime": "quantkit"}}
                    | {"settings": {"variant": variant.name, "dtype": str(self.dtype), **ours.settings}}
                    | {**{"resident_bytes": ours.resident_bytes, "device": self.device.identity()}}
                    | {**{"versions": self.versions, "flags": ["negative"] if value < 0 else []}},
                )

    def _bound(self, shape: tuple[int, int], batch: int, variant: FormatVariant | None) -> float | None:
        """max(bytes / read, operations / compute) with the ceilings of this run; None of the variant: the baseline."""
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        stored, each = 2.0 * shape[0] * shape[1], 2.0
        if variant is not None:
            stored = variant.stored_bytes(*shape)
            kind, each = (variant.format, 1.0) if variant.native else (kind, 2.0)
        read, compute = of(self.ceilings, "ceiling.read"), of(self.ceilings, "ceiling.compute", kind)
        if read is None or compute is None:
            return None
        moved = stored + batch * (each * shape[1] + 2.0 * shape[0])
        return max(moved / read, 2.0 * batch * shape[0] * shape[1] / compute)

    def _flags(self, name: str, interval: Sequence[float] | None) -> list[str]:
        flags = ["dry-run"] if self.device.dry else []
        spans = interval is not None and interval[0] <= 1 <= interval[1]
        return flags + (["interval-spans-1"] if name != "torch.linear" and spans else [])

    def _late(self, where: dict[str, Any]) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.give("skipped", where | {"reason": "the time was up"})
        return True


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
