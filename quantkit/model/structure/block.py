"""A block as passes see it: linears by name, schemes, folds, and codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.activation import InputScale, Moved
from quantkit.model.streaming.calls import filed, is_in_file
from quantkit.model.streaming.transforms import QuantizedCache, QuantizedInput
from quantkit.model.structure import fold as folds
from quantkit.model.structure.fold import Fold, Ways
from quantkit.model.structure.traced import SharedInput, Structure, set_parameter, set_weight, weight_of
from quantkit.scheme import WeightScheme

# elements of a weight whose errors are summed at a time
_PIECE = 1 << 23


@dataclass
class Block:
    """One decoder or encoder layer with weights, while passes work on it.

    Args:
        name: full name, such as `model.layers.3`; empty if the whole model is the block.
        index: number of the block.
        module: the layer, with float32 weights; passes change it in place.
        structure: its traced structure.
        folds: name of a shared input -> place for its scale, proved on this block.
        declined: name of a shared input -> reason why there is no fold.
        schemes: linear -> scheme of its weight; None for high precision.
        dtype: stored dtype of unquantized tensors of this block.
        fuses: True if an export gains from linears stored as one: `fusions`.
        tensors: linear -> its codes, set by `assign`.
        original: original module, if a pass needs the original stream; folds change it too.
        inputs: linear -> quantizer of its input, active after `assign`.
        keeps_errors: True to keep `weight_errors`, as large as the block.
        weight_errors: linear with a bias -> its weight less the dequantized codes, [N, K].
    """

    name: str
    index: int
    module: nn.Module
    structure: Structure
    folds: Mapping[str, Fold]
    declined: Mapping[str, str]
    schemes: Mapping[str, WeightScheme | None]
    dtype: torch.dtype
    seed: int = 0
    fuses: bool = False
    fusions: list[tuple[str, ...]] = field(default_factory=list)
    tensors: dict[str, QuantTensor] = field(default_factory=dict)
    original: nn.Module | None = None
    inputs: Mapping[str, QuantizedInput] = field(default_factory=dict)
    cache: QuantizedCache | None = None
    keeps_errors: bool = False
    weight_errors: dict[str, Tensor] = field(default_factory=dict)

    def full_name(self, linear: str) -> str:
        """Return the full name: `model.layers.3.self_attn.q_proj` for `self_attn.q_proj`."""
        return f"{self.name}.{linear}" if self.name else linear

    def linears(self) -> list[str]:
        """List the linears to quantize, in the order in which they run."""
        return [name for name in self.structure.linears if self.schemes.get(name) is not None]

    def groups(self) -> list[SharedInput]:
        """List the shared inputs with at least one linear to quantize, with only those members."""
        kept = [
            replace(group, members=tuple(name for name in group.members if self.schemes.get(name) is not None))
            for group in self.structure.groups
        ]
        return [group for group in kept if group.members]

    def alike(self, members: Iterable[str]) -> list[list[str]]:
        """Group linears to quantize by scheme, in their order."""
        groups: dict[WeightScheme, list[str]] = {}
        for name in members:
            if self.schemes.get(name) is not None:
                groups.setdefault(self.scheme(name), []).append(name)
        return list(groups.values())

    def scheme(self, linear: str) -> WeightScheme:
        """Return the scheme of a linear to quantize."""
        scheme = self.schemes[linear]
        assert scheme is not None
        return scheme

    def weight(self, linear: str) -> Tensor:
        """Return the current weight [N, K + padding], float32; do not change it."""
        return self._padded(linear, self.module)

    def original_weight(self, linear: str) -> Tensor:
        """Return a linear's weight in the original stream, float32: with folds, without clipping."""
        assert self.original is not None
        weight = self._padded(linear, self.original)
        moved = self.inputs[linear].moved if linear in self.inputs else None
        if moved is None:
            return weight
        return weight * torch.nn.functional.pad(moved.scale, (0, weight.shape[1] - moved.scale.shape[0]))

    def _padded(self, linear: str, module: nn.Module) -> Tensor:
        weight = weight_of(module.get_submodule(linear)).float()
        padding = self.scheme(linear).padding(weight.shape[1])
        return torch.nn.functional.pad(weight, (0, padding)) if padding else weight

    def assign(self, linear: str, tensor: QuantTensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Set the codes of a linear; the block then computes with dequantized weights, on inputs quantized as in its
        kernel.

        Args:
            linear: name of the linear.
            tensor: its codes.
            known: the dequantized weight [N, K] float32, and the result of this method, if already computed.

        Returns:
            Relative squared weight error, `||W - dequantize(codes)||² / ||W||²`, [] float64 on its device.
        """
        module = self.module.get_submodule(linear)
        weight = weight_of(module).float()
        values = known[0] if known else load_format(tensor.scheme.format).dequantize(tensor)[:, : weight.shape[1]]
        # codes of a weight in a file go into one too, or those of all experts would be in memory
        self.tensors[linear] = tensor.replace(codes=filed(tensor.codes)) if is_in_file(module.weight) else tensor  # type: ignore[arg-type]
        if self.keeps_errors and getattr(module, "bias", None) is not None:
            # if a later pass improves codes, this includes the error of the first ones
            self.weight_errors[linear] = weight - values + self.weight_errors.get(linear, 0.0)
        set_weight(module, values)
        if linear in self.inputs:
            self.inputs[linear].on = True
        if known:
            return known[1]
        energy = lost = torch.zeros((), dtype=torch.float64, device=weight.device)
        step = max(1, _PIECE // weight.shape[1])
        for ours, theirs in zip(weight.split(step), values.split(step), strict=True):
            energy = energy + ours.square().sum(dim=1).double().sum()
            lost = lost + (ours - theirs).square_().sum(dim=1).double().sum()
        return lost / torch.where(energy > 0, energy, 1.0)

    def input_scales(self) -> dict[str, InputScale]:
        """Map full names of linears with codes to the fixed scale of their input, if any."""
        hooks = {name: hook for name, hook in self.inputs.items() if name in self.tensors}
        return {self.full_name(name): hook.static for name, hook in hooks.items() if hook.static is not None}

    def cache_scales(self) -> tuple[str, InputScale, InputScale] | None:
        """Return the block's name and the fixed scales of its keys and values, or None."""
        if self.cache is None or self.cache.keys is None or self.cache.values is None:
            return None
        return self.name, self.cache.keys, self.cache.values

    def replace(self, linear: str, weight: Tensor) -> None:
        """Replace a linear's weight [N, K], before its codes are assigned."""
        set_weight(self.module.get_submodule(linear), weight)

    def move(self, linear: str, moved: Moved) -> None:
        """Transform the channels of a linear's input before quantization, and compensate in weight and bias.

        The shift must be zeros for a linear without a bias.
        """
        module = self.module.get_submodule(linear)
        weight = weight_of(module).double()
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is not None:
            whole = bias.double() + weight @ moved.shift.double()
            set_parameter(module, "bias", whole.to(bias.dtype))
        set_weight(module, (weight * moved.scale.double()).float())
        self.inputs[linear].moved = moved

    def fold(self, group: SharedInput, scales: Tensor, ways: Ways | None = None) -> Tensor:
        """Multiply the group's input columns by `scales` [K] and divide the producer by them; see `folds.apply`."""
        fold = self.folds[self.group_name(group)]
        whole = next(traced for traced in self.structure.groups if traced.name == fold.group)
        if self.original is not None:  # keeps the inputs of both streams comparable
            folds.apply(self.original, fold, whole, scales, self.dtype, ways)
        return folds.apply(self.module, fold, whole, scales, self.dtype, ways)

    def group_name(self, group: SharedInput) -> str:
        """Return the traced name of a shared input, of which `group` may have only some members."""
        return next(traced.name for traced in self.structure.groups if group.name in traced.members)
