"""Decode steps of a whole model under CUDA graphs: quantized linears against 16 bits, interleaved, batch by batch.

The linears are `kernels.linear.QuantLinear` with the choices that the sweep of the same run has made. Beside each step
stands the sum of its linears as the sweep timed them one by one; the residual is what that sum does not explain:
attention, norms, the head, launches, and weights that one product leaves in the cache for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from parts.decoder import Decoder, MakeLinear, Sizes
from parts.sections import RUN
from quantkit.kernels.dispatch import Choice, KernelTiming, Table, fastest
from quantkit.kernels.linear import QuantLinear
from quantkit.measurement.cuda.device import GpuDevice, Implementation, allocated, interleaved, ratio, summary
from quantkit.measurement.cuda.sides import FormatVariant, weight

BASELINE = "16 bits"


def tables(timings: Mapping[str, Sequence[KernelTiming]]) -> dict[str, Table]:
    """The choices for each variant among what a layer can run."""
    able = {name: [t for t in found if t.candidate in RUN] for name, found in timings.items()}
    return {name: fastest(found) for name, found in able.items() if found}


def measured(
    sizes: Sizes,
    variants: Sequence[FormatVariant],
    batches: Sequence[int],
    context: int,
    *,
    device: GpuDevice,
    dtype: torch.dtype,
    blocks: int,
    generator: np.random.Generator,
    timings: Mapping[str, Sequence[KernelTiming]],
    versions: Mapping[str, str],
    deadline: float,
    give: Callable[[str, Any], None],
) -> int:
    """How many rows `latency.decode_step` were given.

    Args:
        sizes: of the model.
        variants: of the linears; those of which the sweep timed no shape run as `linear.unmeasured` says.
        batches: sequences that are decoded together.
        context: tokens in the cache.
        device, dtype, blocks, generator, versions: of the run.
        timings: of the sweep, by variant.
        deadline: `time.monotonic()` after which nothing new begins.
        give: a section of the record and one entry of it: `rows`, `skipped`.
    """
    known, at = tables(timings), device.torch_device
    count = 0
    models: dict[str, tuple[Decoder, int]] = {}
    for name, make in {
        BASELINE: _dense(dtype, at),
        **{v.name: _packed(v, known.get(v.name), at) for v in variants},
    }.items():
        if time.monotonic() > deadline:
            give("skipped", {"end_to_end": name, "reason": "the time was up"})
            continue
        try:
            before = allocated()
            model = Decoder(sizes, make, dtype, at)
            models[name] = (model, allocated() - before)
        except Exception as error:
            give("skipped", {"end_to_end": name, "reason": f"{type(error).__name__}: {error}"[:300]})
    for batch in batches:
        if time.monotonic() > deadline:
            give("skipped", {"end_to_end": f"batch {batch}", "reason": "the time was up"})
            continue
        ready = []
        for name, (model, size) in models.items():
            try:
                side = Implementation(name, [_step(model, batch, context)], size, {"context": context}, least=1)
                ready.append((side, side.ready()))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                give("skipped", {"end_to_end": name, "batch": batch, "reason": reason})
        if not ready or ready[0][0].name != BASELINE:
            continue
        times = interleaved([sampler for _, sampler in ready], blocks, generator)
        for (side, _), taken in zip(ready, times, strict=True):
            better, interval = ratio(times[0], taken, generator)
            sums = linears_seconds(sizes, batch, side.name, known)
            settings: dict[str, Any] = {"variant": side.name, "dtype": str(dtype), **side.settings}
            settings |= {"linears_s": sums, "residual_s": None if sums is None else float(np.median(taken)) - sums}
            count += 1
            give(
                "rows",
                {
                    **{"schema": 1, "name": "latency.decode_step", "unit": "s", "stat": "median", "better": "lower"},
                    **{"subject": f"random Llama-3-8B, {side.name}", "runtime": "torch, CUDA graphs", "batch": batch},
                    **{"shape": {"new_tokens": 1, "context": context}, "settings": settings},
                    "resident_bytes": side.resident_bytes,
                    **summary(taken, generator),
                    "baseline": {
                        **{"subject": f"random Llama-3-8B, {BASELINE}", "value": float(np.median(times[0]))},
                        **{"ratio": better, "ratio_ci95": interval},
                    },
                    **{"device": device.identity(), "versions": dict(versions)},
                    "flags": ["dry-run"] if device.dry else [],
                },
            )
        ready.clear()
    return count


def _dense(dtype: torch.dtype, at: str) -> MakeLinear:
    def make(shape: tuple[int, int], layer: int) -> torch.nn.Module:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype, device=at)
        return linear.requires_grad_(False)

    return make


def _packed(variant: FormatVariant, table: Table | None, at: str) -> MakeLinear:
    def make(shape: tuple[int, int], layer: int) -> torch.nn.Module:
        choices = table if table is not None and shape in table.choices else None
        return QuantLinear(weight(variant, *shape, at, seed=layer), table=choices)

    return make


def _step(model: Decoder, batch: int, context: int) -> Callable[[], object]:
    cache = model.cache(batch, context)
    ids = torch.arange(batch, device=cache.device) % model.sizes.vocabulary

    def step() -> object:
        with torch.no_grad():
            return model(ids, cache)

    return step


def linears_seconds(sizes: Sizes, batch: int, name: str, known: Mapping[str, Table]) -> float | None:
    """Seconds of all linears of the blocks as the sweep timed them; None where one was not timed at this batch."""
    table = known.get(name)
    if table is None:
        return None
    found = [_choice(table, shape, batch) for shape in sizes.linears()]
    seconds = [choice.seconds for choice in found if choice is not None]
    return sizes.layers * sum(seconds) if len(seconds) == len(found) else None


def _choice(table: Table, shape: tuple[int, int], batch: int) -> Choice | None:
    return next((choice for choice in table.choices.get(shape, ()) if choice.batch == batch), None)
