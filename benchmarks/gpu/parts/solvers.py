"""The solvers' kernels on this device: against the CPU on a slice of rows, and how long they take beside torch's loop.

A row's codes may differ where sums in another order tip a tie, and all that follows it: at most a tenth may, and what
the rows cost may differ by a thousandth. `products_per_s` are the operations of the products that a solve cannot do
without, over its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from quantkit.measurement.cuda.device import GpuDevice

# N x K, the linears of a block of Llama-3-8B
_SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
SCHEMES: dict[str, dict[str, Any]] = {
    "int4 zeros g128": {"format": "int4", "granularity": "group", "group": 128, "symmetric": False},
    "nf4 g64": {"format": "nf4", "group": 64},
    "fp8_e4m3 channel": {"format": "fp8_e4m3", "granularity": "channel"},
}
# operations of a solver's products, by those of one of weight and Hessian; of integer formats AWQ's too
_PRODUCTS = {"gptq": 1.0, "gptq sweep": 4.0, "range": 0.0, "awq hessian": 2.0 * 21, "awq importance": 0.0}
_REPEATS, _SLICE = 3, 32
# a share of a slice's codes, and of its cost
_DIFFERING, _DEARER = 0.1, 1e-3


def measured(device: GpuDevice) -> Iterator[dict[str, Any]]:
    """One row a shape, format and solver; `ok` is None of what could not be tried."""
    try:
        from quantkit.passes.solvers import device as solvers
    except ModuleNotFoundError as missing:
        yield {"ok": None, "reason": f"{missing}: `make gpu-bundle` carries it"}
        return
    shapes, schemes = _SHAPES, SCHEMES
    if device.dry:
        shapes, schemes = ((6, 64),), {"int4 zeros g32": {**SCHEMES["int4 zeros g128"], "group": 32}}
    # the interpreter stands in for the device
    with patch.object(solvers, "launched", lambda tensor: device.dry or tensor.is_cuda):
        for shape in shapes:
            # formats other than the first, which every shape is tried with, on the smallest
            for name in list(schemes)[: None if shape == shapes[-1] else 1]:
                yield from _of_shape(device, shape, name, schemes[name])


def names(form: str) -> list[str]:
    """Solvers that are tried with a format."""
    return [name for name in _PRODUCTS if form == "int4" or not name.startswith("awq")]


def solve(solver: str, weight: Any, hessian: Any, solved: Any, scheme: Any, grid: int = 20) -> Any:
    """What one of `names` finds for a weight [N, K].

    Args:
        hessian, solved: [K, K], and its `Factor`.
        scheme: a `WeightScheme`.
        grid: scalings that AWQ tries.
    """
    from quantkit.passes.solvers import awq, ranges
    from quantkit.passes.solvers.gptq import gptq_shared

    if solver == "range":
        return ranges.searched(weight, scheme, solved.importance)
    if solver.startswith("gptq"):
        return gptq_shared([weight], solved, scheme, range="minmax", sweeps=int(solver == "gptq sweep"))
    importance = solved.importance if solver == "awq importance" else None
    return awq.search_scales([weight], hessian, scheme, grid=grid, importance=importance)


def _of_shape(device: GpuDevice, shape: tuple[int, int], name: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from quantkit.passes.solvers.factor import factor
    from quantkit.scheme import WeightScheme

    (rows, columns), at = shape, device.torch_device
    scheme = WeightScheme.model_validate(fields)
    generator = torch.Generator(at).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=at)
    inputs = torch.randn(columns + columns // 4, columns, generator=generator, device=at)
    inputs *= torch.rand(columns, generator=generator, device=at) * 4
    hessian = inputs.T @ inputs
    solved = factor(hessian)
    asked = partial(solve, weight=weight, hessian=hessian, solved=solved, scheme=scheme, grid=2 if device.dry else 20)
    for solver in names(scheme.format):
        row = {"solver": solver, "shape": list(shape), "format": name}
        try:
            before = 0 if device.dry else torch.cuda.memory_allocated()
            if not device.dry:
                torch.cuda.reset_peak_memory_stats()
            found, seconds = _timed(device, partial(asked, solver))
            row |= {"seconds": seconds, "products_per_s": _PRODUCTS[solver] * rows * columns**2 / seconds}
            row["peak_bytes"] = 0 if device.dry else torch.cuda.max_memory_allocated() - before
            yield row | _checked(solver, found, weight, solved, hessian, scheme, device)
        except Exception as error:  # what fails here must not cost the rest of the run
            yield row | {"ok": False, "reason": f"{type(error).__name__}: {error}"[:300]}
    if scheme.format == "int4":
        from quantkit.passes.solvers import device as where

        with patch.object(where, "launched", lambda tensor: False):
            _, seconds = _timed(device, partial(asked, "gptq"), 1)
        yield {"solver": "gptq, torch's loop", "shape": list(shape), "format": name, "seconds": seconds, "ok": True}


def _checked(
    solver: str, found: Any, weight: Any, solved: Any, hessian: Any, scheme: Any, device: GpuDevice
) -> dict[str, Any]:
    """Codes and costs of some rows against the CPU's; of a search that it is no worse than nothing."""
    from quantkit.formats import load_format
    from quantkit.passes.solvers import device as where
    from quantkit.passes.solvers import ranges
    from quantkit.passes.solvers.factor import Factor
    from quantkit.passes.solvers.gptq import gptq_shared

    part = weight[:_SLICE].cpu()
    with patch.object(where, "launched", lambda tensor: False):
        if solver.startswith("awq"):
            alpha, cost, plain = (float(each) for each in (found.alpha, found.cost, found.plain))
            return {"alpha": alpha, "cost": cost / plain, "ok": 0 <= alpha <= 1 and cost <= plain}
        if solver == "range":
            scale, _ = ranges.searched(part, scheme, solved.importance.cpu())
            ours = found[0][:_SLICE].cpu().float()
            off = (ours / scale.float() - 1).abs()
            differing = float((off > 1e-4).float().mean())
            return {"scales_differ": differing, "ok": differing <= _DIFFERING}
        same = Factor(
            *(each.cpu() for each in (solved.hessian, solved.order, solved.unit, solved.pivots)),
            solved.damping,
            solved.raised,
        )
        (theirs,) = gptq_shared([part], same, scheme, range="minmax", sweeps=int(solver == "gptq sweep"))
    ours = found[0].tensor
    form = load_format(scheme.format)
    values = form.dequantize(ours)[:_SLICE].cpu()
    differing = float((ours.codes[:_SLICE].cpu().float() != theirs.tensor.codes.float()).float().mean())
    error = (values - part).double()
    dearer = float((error @ same.hessian.double() * error).sum()) / float(theirs.error) - 1
    return {"codes_differ": differing, "dearer": dearer, "ok": differing <= _DIFFERING and abs(dearer) <= _DEARER}


def _timed(device: GpuDevice, run: Callable[[], Any], repeats: int = _REPEATS) -> tuple[Any, float]:
    """What it gives, and the least seconds of some runs after one that compiles."""
    found, least = run() if repeats > 1 and not device.dry else None, float("inf")
    for _ in range(1 if device.dry else repeats):
        if not device.dry:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        found = run()
        if not device.dry:
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begin)
    return found, least
