"""Every kernel against float64 on this device, within the bound that rounding explains; and against a race."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from parts import attending
from parts.race import LAUNCHES, Product, beside, raced
from parts.shapes import DTYPES, VARIANTS, settings
from parts.shapes import checked as settings_of
from quantkit.formats.nf4 import VALUES
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import by_slabs, dequantize, weight_only
from quantkit.kernels.native import native, quantize_tokens
from quantkit.kernels.workspace import Workspace
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.cuda.sides import FormatVariant, error, inputs, known, values, weight

_BATCHES = (1, 3, 16, 17, 64, 200)
_DRY, _TINY = ("int4.g64", "nf4.g64.double", "fp8_e4m3.dynamic"), (24, 64)
# inputs that launches take in turn
_INPUTS = 8
Row = dict[str, Any]
# line of PENDING.md -> the rows that settle it
LINES: Mapping[str, Callable[[Row], bool]] = {
    "kernels": lambda row: True,
    "bfloat16": lambda row: row["dtype"] == "torch.bfloat16",
    "byte-perm": lambda row: row["variant"].startswith("nf4"),
    "nan": lambda row: "not_numbers" in row,
    "attention": lambda row: row["variant"] == attending.NAME,
}


def checked(device: GpuDevice, deadline: float) -> Iterator[Row]:
    """One row a variant, dtype and batch: the largest error as a share of what is allowed; attention's first."""
    yield from attending.checked(device, DTYPES, deadline)
    shape = (1040, 4096) if not device.dry else _TINY
    batches = _BATCHES if not device.dry else (3,)
    for variant in VARIANTS if not device.dry else [known()[name] for name in _DRY]:
        packed = weight(variant, *shape, device.torch_device)
        plain = values(packed, torch.tensor(VALUES))
        for dtype in DTYPES.values():
            for batch in batches:
                configs = settings_of(variant, batch, dry=device.dry)
                row = {"variant": variant.name, "dtype": str(dtype), "batch": batch}
                if time.monotonic() > deadline:
                    yield row | {"ok": None, "reason": "the time was up"}
                    continue
                try:
                    x = inputs(batch, shape[1], dtype, device.torch_device)
                    yield row | _one(variant, packed, plain, x, configs)
                except Exception as problem:  # what fails here must not cost the rest of the run
                    yield row | {"ok": False, "reason": f"{type(problem).__name__}: {problem}"[:300]}


def _one(
    variant: FormatVariant, packed: PackedWeight, plain: torch.Tensor, x: torch.Tensor, configs: Sequence[Config]
) -> Row:
    worst = max(error(variant, plain, x, product(variant, packed, config)(x, Workspace())) for config in configs)
    found = {"worst": worst, "ok": worst <= 1.0, "reason": ""}
    found["not_numbers"] = all(_not_numbers(product(variant, packed, config), x) for config in configs)
    found["ok"] = found["ok"] and found["not_numbers"]
    if not variant.native:
        off = (dequantize(packed, torch.float32).double() - plain).abs()
        found["expanded"] = float((off / (plain.abs() * 2.0**-11 + 2.0**-20)).max())
        # five slabs, whose values are rounded to the dtype of x
        found["slabs"] = error(variant, plain, x, by_slabs(x, packed, rows=256), rounded=torch.finfo(x.dtype).eps)
        found["ok"] = found["ok"] and found["expanded"] <= 1.0 and found["slabs"] <= 1.0
    return found


def _not_numbers(multiply: Product, x: torch.Tensor) -> bool:
    """Whether a NaN or an infinity in a row of x makes that row of y one of NaN or infinities, and no other row."""
    clean = multiply(x, None)
    for planted in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[-1, x.shape[1] // 3] = planted
        y = multiply(spoiled, None)
        if y[-1].isfinite().any() or (planted != planted and not y[-1].isnan().all()):  # noqa: PLR0124 (NaN)
            return False
        if not torch.equal(y[:-1], clean[:-1]):
            return False
    return True


def product(variant: FormatVariant, packed: PackedWeight, config: Config) -> Product:
    """x [M, K] and a workspace -> y [M, N], by one of our kernels."""

    def multiply(x: torch.Tensor, memory: Workspace | None) -> torch.Tensor:
        if not variant.native:
            return weight_only(x, packed, config, workspace=memory)
        codes, step = quantize_tokens(x, variant.format)
        return native(codes, step, packed, config, dtype=x.dtype, workspace=memory)

    return multiply


def raced_kernels(device: GpuDevice, dtype: torch.dtype, deadline: float) -> Iterator[Row]:
    """Two rows a variant, batch and configuration with a split K: `race.raced` and `race.beside`, whose first results
    are compared with float64; attention's first."""
    yield from attending.raced_cases(device, dtype, deadline)
    shape = (4096, 4096) if not device.dry else _TINY
    for variant in VARIANTS if not device.dry else [known()[_DRY[0]]]:
        packed = weight(variant, *shape, device.torch_device)
        plain = values(packed, torch.tensor(VALUES))
        for batch in (1, 16, 64) if not device.dry else (3,):
            for config in (each for each in settings(variant, batch, dry=device.dry) if each.split > 1 or each.whole_k):
                row = {"variant": variant.name, "dtype": str(dtype), "batch": batch, "config": config.as_dict()}
                if time.monotonic() > deadline:
                    yield row | {"ok": None, "reason": "the time was up"}
                    continue
                count = 2 if device.dry else _INPUTS
                drawn = inputs(batch * count, shape[1], dtype, device.torch_device).view(count, batch, -1)
                made, launches = product(variant, packed, config), 4 if device.dry else LAUNCHES
                # a replay beside another holds many launches
                ways = (
                    ("alone", raced, list(drawn), launches),
                    ("beside", beside, list(drawn[:2]), -(-launches // 5)),
                )
                for how, run, inputs_of, count in ways:
                    try:
                        found = run(made, inputs_of, count)
                    except Exception as problem:
                        yield row | {"how": how, "ok": False, "reason": f"{type(problem).__name__}: {problem}"[:300]}
                        continue
                    first = found.pop("first")
                    worst = max(error(variant, plain, x, y) for x, y in zip(inputs_of, first, strict=True))
                    ok = worst <= 1.0 and not found["differing"] and not found["counters_left"]
                    yield row | found | {"how": how, "worst": worst, "ok": ok, "reason": ""}
