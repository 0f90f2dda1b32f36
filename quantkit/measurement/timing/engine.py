"""An engine against the unquantized model in torch, bfloat16, on one GPU: steps and prefills, interleaved.

Both sides' decode steps are one CUDA graph, timed by the device's own clock (`timing.latency`); the engine multiplies
as it was built, transformers' model as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.measurement.cuda.device import GpuDevice, fitting
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.cuda import KernelDecoder, ceilings, cost, described, format_of
from quantkit.measurement.timing.latency import TimedSide, measure
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.runtimes.torch.classes import built

if TYPE_CHECKING:
    from quantkit.model.source.open import Source
    from quantkit.runtimes.tensorrt.decode import EngineModel


def run(
    model: EngineModel,
    bundle: Bundle,
    source: Source,
    plan: TimingPlan,
    device: GpuDevice,
    *,
    progress: Callable[[float, str], None] | None = None,
) -> list[Row]:
    """Time an engine against the model that its bundle was made from.

    Args:
        plan: what and how long; contexts and prefills beyond the engine's cache are left out.
        device: the GPU; a CPU for tests.
        progress: told the share that is done, and what is being done.

    Raises:
        InputError: `out-of-memory`, the two do not fit.
    """
    dtype = torch.bfloat16
    with fitting("both models"):
        model_class, config = described(source)
        state = {name: source.weights.read(name).to(dtype) for name in source.weights.entries}
        theirs = built(model_class, config, state, dtype).to(device.torch_device)
    within = replace(
        plan,
        contexts=[each for each in plan.contexts if each < model.capacity],
        prefills=[each for each in plan.prefills if each <= model.capacity],
    )
    generator = np.random.default_rng(plan.seed)
    baseline = cost(theirs, "bfloat16", "bf16")
    settings: dict[str, Any] = {**model.settings, "baseline_format": "bfloat16", "compute_type": "fp16"}
    return measure(
        TimedSide(
            model, _cost(bundle, baseline), bundle.manifest.content_sha256, model.engine.file.path.stat().st_size
        ),
        TimedSide(KernelDecoder(theirs), baseline, source.sha256),
        runtime=model.engine.library.name,
        settings=settings,
        device=device.identity(),
        versions={**machine.versions(), "driver": str(device.describe().get("driver", ""))},
        plan=within,
        ceilings=lambda: ceilings(device, generator),
        progress=progress,
    )


def _cost(bundle: Bundle, baseline: StepCost) -> StepCost:
    """The baseline's, with the weights of quantized layers as they are stored."""
    saved = sum(layer.shape[0] * layer.shape[1] * (2 - layer.bits_per_weight / 8) for layer in bundle.manifest.layers)
    return replace(
        baseline, format=format_of(bundle), weight_bytes=max(0.0, baseline.weight_bytes - saved), compute="fp16"
    )
