"""Load a bundle's model with its quantized linears in our kernels: weights stay packed in memory.

transformers builds the classes and loads the other tensors; every quantized linear becomes a `QuantLinear`. A linear
that no kernel of ours takes (by its format or groups) goes to another library, if it is installed and takes it
(`kernels.humming`). The remaining ones (with a fixed input scale, say) are expanded to floats, their inputs and the
cache stay floats, and the reason is recorded.
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
    """A loaded model.

    Args:
        model: transformers model, eval mode, on its device.
        expanded: linear -> reason that its weight is expanded.
    """

    model: Any
    expanded: dict[str, str]

    def said(self) -> str:
        """Describe the fallbacks in a sentence; "" if there are none."""
        groups: dict[str, list[str]] = {}
        for reason in self.expanded.values():
            groups.setdefault(reason.rpartition("; ")[2], []).append(reason)
        parts = [f"{len(reasons)} (the first: {reasons[0]})" for reasons in groups.values()]
        return f"no kernel takes these, which are expanded to floats: {', '.join(parts)}" if parts else ""


def recorded(place: Path, device: str) -> tuple[Table | None, str]:
    """Return the kernel choices of a bundle for a device of this name, or None and the reason.

    Args:
        place: folder of the bundle, or of a device's copy.

    Raises:
        InputError: `dispatch-invalid`.
    """
    path = place / FILE
    if not path.is_file():
        return None, ""
    choices = Recorded.of(limits.read(path))
    if choices.device.get("name") != device:
        return None, f"{FILE} was measured on {choices.device.get('name')}, and here is {device}: it is not used"
    return choices.table, ""


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
        folder: folder of the checkpoint.
        layers: storage of every linear, from the bundle's manifest.
        device: `cuda`, `cuda:1`; `cpu` in Triton's interpreter, for tests.
        dtype: float16 or bfloat16; None: the checkpoint's own, float16 instead of float32.
        table: kernel for every batch, as measured; shapes that it lacks take `linear.unmeasured`.

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
    # nothing is written into the dense memory of linears that stay packed, so the system never allocates it
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
        # a table may name a kernel that cannot run a layer stored in another way than most
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
    """Return (linear -> weight for our kernels, linear -> another library's linear, linear -> reason for neither)."""
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
    """Make a linear in another library's kernels. Raises InputError if none fits, or if it was not the fastest."""
    from quantkit.kernels.humming import NAME, HummingLinear

    assert weights.layout is not None
    shape = weights.layout.shape(prefix, weights.stored.read)
    # any other entry of the table for this shape was measured for another format
    if table is not None and {choice.candidate for choice in table.choices.get(shape, ())} == {EXPANDED}:
        raise InputError("kernel-unsupported", prefix, "measured", f"{NAME} was not the fastest")
    config = source.config["quantization_config"]
    groups = list(config.get("config_groups", {}).values())
    if not groups:
        raise InputError("kernel-unsupported", prefix, "its layout", f"{NAME} reads compressed-tensors")
    group = next((one for one in groups if any(same(prefix, name) for name in one["targets"])), groups[0])
    # a layer gets only its own tensors, by their names in it
    own = f"{prefix}."
    stored = {
        name.removeprefix(own): weights.stored.read(name) for name in weights.stored.entries if name.startswith(own)
    }
    stored.pop("bias", None)
    return HummingLinear(stored, {"format": config["format"], **group}, shape, dtype=dtype, device=device)


def _linears(model_class: Any, config: Any) -> set[str]:
    """List the names of a model's linears; nothing is allocated."""
    with torch.device("meta"):
        skeleton = model_class._from_config(config)
    return {name for name, module in skeleton.named_modules() if is_linear(module)}


def _entry(prefix: str, layers: dict[str, LayerEntry], linears: set[str]) -> LayerEntry:
    """Return the manifest's entry of a stored linear. Raises InputError if the model has no such linear."""
    if prefix not in layers or prefix not in linears:
        raise InputError("layer-unknown", prefix, "stored under another name", "the model has no linear of this name")
    return layers[prefix]


def _for_kernel(tensor: QuantTensor, layer: LayerEntry) -> PackedWeight:
    """Pack a layer for its kernel. Raises InputError if there is none."""
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
