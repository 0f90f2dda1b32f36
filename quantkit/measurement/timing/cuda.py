"""A bundle on quantkit's own kernels, or in an engine, against the unquantized model on one GPU: steps and prefills.

Both are transformers' classes, of which only the linears differ, or one is an engine. A decode step of a batch is one
CUDA graph on either side (`runtimes.torch.decode_graph`), timed by the device's own clock, interleaved
(`timing.latency`). Beside each step on our kernels stands the sum of its linears as `quantkit tax` timed them one by
one, where the bundle carries that (`kernels.json`); the residual is what that sum does not explain: attention, norms,
the head, launches, weights that one product leaves in the cache for the next.
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
from quantkit.kernels.dispatch import Table
from quantkit.kernels.linear import QuantLinear
from quantkit.measurement.cuda.device import GpuDevice, allocated, fitting, sampled
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.size import saved_bytes
from quantkit.measurement.timing.latency import LoadedSides, TimedSide, explained, measure
from quantkit.measurement.timing.schedule import Step, TimingPlan
from quantkit.model.structure.kinds import positions
from quantkit.model.structure.traced import is_linear
from quantkit.runtimes.child import Report
from quantkit.runtimes.torch import decode_graph
from quantkit.runtimes.torch import packed as _packed
from quantkit.runtimes.torch.decode_graph import DecodeGraph
from quantkit.runtimes.torch.reloaded import built

if TYPE_CHECKING:
    from quantkit.model.source.open import Source
    from quantkit.runtimes.tensorrt.decode import EngineModel

RUNTIME = "torch"
# steps after which a sequence goes back to where it began
_STEPS = 256
CEILING_BLOCKS = 4


class KernelDecoder:
    """A model as `schedule.Timeable`.

    Args:
        model: a decoder of transformers, on its device.
        fuse: see `DecodeGraph`.
    """

    def __init__(self, model: Any, *, fuse: str = "") -> None:
        self.model, self.fuse = model, fuse
        self._at = next(model.parameters()).device
        self.context = positions(model.config.to_dict()) or 1 << 30

    def decode(self, batch: int, context: int) -> Step:
        """See `Timeable`; the cache holds `context` tokens to 255 more, and attention reads all its room."""
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
        return torch.randint(0, self.model.config.vocab_size, (batch, tokens), generator=generator).to(self._at)

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
    """Time a bundle against the model that it was made from.

    Args:
        bundle: a decoder, with a checkpoint.
        device: the GPU; a CPU in Triton's interpreter, for tests.
        dtype: of activations, of what is not quantized, and of the baseline.

    Returns:
        (rows as of `latency.measure` and `memory.peak`, what no kernel takes, in a sentence, or "").

    Raises InputError: `out-of-memory`, the two do not fit; `dispatch-invalid`.
    """
    layers, subjects = bundle.manifest.layers, (bundle.manifest.content_sha256, source.sha256)
    form = _format_of(bundle)
    loaded = kernel_sides(bundle.path, layers, source, form=form, subjects=subjects, device=device, dtype=dtype)
    return _measured(loaded, RUNTIME, plan, device, progress), loaded.said


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
    """Load a bundle on quantkit's own kernels and the model that it was made from in 16 bits.

    Args:
        place: the bundle, or a folder with `model/` and `kernels.json` of one.
        layers: as its manifest has them.
        form: of most of them.
        subjects: of both, in rows.
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
        baseline = allocated() - before - resident
    kind, width = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], str(dtype).removeprefix("torch.")
    costs = _cost(packed.model, form, kind), _cost(theirs, width, kind)
    return LoadedSides(
        TimedSide(costs[0], subjects[0], resident or None, model=KernelDecoder(packed.model)),
        TimedSide(costs[1], subjects[1], baseline or None, model=KernelDecoder(theirs)),
        {"dtype": width, "graphs": at == "cuda", "baseline_format": width, "compute_type": kind},
        said="; ".join(part for part in (reason, packed.said()) if part),
        linears=lambda batch: _linears_seconds(packed.model, batch, table),
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
    """Time an engine, which multiplies as it was built, against the model that its bundle was made from, in bfloat16.

    Raises InputError: `out-of-memory`, the two do not fit.
    """
    subjects, saved = (bundle.manifest.content_sha256, source.sha256), saved_bytes(bundle.manifest.layers)
    loaded = engine_sides(model, source, form=_format_of(bundle), saved=saved, subjects=subjects, device=device)
    return _measured(loaded, model.engine.library.name, plan, device, progress)


def engine_sides(
    model: EngineModel, source: Source, *, form: str, saved: float, subjects: tuple[str, str], device: GpuDevice
) -> LoadedSides:
    """Load the model that an engine was made from in bfloat16 beside it.

    Args:
        form: of the engine's weights.
        saved: bytes that they take less than in 16 bits: see `measurement.size.saved_bytes`.
        subjects: of both, in rows.

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
    """The unquantized model in transformers' class."""
    from quantkit.model.source.open import model_class_of

    kind = model_class_of(source.config, source.path, source.ref, source.trust_remote_code)
    config = kind.config_class.from_dict(dict(source.config))
    state = {name: source.weights.read(name).to(dtype) for name in source.weights.entries}
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
    """What a step of a decoder must move and compute: every weight once, but of the embedding no more than a row."""
    config = model.config.get_text_config()
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    output = model.get_output_embeddings()
    inside, stored, floats = 0.0, 0.0, 0.0
    for module in model.modules():
        if isinstance(module, QuantLinear):
            inside += module.packed.shape[0] * module.packed.shape[1]
            stored += module.packed.resident_bytes
        elif is_linear(module) and module is not output:
            inside += module.weight.numel()
            floats += module.weight.numel() * module.weight.element_size()
    top = output.weight
    floats += top.numel() * top.element_size()
    return StepCost(
        name,
        stored + floats,
        kv_bytes_per_token=2.0 * layers * kv_heads * head * top.element_size(),
        flops_per_token=2.0 * inside,
        attention_flops=4.0 * layers * heads * head,
        head_flops=2.0 * top.numel(),
        float_bytes=floats,
        float_head_flops=2.0 * top.numel(),
        io_bytes_per_token=float(top.shape[0] * top.element_size()),
        compute=compute,
        attention=compute,
    )


def _linears_seconds(model: Any, batch: int, table: Table | None) -> float | None:
    """The sum of a model's packed linears at M = `batch` as they were timed one by one; None where one was not."""
    seconds = 0.0
    shapes = [module.packed.shape for module in model.modules() if isinstance(module, QuantLinear)]
    for shape in shapes:
        choices = () if table is None else table.choices.get(shape, ())
        known = next((choice.seconds for choice in choices if choice.batch == batch), None)
        if known is None:
            return None
        seconds += known
    return seconds if shapes else None


def _format_of(bundle: Bundle) -> str:
    """The format of most of a bundle's layers."""
    forms = [str(layer.scheme.get("format")) for layer in bundle.manifest.layers]
    return max(forms, key=forms.count, default="float")
