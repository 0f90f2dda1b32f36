"""Time a bundle on quantkit's own kernels, or in an engine, against the unquantized model on one GPU: steps and
prefills.

Both sides are transformers' classes with our attention, that differ only in their linear layers, or one is an engine.
On either side, a decode step of a batch is one CUDA graph (`runtimes.torch.decode_graph`). The device's clock times it,
and the sides take turns (`timing.latency`). If the bundle carries `kernels.json`, each row of a step on our kernels has
the sum of its linears, each timed alone by `quantkit tax`. The residual is the time beyond that sum: attention, norms,
head and launches, less what the cache saves from one product to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit import machine
from quantkit.bundle import Bundle, LayerEntry
from quantkit.errors import InputError
from quantkit.kernels.dispatch import HUMMING, Table
from quantkit.kernels.linear import QuantLinear
from quantkit.kernels.modules import OpaqueLinear
from quantkit.measurement.cuda.device import GpuDevice, allocated, fitting, sampled
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.size import saved_bytes
from quantkit.measurement.timing.latency import LoadedSides, TimedSide, explained, measure
from quantkit.measurement.timing.schedule import Step, TimingPlan
from quantkit.model.structure.kinds import positions
from quantkit.model.structure.traced import attention_sizes, is_linear, of_text
from quantkit.runtimes.child import Report
from quantkit.runtimes.torch import decode_graph
from quantkit.runtimes.torch import packed as _packed
from quantkit.runtimes.torch.decode_graph import DecodeGraph
from quantkit.runtimes.torch.reloaded import built

if TYPE_CHECKING:
    from quantkit.model.source.open import Source
    from quantkit.runtimes.tensorrt.decode import EngineModel

RUNTIME = "torch"
# steps after which a sequence is rewound to its start
_STEPS = 256
CEILING_BLOCKS = 4


class KernelDecoder:
    """A decoder of transformers as `schedule.Timeable`.

    Args:
        model: decoder, already on its device.
        fuse: operators to fuse; see `DecodeGraph`.
    """

    def __init__(self, model: Any, *, fuse: str = "") -> None:
        self.model, self.fuse = model, fuse
        self._at = next(model.parameters()).device
        self.context = positions(model.config.to_dict()) or 1 << 30

    def decode(self, batch: int, context: int) -> Step:
        """Prepare a decode step: see `Timeable`. The cache holds `context` to `context` + 255 tokens; attention
        reads all of it."""
        self._demand(context + 1)
        length = min(context + _STEPS, self.context)
        with fitting(f"batch {batch}, context {context}"):
            graph = DecodeGraph(self.model, batch, length, fuse=self.fuse)
            graph.prefill(self._ids(batch, context))
            ids = self._ids(batch, 1)[:, 0]
            graph.step(ids)

        def step() -> float | None:
            if graph.taken >= length:
                graph.rewind(context)
            return decode_graph.seconds(lambda: graph.step(ids), self._at)

        return step

    def prefill(self, batch: int, tokens: int) -> Step:
        """See `Timeable`."""
        self._demand(tokens)
        ids = self._ids(batch, tokens)

        def run() -> object:
            with torch.no_grad():
                return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

        with fitting(f"batch {batch}, {tokens} tokens"):
            run()
        return lambda: decode_graph.seconds(run, self._at)

    def _ids(self, batch: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch * tokens)
        return torch.randint(
            0, self.model.config.get_text_config().vocab_size, (batch, tokens), generator=generator
        ).to(self._at)

    def _demand(self, tokens: int) -> None:
        if tokens > self.context:
            raise InputError("prompt-too-long", where="context", value=tokens, rule=f"the model takes {self.context}")


def run(
    bundle: Bundle,
    source: Source,
    plan: TimingPlan,
    device: GpuDevice,
    *,
    progress: Report | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Row], str]:
    """Time a bundle against its original model.

    Args:
        bundle: decoder with a checkpoint.
        device: the GPU; in tests, a CPU with Triton's interpreter.
        dtype: type of the activations, of the unquantized weights and of the baseline.

    Returns:
        (rows of `latency.measure` and `memory.peak`, sentence about layers without a kernel or "").

    Raises InputError: `out-of-memory`, the two do not fit; `dispatch-invalid`.
    """
    layers, subjects = bundle.manifest.layers, (bundle.manifest.content_sha256, source.sha256)
    form = _format_of(bundle)
    loaded = kernel_sides(bundle.path, layers, source, form=form, subjects=subjects, device=device, dtype=dtype)
    return _measured(loaded, RUNTIME, plan, device, progress), loaded.note


def kernel_sides(
    place: Path,
    layers: Iterable[LayerEntry],
    source: Source,
    *,
    form: str,
    subjects: tuple[str, str],
    device: GpuDevice,
    dtype: torch.dtype = torch.bfloat16,
) -> LoadedSides:
    """Load a bundle on quantkit's own kernels, and its original model in 16 bits.

    Args:
        place: folder of the bundle, or one with `model/` and `kernels.json` of a bundle.
        layers: entries of its manifest.
        form: format of most of the layers.
        subjects: names of both sides in rows.
        dtype: see `run`.

    Raises InputError: `out-of-memory`, the two do not fit; `dispatch-invalid`.
    """
    at = device.torch_device
    table, reason = _packed.recorded(place, device.identity()["name"])
    with fitting("both models"):
        before = allocated()
        packed = _packed.load(place / "model", layers, device=at, dtype=dtype, table=table)
        resident = allocated() - before
        theirs = _floats(source, dtype, at)
        decode_graph.attend_by_kernel(theirs)
        baseline = allocated() - before - resident
    kind, width = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], str(dtype).removeprefix("torch.")
    costs = _cost(packed.model, form, kind), _cost(theirs, width, kind)
    return LoadedSides(
        TimedSide(costs[0], subjects[0], resident or None, model=KernelDecoder(packed.model)),
        TimedSide(costs[1], subjects[1], baseline or None, model=KernelDecoder(theirs)),
        {"dtype": width, "graphs": at == "cuda", "baseline_format": width, "compute_type": kind},
        note="; ".join(part for part in (reason, packed.said()) if part),
        linears=lambda batch: linears_seconds(packed.model, batch, table),
    )


def run_engine(
    model: EngineModel,
    bundle: Bundle,
    source: Source,
    plan: TimingPlan,
    device: GpuDevice,
    *,
    progress: Report | None = None,
) -> list[Row]:
    """Time an engine, with the arithmetic that it was built for, against its original model in bfloat16.

    Raises InputError: `out-of-memory`, the two do not fit.
    """
    subjects, saved = (bundle.manifest.content_sha256, source.sha256), saved_bytes(bundle.manifest.layers)
    loaded = engine_sides(model, source, form=_format_of(bundle), saved=saved, subjects=subjects, device=device)
    return _measured(loaded, model.engine.library.name, plan, device, progress)


def engine_sides(
    model: EngineModel, source: Source, *, form: str, saved: float, subjects: tuple[str, str], device: GpuDevice
) -> LoadedSides:
    """Load an engine's original model in bfloat16 beside it.

    Args:
        form: format of the engine's weights.
        saved: bytes saved against 16 bits: see `measurement.size.saved_bytes`.
        subjects: names of both sides in rows.

    Raises InputError: `out-of-memory`, the two do not fit.
    """
    with fitting("both models"):
        theirs = _floats(source, torch.bfloat16, device.torch_device)
    baseline = _cost(theirs, "bfloat16", "bf16")
    weights = max(0.0, baseline.weight_bytes - saved)
    own = replace(baseline, format=form, weight_bytes=weights, compute="fp16")
    return LoadedSides(
        TimedSide(own, subjects[0], model.engine.file.path.stat().st_size, model=model),
        TimedSide(baseline, subjects[1], model=KernelDecoder(theirs)),
        {**model.settings, "baseline_format": "bfloat16", "compute_type": "fp16"},
    )


def _floats(source: Source, dtype: torch.dtype, at: str) -> Any:
    from quantkit.model.source.open import model_class_of
    from quantkit.model.structure.experts import loadable

    kind = model_class_of(source.config, source.path, source.ref, source.trust_remote_code)
    config = kind.config_class.from_dict(dict(source.config))
    names = list(source.weights.entries)
    state = loadable(source.skeleton(), names, lambda name: source.weights.read(name).to(dtype))
    return built(kind, config, state, dtype).to(at)


def _measured(
    loaded: LoadedSides, runtime: str, plan: TimingPlan, device: GpuDevice, progress: Report | None
) -> list[Row]:
    generator = np.random.default_rng(plan.seed)
    rows = measure(
        loaded.subject,
        loaded.baseline,
        runtime=runtime,
        settings=loaded.settings,
        device=device.identity(),
        versions={**machine.versions(), "driver": str(device.describe().get("driver", ""))},
        plan=plan,
        ceilings=lambda: sampled(device, CEILING_BLOCKS, generator),
        progress=progress,
    )
    return rows if loaded.linears is None else explained(rows, loaded.linears)


def _cost(model: Any, name: str, compute: str) -> StepCost:
    """Return the bytes and operations of a decode step. Every weight is read once; the embedding costs one row."""
    config = model.config.get_text_config()
    sizes = [attention_sizes(config, index) for index in range(int(config.num_hidden_layers))]
    output, width = model.get_output_embeddings(), model.dtype.itemsize
    inside, stored, floats = 0.0, 0.0, 0.0
    for module in of_text(model):
        if isinstance(module, OpaqueLinear):
            inside += module.shape[0] * module.shape[1]
            stored += module.resident_bytes
        elif is_linear(module) and module is not output:
            inside += module.weight.numel()
            floats += module.weight.numel() * module.weight.element_size()
    packed = isinstance(output, OpaqueLinear)
    rows, columns = output.shape if packed else output.weight.shape
    top, float_top = 2.0 * rows * columns, 0.0 if packed else 2.0 * rows * columns
    inside -= rows * columns if packed else 0
    floats += 0 if packed else rows * columns * output.weight.element_size()
    return StepCost(
        name,
        stored + floats,
        kv_bytes_per_token=2.0 * width * sum(shared * size for _, shared, size in sizes),
        flops_per_token=2.0 * inside,
        attention_flops=4.0 * sum(heads * size for heads, _, size in sizes),
        head_flops=top,
        float_bytes=floats,
        float_head_flops=float_top,
        io_bytes_per_token=float(rows * width),
        compute=compute,
        attention=compute,
    )


def linears_seconds(model: Any, batch: int, table: Table | None) -> float | None:
    """Add up the recorded seconds of all packed linears at M = `batch`; None if one was not timed in its packing."""
    seconds, linears = 0.0, [module for module in of_text(model) if isinstance(module, OpaqueLinear)]
    for linear in linears:
        choices = () if table is None else table.choices.get(linear.shape, ())
        ours = isinstance(linear, QuantLinear)
        known = [one.seconds for one in choices if one.batch == batch and ours == (one.candidate != HUMMING)]
        if not known:
            return None
        seconds += known[0]
    return seconds if linears else None


def _format_of(bundle: Bundle) -> str:
    forms = [str(layer.scheme.get("format")) for layer in bundle.manifest.layers]
    return max(forms, key=forms.count, default="float")
