"""A bundle's model with its quantized linears in our own kernels: weights stay packed where they are multiplied.

transformers builds the classes and loads what is not quantized; every quantized linear becomes a `QuantLinear`. One
that no kernel takes (its format, its groups, a fixed input scale) is expanded to floats, its inputs and the cache stay
floats, and the reason is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.bundle import Bundle, LayerEntry
from quantkit.errors import InputError, MissingDependency
from quantkit.formats import QuantTensor
from quantkit.model import run_time
from quantkit.model.open import open_written
from quantkit.model.structure import is_linear
from quantkit.model.weights import Weights
from quantkit.plan import machine
from quantkit.runtimes._reloaded import ExpandedWeights
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.kernels.dispatch import Table
    from quantkit.kernels.layout import PackedWeight

_TRITON = "triton"


@dataclass(frozen=True)
class PackedModel:
    """What was loaded.

    Args:
        model: a transformers model, eval mode, on its device.
        expanded: linear -> why it runs on an expanded weight.
    """

    model: Any
    expanded: dict[str, str]

    def said(self) -> str:
        """The fallbacks in a sentence; "" where there is none."""
        groups: dict[str, list[str]] = {}
        for reason in self.expanded.values():
            groups.setdefault(reason.rpartition("; ")[2], []).append(reason)
        parts = [f"{len(reasons)} (the first: {reasons[0]})" for reasons in groups.values()]
        return f"no kernel takes these, which are expanded to floats: {', '.join(parts)}" if parts else ""


def load(
    bundle: Bundle, folder: Path, *, device: str, dtype: torch.dtype | None = None, table: Table | None = None
) -> PackedModel:
    """Load a bundle's checkpoint onto a device.

    Args:
        bundle: whose manifest says how each linear is stored.
        folder: of its checkpoint.
        device: `cuda`, `cuda:1`; `cpu` in Triton's interpreter, for tests.
        dtype: float16 or bfloat16; None: the checkpoint's own, float16 for one of float32.
        table: which kernel at which batch, as measured; shapes that it lacks take `linear.unmeasured`.

    Raises:
        MissingDependency: triton, transformers.
        InputError: `kernel-dtype`.
    """
    if not machine.has(_TRITON):
        raise MissingDependency(_TRITON, extra="gpu", purpose="kernels for quantized weights")
    source = open_written(folder)
    dtype = dtype or (torch.bfloat16 if source.dtype == "bfloat16" else torch.float16)
    if dtype not in (torch.float16, torch.bfloat16):
        raise InputError(
            "kernel-dtype", where="dtype", value=str(dtype), rule="kernels multiply in float16 or bfloat16"
        )
    import transformers

    from quantkit.kernels.linear import QuantLinear
    from quantkit.kernels.workspace import Workspace

    settings, stored = source.config.get("quantization_config"), source.weights
    stored = replace(
        stored, entries={name: entry for name, entry in stored.entries.items() if not name.endswith(run_time.PARTS)}
    )
    found: Weights = stored
    packed: dict[str, PackedWeight] = {}
    expanded: dict[str, str] = {}
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    if settings:
        del config.quantization_config
        if settings.get("kv_cache_scheme"):
            expanded["cache"] = "keys and values are kept as floats"
    if settings and not run_time.weights_are_dense(settings):
        found = weights = ExpandedWeights.of(stored, settings, source.dtype)
        layers = {layer.name: layer for layer in bundle.manifest.layers}
        linears = _linears(model_class, config)
        for prefix in weights.packed.values():
            try:
                layer = _entry(prefix, layers, linears)
                scheme = WeightScheme.model_validate(layer.scheme)
                tensor = weights.layout.read_back(prefix, scheme, stored.read)
                packed[prefix] = _pack(tensor, layer).to(device)
            except InputError as error:
                expanded[prefix] = f"{error.value}; {error.rule}"
    # of what stays packed nothing is written into the memory that stands for it, so that it is never taken
    state = {
        name: torch.empty(entry.shape, dtype=dtype) if name.removesuffix(".weight") in packed else found.read(name)
        for name, entry in found.entries.items()
    }
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()
    memory = Workspace()
    for name, weight in packed.items():
        old = model.get_submodule(name)
        bias = None if old.bias is None else old.bias.detach().to(device)
        known = table if table is not None and weight.shape in table.choices else None
        model.set_submodule(name, QuantLinear(weight, bias, table=known, memory=memory))
    return PackedModel(model.to(device), expanded)


def _linears(model_class: Any, config: Any) -> set[str]:
    """The names of a model's linears; nothing is allocated."""
    with torch.device("meta"):
        skeleton = model_class._from_config(config)
    return {name for name, module in skeleton.named_modules() if is_linear(module)}


def _entry(prefix: str, layers: dict[str, LayerEntry], linears: set[str]) -> LayerEntry:
    """What the manifest says of a stored linear. Raises InputError where it is no linear of the model."""
    if prefix not in layers or prefix not in linears:
        raise InputError(
            "layer-unknown", where=prefix, value="stored under another name", rule="it is no single linear of the model"
        )
    return layers[prefix]


def _pack(tensor: QuantTensor, layer: LayerEntry) -> PackedWeight:
    """For the kernel that a layer needs. Raises InputError where there is none."""
    from quantkit.kernels.layout import pack

    inputs = layer.activations
    if inputs is None:
        return pack(tensor)
    own = inputs.get("format") == tensor.scheme.format
    by_token = inputs.get("granularity") == "token" and inputs.get("symmetric", True)
    if not (own and inputs.get("dynamic") and by_token):
        raise InputError(
            "kernel-unsupported",
            where=layer.name,
            value=f"inputs in {inputs.get('format')}",
            rule="kernels quantize inputs by token as they come, in the format of the weight",
        )
    return pack(tensor, native=True)
