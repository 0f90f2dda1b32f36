"""Every kernel against float64 on this device, within the bound that rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parts.shapes import VARIANTS
from quantkit.formats.nf4 import VALUES
from quantkit.kernels.configs import Config, candidates
from quantkit.kernels.dequantize import dequantize
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import weight_only
from quantkit.kernels.native import native
from quantkit.kernels.quantize import quantize_tokens
from quantkit.kernels.workspace import Workspace
from quantkit.measurement.cuda.check import error
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.cuda.sides import inputs
from quantkit.measurement.cuda.weights import FormatVariant, values, weight

_BATCHES = (1, 3, 16, 17, 64, 200)


def checked(device: GpuDevice) -> list[dict[str, Any]]:
    """One row a variant, dtype and batch: the largest error as a share of what is allowed; whether repeats agree."""
    shape = (1040, 4096) if not device.dry else (24, 128)
    batches = _BATCHES if not device.dry else (3,)
    rows = []
    for variant in VARIANTS if not device.dry else (VARIANTS[1], VARIANTS[4], VARIANTS[6]):
        packed = weight(variant, *shape, device.torch_device)
        plain = values(packed, torch.tensor(VALUES))
        for dtype in (torch.bfloat16, torch.float16):
            for batch in batches:
                # the first and the last: a small split and a large one, or none
                known = candidates(batch)
                configs = [known[0]] if device.dry else [known[0], known[-1]]
                row = {"variant": variant.name, "dtype": str(dtype), "batch": batch}
                try:
                    x = inputs(batch, shape[1], dtype, device.torch_device)
                    rows.append(row | _one(variant, packed, plain, x, configs))
                except Exception as error:  # what fails here must not cost the rest of the run
                    rows.append(row | {"ok": False, "reason": f"{type(error).__name__}: {error}"[:300]})
    return rows


def _one(
    variant: FormatVariant, packed: PackedWeight, plain: torch.Tensor, x: torch.Tensor, configs: Sequence[Config]
) -> dict[str, Any]:
    worst, agree = 0.0, True
    for config in configs:
        memory = Workspace()
        if variant.native:
            codes, step = quantize_tokens(x, variant.format)
            made = [native(codes, step, packed, config, dtype=x.dtype, workspace=memory) for _ in range(3)]
        else:
            made = [weight_only(x, packed, config, workspace=memory) for _ in range(3)]
        worst = max(worst, error(variant, plain, x, made[0]))
        agree = agree and all(torch.equal(made[0], other) for other in made[1:])
    found = {"worst": worst, "repeats_agree": agree, "ok": worst <= 1.0 and agree, "reason": ""}
    if not variant.native:
        off = (dequantize(packed, torch.float32).double() - plain).abs()
        found["expanded"] = float((off / (plain.abs() * 2.0**-11 + 2.0**-20)).max())
        found["ok"] = found["ok"] and found["expanded"] <= 1.0
    return found
