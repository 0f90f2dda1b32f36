"""Load a bundle's model with its quantized linears in our kernels: weights stay packed in memory.

transformers builds the classes and loads the other tensors; every quantized linear becomes a `QuantLinear`. Linears
with one input are joined to one product (`kernels.modules`); a run of the class without values shows which. A linear
that no kernel of ours takes (by its format or groups) goes to another library, if it is installed and takes it
(`kernels.humming`); so does one whose measured choices name that library. The remaining ones (with a fixed input scale,
say) are expanded to floats, their inputs and the cache stay floats, and the reason is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit import limits, machine
from quantkit.bundle import LayerEntry
from quantkit.errors import InputError, MissingDependency
from quantkit.formats import QuantTensor
from quantkit.kernels.dispatch import EXPANDED, FILE, HUMMING, OURS, Recorded
from quantkit.model.finished import DenseWeights
from quantkit.model.source.open import open_written
from quantkit.model.source.weights import Weights
from quantkit.model.structure.names import same
from quantkit.model.structure.traced import hooked, is_linear
from quantkit.runtimes.torch.decode_graph import attend_by_kernel
from quantkit.runtimes.torch.reloaded import built, described
from quantkit.runtimes.torch.reloaded import expanded as dense
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.kernels.dispatch import Table
    from quantkit.kernels.humming import HummingLinear
    from quantkit.kernels.layout import PackedWeight
    from quantkit.kernels.linear import QuantLinear
    from quantkit.kernels.modules import OpaqueLinear
    from quantkit.model.source.open import Source

_TRITON = "triton"


@dataclass(frozen=True)
class PackedModel:
    """A loaded model.

    Args:
        model: transformers model, eval mode, on its device.
        expanded: linear -> reason that its weight is expanded.
        apart: linears with one input -> reason that they are not one product.
        refused: linears of one product -> reason of the library that was the fastest.
        attention: reason that decode steps attend by torch; "": by our kernel.
    """

    model: Any
    expanded: dict[str, str]
    apart: dict[tuple[str, ...], str]
    refused: dict[tuple[str, ...], str]
    attention: str

    def said(self) -> str:
        """Describe the fallbacks, a sentence for each kind; "" if there are none."""
        sentences = (
            ("no kernel takes these, which are expanded to floats", self.expanded),
            ("these have one input and are multiplied one by one", self.apart),
            ("humming was the fastest and does not take these, which are in our kernels", self.refused),
        )
        parts = [f"{what}: {_counted(reasons.values())}" for what, reasons in sentences if reasons]
        return "; ".join(parts + [f"decode steps attend by torch: {self.attention}"] * bool(self.attention))


def _counted(reasons: Iterable[str]) -> str:
    groups: dict[str, list[str]] = {}
    for reason in reasons:
        groups.setdefault(reason.rpartition("; ")[2], []).append(reason)
    return ", ".join(f"{len(alike)} (the first: {alike[0]})" for alike in groups.values())


def recorded(place: Path, device: str) -> tuple[Table | None, str]:
    """Return the kernel choices of a bundle that hold for a device of this name and these versions, or None and the
    reason.

    Args:
        place: folder of the bundle, or of a device's copy.

    Raises:
        InputError: `dispatch-invalid`.
    """
    path = place / FILE
    if not path.is_file():
        return None, ""
    choices = Recorded.of(limits.read(path))
    reason = choices.unlike(device)
    return (None if reason else choices.table), reason


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
    model_class, config = described(folder)
    skeleton, weights = without_values(model_class, config), dense(source).weights
    packed, others, reasons = _packed(layers, weights, _linears(skeleton), device, dtype, source, table)
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
    foreign = partial(_foreign, weights=weights, source=source, dtype=dtype, device=device)
    apart, refused = placed(model, packed, others, device=device, skeleton=skeleton, table=table, foreign=foreign)
    return PackedModel(model.to(device), reasons, apart, refused, attend_by_kernel(model))


def placed(
    model: Any,
    packed: Mapping[str, PackedWeight],
    others: Mapping[str, HummingLinear],
    *,
    device: str,
    skeleton: Any,
    table: Table | None = None,
    foreign: Callable[[Sequence[str]], HummingLinear] | None = None,
) -> tuple[dict[tuple[str, ...], str], dict[tuple[str, ...], str]]:
    """Put layers in the places of a model's linears; return the fields `apart` and `refused` of `PackedModel`.

    Args:
        model: changed in place; the biases stay.
        packed: linear -> weight for our kernels.
        others: linear -> another library's linear.
        device: device of the layers.
        skeleton: the same model on the meta device.
        table: see `load`.
        foreign: function of the linears of a product to that product in another library's packing; None: without it.
    """
    from quantkit.kernels.modules import JoinedMember, JoinedProduct, OpaqueLinear

    refused: dict[tuple[str, ...], str] = {}

    def layer(names: Sequence[str], weight: PackedWeight) -> OpaqueLinear:
        if foreign is not None and _candidates(table, weight.shape) == {HUMMING}:
            try:
                return foreign(names)
            except InputError as error:
                refused[tuple(names)] = f"{error.value}; {error.rule}"
        return _layer(weight, table)

    def bias(name: str) -> torch.Tensor | None:
        old = model.get_submodule(name).bias
        return None if old is None else old.detach().to(device)

    left, placing = dict(packed), dict[str, OpaqueLinear](others)
    groups, apart = _joined(skeleton, packed, others)
    for members, weight in groups.items():
        whole = JoinedProduct(layer(members, weight), [left.pop(name).shape[0] for name in members])
        for place, name in enumerate(members):
            model.set_submodule(name, JoinedMember(whole, place, bias(name)))
    for name, weight in left.items():
        placing[name] = layer([name], weight)
    for name, single in placing.items():
        single.bias = bias(name)
        model.set_submodule(name, single)
    return apart, refused


def _candidates(table: Table | None, shape: tuple[int, int]) -> set[str]:
    return set() if table is None else {choice.candidate for choice in table.choices.get(shape, ())}


def _layer(weight: PackedWeight, table: Table | None) -> QuantLinear:
    from quantkit.kernels.linear import QuantLinear, other

    chosen = _candidates(table, weight.shape)
    # a table may name a kernel that cannot run a layer stored in another way than most
    known = table if chosen and chosen <= {OURS, other(weight)} else None
    return QuantLinear(weight, table=known)


def _joined(
    skeleton: Any, packed: Mapping[str, PackedWeight], others: Iterable[str]
) -> tuple[dict[tuple[str, ...], PackedWeight], dict[tuple[str, ...], str]]:
    """Return (members -> their joined weight, members -> reason for none) of the linears with one input."""
    from quantkit.kernels.modules import apart_by, joined

    weights: dict[tuple[str, ...], PackedWeight] = {}
    apart: dict[tuple[str, ...], str] = {}
    try:
        groups = one_input(skeleton) if packed or others else []
    except Exception as error:  # of a class that does not run without values
        problem = str(error).partition("\n")[0]
        return {}, {tuple(packed): f"{type(skeleton).__name__}: {problem}; it does not run without values"}
    for group in groups:
        alike: list[list[str]] = []
        for name in (name for name in group if name in packed):
            reasons = [apart_by(packed[name], packed[names[0]]) for names in alike]
            if "" in reasons:
                alike[reasons.index("")].append(name)
            else:
                alike.append([name])
                apart |= {group: f"{name}: {reasons[0]}"} if reasons else {}
        weights |= {tuple(names): joined([packed[name] for name in names]) for names in alike if len(names) > 1}
        if len(foreign := [name for name in group if name in others]) > 1:
            apart[group] = f"{foreign[0]}; another library multiplies them"
    return weights, apart


def joined_layers(folder: Path, layers: Iterable[LayerEntry]) -> list[LayerEntry]:
    """Return a bundle's layers as the kernels multiply them: those that are joined as one, named `q_proj+k_proj`.

    Args:
        folder: folder of the checkpoint.
        layers: entries of the bundle's manifest.
    """
    from quantkit.kernels.layout import ROWS

    known = {layer.name: layer for layer in layers}
    try:
        groups = one_input(without_values(*described(folder)))
    except Exception:  # `load` gives the reason
        groups = []
    for group in groups:
        alike: dict[str, list[LayerEntry]] = {}
        for layer in (known[name] for name in group if name in known):
            if layer.shape[0] % ROWS == 0 and layer.scheme.get("scale") != "double":
                alike.setdefault(repr((layer.scheme, layer.activations)), []).append(layer)
        for members in alike.values():
            for member in members:
                del known[member.name]
            first, *others = members
            name = "+".join([first.name, *(other.name.rpartition(".")[2] for other in others)])
            shape = [sum(member.shape[0] for member in members), first.shape[1]]
            known[name] = first.model_copy(update={"name": name, "shape": shape})
    return list(known.values())


def one_input(skeleton: Any) -> list[tuple[str, ...]]:
    """Group the linears of a model without values by the tensor that they read, in the order in which they run.

    A linear that runs more than once, and one whose output may not lie in a wider row, is alone.
    """
    readers: dict[tuple[int, int], list[str]] = {}
    kept, runs = [], Counter[str]()

    def note(name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            kept.append(inputs[0])  # or its place would be taken again
            readers.setdefault((id(inputs[0]), inputs[0]._version), []).append(name)
            runs[name] += 1

        return hook

    def wider(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output, output], dim=-1)[..., : output.shape[-1]]

    linears = {name: module for name, module in skeleton.named_modules() if is_linear(module)}
    inputs = {name: value.to("meta") for name, value in skeleton.dummy_inputs.items()}
    with torch.no_grad():
        with hooked(module.register_forward_pre_hook(note(name)) for name, module in linears.items()):
            skeleton(**inputs)
        groups = [
            tuple(names) for names in readers.values() if len(names) > 1 and all(runs[name] == 1 for name in names)
        ]
        with hooked(linears[name].register_forward_hook(wider) for names in groups for name in names):
            skeleton(**inputs)
    return groups


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
                # any other entry of the table for this shape was measured for another format
                if _candidates(table, weights.layout.shape(prefix, weights.stored.read)) == {EXPANDED}:
                    raise InputError("kernel-unsupported", prefix, "measured", f"{HUMMING} was not the fastest")
                others[prefix] = _foreign([prefix], weights, source, dtype, device)
            except InputError as second:
                reasons[prefix] = f"{error.value}, {second.value}; {error.rule}, {second.rule}"
    return packed, others, reasons


def _foreign(names: Sequence[str], weights: Weights, source: Source, dtype: torch.dtype, device: str) -> HummingLinear:
    """Make the product of linears that are joined along N in another library's packing. Raises InputError."""
    from quantkit.kernels.humming import NAME, HummingLinear

    assert isinstance(weights, DenseWeights) and weights.layout is not None
    config = source.config["quantization_config"]
    groups = list(config.get("config_groups", {}).values())
    if not groups:
        raise InputError("kernel-unsupported", names[0], "its layout", f"{NAME} reads compressed-tensors")
    group = next((one for one in groups if any(same(names[0], name) for name in one["targets"])), groups[0])
    # a layer gets only its own tensors, by their names in it
    stored: dict[str, list[torch.Tensor]] = {}
    for prefix in names:
        for name in weights.stored.entries:
            if name.startswith(f"{prefix}.") and name != f"{prefix}.bias":
                stored.setdefault(name.removeprefix(f"{prefix}."), []).append(weights.stored.read(name))
    shapes = [weights.layout.shape(prefix, weights.stored.read) for prefix in names]
    shape = sum(rows for rows, _ in shapes), shapes[0][1]
    parts = {
        name: torch.tensor(shape) if name == "weight_shape" else torch.cat(tensors) if len(names) > 1 else tensors[0]
        for name, tensors in stored.items()
    }
    return HummingLinear(parts, {"format": config["format"], **group}, shape, dtype=dtype, device=device)


def without_values(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device, in bfloat16: grouped products of experts know no other type there."""
    with torch.device("meta"):
        return model_class._from_config(config, dtype=torch.bfloat16).eval()


def _linears(skeleton: Any) -> set[str]:
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
