"""Times over shapes, batches and formats: configurations first, then all candidates side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from parts import peers
from quantkit.kernels.configs import Config, candidates, width
from quantkit.kernels.dispatch import KernelTiming
from quantkit.kernels.workspace import Workspace
from quantkit.measurement.cuda import sides
from quantkit.measurement.cuda.ceilings import of
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.cuda.timing import Implementation, interleaved, ratio, summary
from quantkit.measurement.cuda.weights import FormatVariant


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
    """

    device: GpuDevice
    ceilings: list[dict[str, Any]]
    dtype: torch.dtype
    blocks: int
    deadline: float
    versions: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, list[KernelTiming]] = field(default_factory=dict)
    configs: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, shapes: Sequence[tuple[int, int]], batches: Sequence[int], variants: Sequence[FormatVariant]) -> None:
        """Shapes outermost: weights are made once for all batches."""
        for shape in shapes:
            self.device.sample(f"{shape[0]}x{shape[1]}")
            for variant in variants:
                if self._late({"shape": list(shape), "variant": variant.name}):
                    continue
                held = sides.held_copies(variant, shape, self.device)
                best: dict[int, Config] = {}
                for batch in batches:
                    where = {"shape": list(shape), "variant": variant.name, "batch": batch}
                    if not self._late(where):
                        self._batch(where, shape, batch, variant, held, best)
                del held
                _free()

    def _batch(
        self,
        where: dict[str, Any],
        shape: tuple[int, int],
        batch: int,
        variant: FormatVariant,
        held: Any,
        best: dict[int, Config],
    ) -> None:
        """All candidates of one cell, the baseline first."""
        x = sides.inputs(batch, shape[1], self.dtype, self.device.torch_device)
        memory = Workspace()
        wide = width(batch)
        try:
            if wide not in best:
                best[wide] = self._tuned(where, held, x, memory)
        except Exception as error:
            self.skipped.append(where | {"reason": f"{type(error).__name__}: {error}"[:300]})
            return
        config = best[wide]
        asked: list[Any] = [
            lambda: sides.baseline(shape, batch, self.dtype, self.device),
            lambda: sides.ours(held, x, config, memory),
        ]
        if variant.native:
            asked.append(lambda: sides.tokens(variant, x))
        else:
            asked.append(lambda: sides.ours(held, x, config, memory, decode=False))
            asked.append(lambda: sides.expanded(held, x))
        asked.append(lambda: sides.torch_own(variant, held, x))
        asked += [lambda name=name: peers.side(name, variant, shape, x, self.device) for name in peers.PEERS]
        ready = []
        for make in asked:
            try:
                side = make()
                ready.append((side, side.ready()))
            except Exception as error:  # a candidate that fails is listed, and the rest goes on
                self.skipped.append(where | {"reason": f"{type(error).__name__}: {error}"[:300]})
        if [side.name for side, _ in ready[:2]] != ["torch.linear", "quantkit"]:
            return
        times = interleaved([sampler for _, sampler in ready], self.blocks, self.generator)
        self._record(shape, batch, variant, config, [side for side, _ in ready], times)

    def _tuned(self, where: dict[str, Any], held: Any, x: torch.Tensor, memory: Workspace) -> Config:
        """The fastest configuration for this width of x, and the times of all of them."""
        found = []
        for config in candidates(len(x)):
            if self.device.dry and found:
                break
            try:
                sampler = sides.ours(held, x, config, memory).ready()
            except Exception as error:
                self.skipped.append(where | {"config": config.as_dict(), "reason": str(error)[:300]})
                continue
            sampler()
            seconds = float(np.median([sampler() for _ in range(3)]))
            found.append((seconds, config))
            self.configs.append(where | {"config": config.as_dict(), "seconds": seconds})
        if not found:
            raise RuntimeError("no configuration runs")
        return min(found, key=lambda pair: pair[0])[1]

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
        op = {
            **{"layer": None, "K": shape[1], "N": shape[0], "M": batch, "format": variant.format},
            **{"bound_s": bound, "hp_bound_s": hp_bound, "hp_s": middle["torch.linear"]},
            "raw_s": None if raw is None else float(np.median(raw)),
        }
        for side, taken in zip(made, times, strict=True):
            better, interval = ratio(known["torch.linear"], taken, self.generator)
            common = {
                "schema": 1,
                "better": "lower",
                "unit": "s",
                "stat": "median",
                "subject": f"random {variant.name}",
                "batch": batch,
                "op": op,
                "runtime": side.name,
                "settings": {"variant": variant.name, "dtype": str(self.dtype), **side.settings},
                "resident_bytes": side.resident_bytes,
                "device": self.device.identity(),
                "versions": self.versions,
            }
            against = {
                **{"subject": "torch.linear", "value": middle["torch.linear"]},
                **{"ratio": better, "ratio_ci95": interval},
            }
            row = common | {"name": "latency.op", **summary(taken, self.generator), "baseline": against}
            self.rows.append(row | {"flags": self._flags(side.name, interval)})
            if side.name in ("quantize_tokens", "quantkit raw twin", "torch.linear"):
                continue
            tiles = config.as_dict() if side.name == "quantkit" else None
            timing = KernelTiming(side.name, shape, batch, middle[side.name], side.resident_bytes, tiles)
            self.timings.setdefault(variant.name, []).append(timing)
        taxes = {
            "tax.total": None if bound is None else middle["quantkit"] - bound,
            "tax.streaming": None if raw is None or bound is None else op["raw_s"] - bound,
            "tax.decode": None if raw is None else middle["quantkit"] - op["raw_s"],
            "tax.activation": middle.get("quantize_tokens"),
        }
        ours = next(side for side in made if side.name == "quantkit")
        for name, value in taxes.items():
            if value is not None:
                self.rows.append(
                    {
                        **{"schema": 1, "name": name, "value": value, "unit": "s", "stat": "median", "better": "lower"},
                        **{"subject": f"random {variant.name}", "batch": batch, "op": op, "runtime": "quantkit"},
                        "settings": {"variant": variant.name, "dtype": str(self.dtype), **ours.settings},
                        **{"resident_bytes": ours.resident_bytes, "device": self.device.identity()},
                        **{"versions": self.versions, "flags": ["negative"] if value < 0 else []},
                    }
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
        self.skipped.append(where | {"reason": "the time was up"})
        return True


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
