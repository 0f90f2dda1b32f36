"""A bundle's model with its quantized linears in our own kernels: weights stay packed where they are multiplied.

transformers builds the classes and loads what is not quantized; every quantized linear becomes a `QuantLinear`. One
that none of our kernels takes (its format, its groups) becomes another library's, if that is installed and takes it
(`kernels.humming`). What is left (a fixed input scale, say) is expanded to floats, its inputs and the cache stay
floats, and the reason is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit import limits, machine
from quantkit.bundle import LayerEntry
from quantkit.errors import InputError, MissingDependency
from quantkit.formats import QuantTensor
from quantkit.kernels.dispatch import EXPANDED, FILE, OURS, Recorded
from quantkit.model.finished import DenseWeights
from quantkit.model.source.open import open_written
from quantkit.model.source.weights import Weights
from quantkit.model.structure.names import same
from quantkit.model.structure.traced import is_linear
from quantkit.runtimes.torch.reloaded import built, described
from quantkit.runtimes.torch.reloaded import expanded as dense
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.kernels.dispatch import Table
    from quantkit.kernels.humming import HummingLinear
    from quantkit.kernels.layout import PackedWeight
    from quantkit.model.source.open import Source

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


def recorded(place: Path, device: str) -> tuple[Table | None, str]:
    """(the choices that a bundle carries for a device of this name or None, why they are not taken or "").

    Args:
        place: the bundle, or a folder with what another machine has of it.

    Raises:
        InputError: `dispatch-invalid`.
    """
    path = place / FILE
    if not path.is_file():
        return None, ""
    found = Recorded.of(limits.read(path))
    if found.device.get("name") != device:
        return None, f"{FILE} was measured on {found.device.get('name')}, and here is {device}: it is not used"
    return found.table, ""


def load(
    folder: Path,
    layers: Iterable[LayerEntry],
    *,
    device: str,
    dtype: torch.dtype | None = None,
    table: Table | None = None,
) -> PackedModel:
    """Load a bundle's checkpoint onto a device.

    Args:
        folder: the checkpoint.
        layers: how each linear is stored, as the bundle's manifest says it.
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
        raise InputError("kernel-dtype", "dtype", str(dtype), "kernels multiply in float16 or bfloat16")
    from quantkit.kernels.linear import QuantLinear, other
    from quantkit.kernels.matmul import Workspace

    model_class, config = described(folder)
    weights = dense(source).weights
    packed, others, reasons = _packed(layers, weights, _linears(model_class, config), device, dtype, source, table)
    if (source.config.get("quantization_config") or {}).get("kv_cache_scheme"):
        reasons["cache"] = "keys and values are kept as floats"
    # of what stays packed nothing is written into the memory that stands for it, so that it is never taken
    state = {
        name: torch.empty(entry.shape, dtype=dtype)
        if name.removesuffix(".weight") in {**packed, **others}
        else weights.read(name)
        for name, entry in weights.entries.items()
    }
    model = built(model_class, config, state, dtype)
    memory = Workspace()
    for name, weight in packed.items():
        old = model.get_submodule(name)
        bias = None if old.bias is None else old.bias.detach().to(device)
        chosen = {choice.candidate for choice in table.choices.get(weight.shape, ())} if table is not None else set()
        # of a layer that is stored otherwise than most a table may say what it cannot run
        known = table if chosen and chosen <= {OURS, other(weight)} else None
        model.set_submodule(name, QuantLinear(weight, bias, table=known, memory=memory))
    for name, layer in others.items():
        old = model.get_submodule(name)
        layer.bias = None if old.bias is None else old.bias.detach().to(device)
        model.set_submodule(name, layer)
    return PackedModel(model.to(device), reasons)


def _packed(
    layers: Iterable[LayerEntry],
    weights: Weights,
    linears: set[str],
    device: str,
    dtype: torch.dtype,
    source: Source,
    table: Table | None,
) -> tuple[dict[str, PackedWeight], dict[str, HummingLinear], dict[str, str]]:
    """(linear -> its weight for our kernels, linear -> another library's, linear -> why there is neither)."""
    packed: dict[str, PackedWeight] = {}
    others: dict[str, HummingLinear] = {}
    reasons: dict[str, str] = {}
    if not isinstance(weights, DenseWeights) or weights.layout is None:
        return packed, others, reasons
    known = {layer.name: layer for layer in layers}
    for prefix in weights.packed.values():
        try:
            layer = _entry(prefix, known, linears)
            scheme = WeightScheme.model_validate(layer.scheme)
            tensor = weights.layout.read_back(prefix, scheme, weights.stored.read)
        except InputError as error:
            reasons[prefix] = f"{error.value}; {error.rule}"
            continue
        try:
            packed[prefix] = _for_kernel(tensor, layer).to(device)
        except InputError as error:
            try:
                others[prefix] = _other(prefix, weights, source, dtype, device, table)
            except InputError as second:
                reasons[prefix] = f"{error.value}, {second.value}; {error.rule}, {second.rule}"
    return packed, others, reasons


def _other(
    prefix: str, weights: DenseWeights, source: Source, dtype: torch.dtype, device: str, table: Table | None
) -> HummingLinear:
    """A linear in another library's kernels. Raises InputError where there is none, or it was not the fastest."""
    from quantkit.kernels.humming import NAME, HummingLinear

    assert weights.layout is not None
    shape = weights.layout.shape(prefix, weights.stored.read)
    # what else a table may have for this shape was chosen for another format
    if table is not None and {choice.candidate for choice in table.choices.get(shape, ())} == {EXPANDED}:
        raise InputError("kernel-unsupported", prefix, "measured", f"{NAME} was not the fastest")
    config = source.config["quantization_config"]
    groups = list(config.get("config_groups", {}).values())
    if not groups:
        raise InputError("kernel-unsupported", prefix, "its layout", f"{NAME} reads compressed-tensors")
    group = next((each for each in groups if any(same(prefix, name) for name in each["targets"])), groups[0])
    # a layer has none of the model's tensors but its own, by their own names
    own = f"{prefix}."
    stored = {
        name.removeprefix(own): weights.stored.read(name) for name in weights.stored.entries if name.startswith(own)
    }
    stored.pop("bias", None)
    return HummingLinear(stored, {"format": config["format"], **group}, shape, dtype=dtype, device=device)


def _linears(model_class: Any, config: Any) -> set[str]:
    """The names of a model's linears; nothing is allocated."""
    with torch.device("meta"):
        skeleton = model_class._from_config(config)
    return {name for name, module in skeleton.named_modules() if is_linear(module)}


def _entry(prefix: str, layers: dict[str, LayerEntry], linears: set[str]) -> LayerEntry:
    """What the manifest says of a stored linear. Raises InputError where it is no linear of the model."""
    if prefix not in layers or prefix not in linears:
        raise InputError("layer-unknown", prefix, "stored under another name", "it is no single linear of the model")
    return layers[prefix]


def _for_kernel(tensor: QuantTensor, layer: LayerEntry) -> PackedWeight:
    """For the kernel that a layer needs. Raises InputError where there is none."""
    from quantkit.kernels.layout import pack

    inputs = layer.activations
    if inputs is None:
        return pack(tensor)
    own = inputs.get("format") == tensor.scheme.format
    by_token = inputs.get("granularity") == "token" and inputs.get("symmetric", True)
    if not (own and inputs.get("dynamic") and by_token):
        rule = "kernels quantize inputs by token as they come, in the format of the weight"
        raise InputError("kernel-unsupported", layer.name, f"inputs in {inputs.get('format')}", rule)
    return pack(tensor, native=True)
