"""Attention of a decode step against float64 and against a race: cases, the oracle, and what rounding explains.

With p the exact weights of positions, u the unit roundoff of the dtype and q, K, V as stored, the kernel may be off by

    p |V| (u + 2 e + S 2^-23) + S 2^-25 max |V| + u |y| + 2^-25       e = s max(|q| |K|) (D + 8) 2^-23 + 2^-20

which rounding of the weights to the dtype, scores and exponentials in float32, their sum, weights below the normal
numbers of float16, and the result add up to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from parts.race import LAUNCHES, beside, raced
from quantkit.kernels.attention import split_kv
from quantkit.kernels.matmul import interpreted
from quantkit.kernels.workspace import Workspace
from quantkit.measurement.cuda.device import GpuDevice

NAME = "attention"
# significant bits; the interpreter cuts bfloat16 off where a GPU rounds
_BITS = {torch.float16: 11, torch.bfloat16: 7 if interpreted() else 8}


@dataclass(frozen=True)
class Case:
    """One attention.

    Args:
        batch: sequences; the second has a padded start, the third twice as much, and so on.
        heads, kv_heads: of queries, of keys and values.
        size, value_size: D and E.
        length: tokens in the cache.
        room: tokens that it holds.
        splits: programs of a sequence and KV head; 0: as the layer chooses.
    """

    batch: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    length: int
    room: int
    splits: int = 0


CASES = (
    *(Case(batch, 32, 8, 128, 128, length, length + 255) for batch in (1, 16) for length in (513, 4097)),
    Case(64, 32, 8, 128, 128, 513, 768),
    *(Case(1, 32, 8, 128, 128, length, 4352, 32) for length in (1, 17, 2048)),
    Case(1, 9, 3, 64, 64, 17, 300),
    Case(3, 4, 4, 96, 96, 200, 600),
    Case(2, 8, 1, 256, 256, 700, 1000),
    Case(2, 4, 2, 192, 128, 700, 700),
)
RACED = (CASES[0], CASES[1], CASES[4], Case(64, 32, 8, 128, 128, 513, 768, 16))
DRY = (Case(2, 4, 2, 32, 32, 17, 200, 4),)


def drawn(case: Case, dtype: torch.dtype, at: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, K, V and the mask; NaN where no token is yet."""
    generator = torch.Generator(device=at).manual_seed(case.room)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=at).to(dtype)

    query = draw(case.batch, case.heads, 1, case.size)
    keys = draw(case.batch, case.kv_heads, case.room, case.size)
    values = draw(case.batch, case.kv_heads, case.room, case.value_size)
    for cache in (keys, values):
        cache[:, :, case.length :] = float("nan")
    place = torch.arange(case.room, device=at)
    starts = torch.arange(case.batch, device=at)[:, None] * 3 % case.length
    return query, keys, values, ((place >= starts) & (place < case.length))[:, None, None]


def off(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float, y: torch.Tensor
) -> float:
    """Return the largest error of y [B, 1, H, E] as a share of what is allowed."""
    bits, group = _BITS[query.dtype], query.shape[1] // keys.shape[1]
    worst = 0.0
    for row in range(len(query)):  # one sequence at a time: float64 takes much memory
        live = seen[row, 0, 0]
        q, k, v = query[row].double(), keys[row][:, live].double(), values[row][:, live].double()
        k, v = (part.repeat_interleave(group, 0) for part in (k, v))
        p = (q @ k.mT * scale).softmax(-1)
        exact, size, count = p @ v, p @ v.abs(), k.shape[1]
        score = scale * (q.abs() @ k.abs().mT).amax(-1, keepdim=True) * (k.shape[2] + 8) * 2.0**-23 + 2.0**-20
        allowed = size * (2.0**-bits + 2 * score + count * 2.0**-23) + 2.0**-bits * exact.abs() + 2.0**-25
        allowed = allowed + count * 2.0**-25 * v.abs().amax(1, keepdim=True)
        error = (y[row, 0].double() - exact[:, 0]).abs() / allowed[:, 0]
        worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
    return worst


def checked(device: GpuDevice, dtypes: dict[str, torch.dtype], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a row a case and dtype: the largest error as a share of what is allowed."""
    for case in DRY if device.dry else CASES:
        for dtype in dtypes.values():
            row = {"variant": NAME, "dtype": str(dtype), "batch": case.batch, "config": asdict(case)}
            if time.monotonic() > deadline:
                yield row | {"ok": None, "reason": "the time was up"}
                continue
            try:
                *parts, seen = drawn(case, dtype, device.torch_device)
                scale = case.size**-0.5
                worst = off(*parts, seen, scale, split_kv(*parts, seen, scale, splits=case.splits))
                yield row | {"worst": worst, "ok": worst <= 1.0, "reason": ""}
            except Exception as problem:  # what fails here must not cost the rest of the run
                yield row | {"ok": False, "reason": f"{type(problem).__name__}: {problem}"[:300]}


def raced_cases(device: GpuDevice, dtype: torch.dtype, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield two rows a case: `race.raced` and `race.beside`, whose queries vary."""
    for case in DRY if device.dry else RACED:
        _, keys, values, seen = drawn(case, dtype, device.torch_device)
        scale, count = case.size**-0.5, 2 if device.dry else 8
        generator = torch.Generator().manual_seed(count)
        shape = (count, case.batch, case.heads, 1, case.size)
        queries = list(torch.randn(shape, generator=generator).to(device.torch_device, dtype))

        def product(
            query: torch.Tensor,
            memory: Workspace | None,
            case: Case = case,
            parts: tuple[torch.Tensor, ...] = (keys, values, seen),
            scale: float = scale,
        ) -> torch.Tensor:
            return split_kv(query, *parts, scale, splits=case.splits, workspace=memory)

        launches = 4 if device.dry else LAUNCHES
        for how, run, inputs, times in (
            ("alone", raced, queries, launches),
            ("beside", beside, queries[:2], -(-launches // 5)),
        ):
            row = {"variant": NAME, "dtype": str(dtype), "batch": case.batch, "config": asdict(case), "how": how}
            if time.monotonic() > deadline:
                yield row | {"ok": None, "reason": "the time was up"}
                continue
            try:
                told = run(product, inputs, times)
            except Exception as problem:
                yield row | {"ok": False, "reason": f"{type(problem).__name__}: {problem}"[:300]}
                continue
            first = told.pop("first")
            worst = max(off(query, keys, values, seen, scale, y) for query, y in zip(inputs, first, strict=True))
            ok = worst <= 1.0 and not told["differing"] and not told["counters_left"]
            yield row | told | {"worst": worst, "ok": ok, "reason": ""}
