"""What the device can do at best, measured in the same run: bytes read and copied, products, a launch.

read      the largest of all elements, of an array that no cache holds
copy      the same array copied; bytes count twice
compute   a square product of random numbers in each input type, 2 n^3 operations, by torch's own library
launch    an addition to one number, eager and in a graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from quantkit.measurement.cuda.device import DRIFT, GpuDevice
from quantkit.measurement.cuda.timing import Implementation, interleaved
from quantkit.measurement.operators.ceilings import Ceiling


@triton.jit
def _read(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    """The largest int32 of a program's stretch: loads and one maximum each."""
    most = tl.full((BLOCK,), -2147483648, tl.int32)
    at = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    for _ in range(steps):
        most = tl.maximum(most, tl.load(x_ptr + at))
        at += BLOCK
    tl.store(y_ptr + tl.program_id(0), tl.max(most, axis=0))


def sampled(device: GpuDevice, blocks: int, generator: np.random.Generator) -> list[Ceiling]:
    """Measure all ceilings; those that the device lacks are empty and say why."""
    at = device.torch_device
    block, programs = (4096, 4096) if not device.dry else (256, 2)
    count = 64 * block * programs if not device.dry else 2 * block * programs
    x = torch.randint(-1000, 1000, (count,), dtype=torch.int32, device=at)
    y, z = torch.empty(programs, dtype=torch.int32, device=at), torch.empty_like(x)
    steps = count // block // programs
    small = torch.zeros(1, device=at)
    kernels: list[tuple[str, str, float, Callable[[], object], dict[str, Any]]] = [
        ("ceiling.read", "B/s", 4.0 * count, lambda: _read[(programs,)](x, y, steps, BLOCK=block, num_warps=8), {}),
        ("ceiling.copy", "B/s", 8.0 * count, lambda: z.copy_(x), {}),
    ]
    side = 8192 if not device.dry else 32
    found = []
    for name, make in products(side, at).items():
        try:
            step = make()
            step()
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            reason = f"not measured: {str(error).splitlines()[0]}"
            found.append(Ceiling("ceiling.compute", "op/s", (), {"compute_type": name}, {}, reason))
            continue
        kernels.append(("ceiling.compute", "op/s", 2.0 * side**3, step, {"compute_type": name}))
    for name, unit, work, step, settings in kernels:
        times = interleaved([Implementation(name, [step], 0, {}, least=2).ready()], blocks, generator)[0]
        found.append(Ceiling(name, unit, tuple(map(float, (work / times).ravel())), settings, {}))
    alone = Implementation("launch", [lambda: small.add_(1)] * 64, 0, {}).ready()
    times = interleaved([alone], blocks, generator)[0]
    return [*found, Ceiling("ceiling.launch", "s", tuple(map(float, times.ravel())), {"graph": at == "cuda"}, {})]


def measured(device: GpuDevice, blocks: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Give rows `ceiling.*` of what `sampled` measures; what the device lacks has no value and says why."""
    one = device.identity()
    return [ceiling.as_dict(device=one, versions={}) for ceiling in sampled(device, blocks, generator)]


def products(side: int, at: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """Input type -> what makes a product of two [side, side] matrices of random numbers."""

    def floats(dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(side, side, device=at).to(dtype) for _ in range(2))
        return lambda: torch.mm(a, b.T)

    def int8() -> Callable[[], object]:
        a, b = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=at) for _ in range(2))
        return lambda: torch._int_mm(a, b.T)

    def fp8() -> Callable[[], object]:
        a, b = (torch.randn(side, side, device=at).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=at)
        return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return {
        "bf16": lambda: floats(torch.bfloat16),
        "fp16": lambda: floats(torch.float16),
        "int8": int8,
        "fp8_e4m3": fp8,
    }


def of(rows: Sequence[Mapping[str, Any]], name: str, compute: str = "") -> float | None:
    """The measured value of a ceiling."""
    for row in rows:
        if row["name"] == name and (not compute or row["settings"]["compute_type"] == compute):
            value: float | None = row["value"]
            return value
    return None


def slower(before: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the same products took longer the second time than heat and power should allow."""
    pairs = [(of(before, "ceiling.compute", kind), of(again, "ceiling.compute", kind)) for kind in ("bf16", "fp16")]
    return any(last < (1 - DRIFT) * first for first, last in pairs if first and last)
