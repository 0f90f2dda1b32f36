"""Decode steps of the product path against 16 bits: a model of transformers with packed linears, as a bundle's is.

All attend by our kernel; the first side does it by torch as well, apart, and fused at the first cell alone. Weights are
random, of Llama-3-8B's build. Each side decodes under its own CUDA graph (`DecodeGraph`), apart and fused
by torch.compile, batch by batch, interleaved. Beside a step stands the sum of its linears as the sweep of the same
results timed them one by one. Steps apart come first: a fused one compiles for every batch and context. The largest
cell comes behind the first fused one: its prompts take longest, and on most cards not all sides fit.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from parts.sections import RUN
from quantkit.kernels.dispatch import KernelTiming, Table, fastest
from quantkit.measurement.cuda.device import GpuDevice, interleaved, ratio, summary
from quantkit.measurement.cuda.sides import known, weight

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 32}
# batch and context, the most wanted first; how many all sides fit beside each other
_EASY = 7
CELLS = ((1, 512), (16, 512), (1, 4096), (4, 512), (64, 512), (16, 4096), (4, 4096), (64, 4096))
BATCHES = tuple(sorted({batch for batch, _ in CELLS}))
BASELINE, HEAD = "16 bits", "int8"
# name -> variant of the linears, and of the head; the first is what recipes write
SIDES = {
    "int4.g64.zeros": ("int4.g64.zeros", ""),
    "int4.g64.zeros, int8 head": ("int4.g64.zeros", HEAD),
    "int4.g128": ("int4.g128", ""),
}
FIRST = next(iter(SIDES))
# the first side with torch's attention
_TORCH = ", torch's attention"
BY_TORCH = FIRST + _TORCH
# seconds of a fused step of the first side at the first cell that are meant
MEANT = 2.4e-3
# seconds that torch.compile may take for a step of 32 layers, before one was seen; steps that the profiler sees
_COMPILE, _PROFILED = 60.0, 3


def model(sizes: Mapping[str, int], side: str, dtype: torch.dtype, at: str, tables: Mapping[str, Table]) -> Any:
    """Make a model of random weights; its linears are packed unless the side is the baseline."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit.runtimes.torch import packed
    from quantkit.runtimes.torch.decode_graph import attend_by_kernel

    config = LlamaConfig(**sizes)
    with torch.device(at):
        made = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    reason = attend_by_kernel(made)
    assert not reason, reason
    if side == BASELINE:
        return made
    inside, head = SIDES[side]
    linears = {name: each for name, each in made.named_modules() if isinstance(each, torch.nn.Linear)}
    variants = {name: head if each is made.lm_head else inside for name, each in linears.items()}
    weights = {
        name: weight(known()[variants[name]], *linears[name].weight.shape, at, seed=number)
        for number, name in enumerate(linears)
        if variants[name]
    }
    skeleton = packed.without_values(LlamaForCausalLM, config)
    apart, _ = packed.placed(made, weights, {}, device=at, skeleton=skeleton, table=table_of(side, tables))
    assert not apart, apart
    return made


def table_of(side: str, tables: Mapping[str, Table]) -> Table | None:
    """Return the choices of a side's linears, and of its head; None of the baseline, and where nothing was timed."""
    names = [name for name in reversed(SIDES.get(side.removesuffix(_TORCH), ())) if name in tables]
    return Table({shape: one for name in names for shape, one in tables[name].choices.items()}) if names else None


def tables(timings: Mapping[str, Sequence[KernelTiming]]) -> dict[str, Table]:
    """Choose for each variant among what a layer can run."""
    able = {name: [timing for timing in timed if timing.candidate in RUN] for name, timed in timings.items()}
    return {name: fastest(timed) for name, timed in able.items() if timed}


def measured(
    sizes: Mapping[str, int],
    cells: Sequence[tuple[int, int]],
    *,
    device: GpuDevice,
    dtype: torch.dtype,
    blocks: int,
    generator: np.random.Generator,
    timings: Mapping[str, Sequence[KernelTiming]],
    versions: Mapping[str, str],
    deadline: float,
    fuse: str,
) -> Iterator[tuple[str, Any]]:
    """Yield (section, entry): `rows`, `launches`, `skipped`.

    Args:
        sizes: of a `LlamaConfig`.
        cells: (batch, context).
        device, dtype, blocks, generator, versions: of the run.
        timings: of the sweep, by variant.
        deadline: `time.monotonic()` after which nothing new begins.
        fuse: backend of torch.compile for the steps that are fused.
    """
    from quantkit.measurement.timing.cuda import KernelDecoder, linears_seconds

    chosen, at = tables(timings), device.torch_device
    models = {side: model(sizes, side, dtype, at, chosen) for side in (BASELINE, *SIDES)}
    models[BY_TORCH] = copy.deepcopy(models[FIRST])
    models[BY_TORCH].set_attn_implementation("sdpa")
    longest = {"": 0.0, fuse: 0.0 if device.dry else _COMPILE}
    apart, fused = [("", cell) for cell in cells], [(fuse, cell) for cell in cells]
    for how, (batch, context) in (*apart[:_EASY], *fused[:1], *apart[_EASY:], *fused[1:]):
        where = {"batch": batch, "context": context, "fuse": how}
        samplers: dict[str, Callable[[], float]] = {}
        first_s: dict[str, float] = {}
        for side, made in models.items():
            if how and side == BY_TORCH and (batch, context) != cells[0]:
                continue
            if time.monotonic() + longest[how] > deadline:
                yield "skipped", {**where, "side": side, "reason": "the time was up"}
                continue
            begin = time.perf_counter()
            try:
                samplers[side] = _clocked(KernelDecoder(made, fuse=how).decode(batch, context))
            except Exception as error:  # a side that does not fit is listed, and the rest goes on
                yield "skipped", {**where, "side": side, "reason": f"{type(error).__name__}: {error}"[:300]}
            first_s[side] = time.perf_counter() - begin
            longest[how] = max(longest[how], first_s[side])
        if BASELINE in samplers:
            times = interleaved(list(samplers.values()), blocks, generator)
            for side, taken in zip(samplers, times, strict=True):
                better, interval = ratio(times[0], taken, generator)
                linears = linears_seconds(models[side], batch, table_of(side, chosen))
                rest = None if linears is None else float(np.median(taken)) - linears
                settings = {"variant": side, "dtype": str(dtype), "fuse": how, "linears_s": linears, "residual_s": rest}
                settings["first_s"] = first_s[side]
                row = {"schema": 1, "name": "latency.decode_step", "unit": "s", "stat": "median", "better": "lower"}
                row |= {"subject": f"random Llama, {side}", "runtime": "torch", "batch": batch, "settings": settings}
                row |= {"shape": {"new_tokens": 1, "context": context}, **summary(taken, generator)}
                subject = {"subject": f"random Llama, {BASELINE}", "value": float(np.median(times[0]))}
                row["baseline"] = {**subject, "ratio": better, "ratio_ci95": interval}
                row |= {"device": device.identity(), "versions": dict(versions)}
                yield "rows", row | {"flags": ["dry-run"] if device.dry else []}
            if (batch, context) == cells[0]:
                for side, sampler in samplers.items():
                    yield from (("launches", {"side": side, **where, **row}) for row in launches(sampler, device))
        samplers.clear()
        torch._dynamo.reset()
        gc.collect()
        if at == "cuda":
            torch.cuda.empty_cache()


def launches(step: Callable[[], object], device: GpuDevice) -> Iterator[dict[str, Any]]:
    """Yield a step's kernels by the profiler, the longest first: `kernel`, `count`, `us`, both of one step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kind = DeviceType.CUDA if device.torch_device == "cuda" else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(_PROFILED):
            step()
    rows = []
    for event in seen.key_averages():
        taken = event.self_device_time_total if kind == DeviceType.CUDA else event.self_cpu_time_total
        if event.device_type == kind and taken:
            rows.append({"kernel": event.key[:120], "count": event.count / _PROFILED, "us": taken / _PROFILED})
    yield from sorted(rows, key=lambda row: -row["us"])


def _clocked(run: Callable[[], float | None]) -> Callable[[], float]:
    """Give a step that tells no time of its own the host's."""

    def sample() -> float:
        begin = time.perf_counter()
        taken = run()
        return time.perf_counter() - begin if taken is None else taken

    return sample
