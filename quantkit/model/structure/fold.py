"""Folds: places where the producer of a linear's input can absorb a scale, found by probing and then proved.

For an input x of linears W and any s > 0, `W x = (W diag(s)) (x / s)`. The division is free if the producer of x
absorbs
it: a norm divides its weight, a linear its output rows, if everything in between commutes with a gain per channel
(attention's value path, with grouped heads; the product gate * up; ReLU).

Probe: multiply the outputs of a candidate producer by distinct random gains, in float64, and compare x. If the path
commutes, every channel x_j changes by exactly one of the gains, which identifies the producer's channel. If only part
of
the producer's outputs commutes (the value part of a fused q/k/v, the up half of gate_up), a bisection over single
channels finds that part.

Proof: on every block, in float64, with random scales in 0.25..4, the block's outputs before and after agree within
1e-10. A fold that fails is declined with its reason. On a GPU, a block that computes the same as an earlier one
(`Computed`) is not run again: there the folds were also proved with all weights moved at random, none of which is zero,
so that they hold for the function and not only for those weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from quantkit.model.streaming.calls import Call, filed, is_in_file
from quantkit.model.structure.experts import are_apart, expert_of
from quantkit.model.structure.traced import (
    InDouble,
    SharedInput,
    Structure,
    hooked,
    is_linear,
    is_transposed,
    set_parameter,
)

Form = Literal["linear", "weight", "one_plus_weight"]
TOLERANCE = 1e-10
_ELSEWHERE, UNASKED = "its input goes to other experts too", "it is not quantized"


@dataclass(frozen=True)
class Fold:
    """Place for the scale of a shared input.

    Args:
        group: first member of the shared input.
        producer: module that absorbs the division.
        index: [K] int64, producer's output channel behind each input. Grouped heads map several inputs to one channel,
            which ties their scales.
        channels: number of the producer's outputs.
        form: a linear's rows, a norm's `weight`, or a norm that multiplies by `1 + weight`.
        tied: True if two inputs come from one channel.
    """

    group: str
    producer: str
    index: Tensor
    channels: int
    form: Form
    tied: bool = True


def spread(scales: Tensor, index: Tensor, channels: int) -> Tensor:
    """Map scales of inputs [K] to the channels behind them [channels]; 1 for channels without inputs."""
    return torch.ones(channels, dtype=scales.dtype, device=scales.device).index_copy_(0, index, scales)


def absorbed(
    weight: Tensor, scales: Tensor, index: Tensor, offset: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Divide a norm's weight [channels] by the scales [K] of its inputs; also return the scales after rounding the
    weight.

    Args:
        scales: non-zero; equal for inputs from one channel.
        index: [K], channel behind each input; channels without inputs keep their weight.
        offset: constant that the norm adds to the weight.
        dtype: stored dtype of the weight, to round to.
    """
    wide = spread(scales, index, len(weight))
    # a weight whose scale is 1 stays what it is, to the last bit
    new = torch.where(wide == 1, weight, (weight + offset) / wide - offset)
    if dtype is not None:
        new = new.to(dtype).to(new.dtype)
        usable = (new + offset).abs() > 0
        wide = torch.where(usable, (weight + offset) / (new + offset), wide)
    return new, wide[index]


@dataclass(frozen=True)
class Ways:
    """Implementations of `spread` and `absorbed`: these functions, or equal kernels."""

    spread: Callable[[Tensor, Tensor, int], Tensor] = spread
    absorbed: Callable[[Tensor, Tensor, Tensor, float, torch.dtype | None], tuple[Tensor, Tensor]] = absorbed


@torch.no_grad()
def apply(
    block: nn.Module,
    fold: Fold,
    group: SharedInput,
    scales: Tensor,
    dtype: torch.dtype | None = None,
    ways: Ways | None = None,
) -> Tensor:
    """Divide the producer by `scales`, multiply the consumers' input columns by them, in place.

    Args:
        scales: [K], positive (or non-zero), one per input; equal for inputs from one channel.
        dtype: stored dtype of a norm's weight. Its new values are rounded to it first and the scales adapted, so that
            the fold is exact in the stored model.
        ways: implementations of the computations.

    Returns:
        The adapted scales.
    """
    producer = block.get_submodule(fold.producer)
    weight: Tensor = producer.weight.detach()  # type: ignore[operator, union-attr, assignment]
    bias = getattr(producer, "bias", None)
    scales, ways = scales.to(weight), ways or Ways()
    if fold.form == "linear":
        wide = ways.spread(scales, fold.index, fold.channels)
        set_parameter(producer, "weight", weight / wide.reshape((1, -1) if is_transposed(producer) else (-1, 1)))
    else:
        new, scales = ways.absorbed(weight, scales, fold.index, 1.0 if fold.form == "one_plus_weight" else 0.0, dtype)
        set_parameter(producer, "weight", new)
        wide = scales if bias is None else ways.spread(scales, fold.index, fold.channels)
    if bias is not None:
        set_parameter(producer, "bias", bias.detach() / wide)
    for member in group.members:
        module = block.get_submodule(member)
        columns = scales.reshape((-1, 1) if is_transposed(module) else (1, -1))
        set_parameter(module, "weight", module.weight.detach() * columns)  # type: ignore[operator, union-attr]
    return scales


def disagreement(before: Tensor, after: Tensor) -> float:
    """Return the largest difference divided by the largest value."""
    before, after = before.detach(), after.detach()
    top = before.abs().max()
    return float((before - after).abs().max() / torch.where(top > 0, top, 1.0))


def in_double(block: nn.Module) -> nn.Module:
    """Copy a block in float64, and share what is; unlike `Module.double`, this accepts tensors without values."""
    exact = copy.deepcopy(block, {id(value): value for value in (*block.parameters(), *block.buffers())})
    for module in exact.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and value.is_floating_point():
                if isinstance(value, nn.Parameter):
                    double = value.detach().double()
                    double = filed(double) if is_in_file(value) and not is_in_file(double) else double
                    module._parameters[name] = nn.Parameter(double, requires_grad=False)
                else:
                    module._buffers[name] = value.double()
    return exact


def prove(block: nn.Module, structure: Structure, fold: Fold, call: Call, seed: int = 0) -> float:
    """Return the change of a block's outputs under one fold; see `prove_all`."""
    return prove_all(block, structure, {fold.group: fold}, call, seed)


@torch.no_grad()
def prove_all(
    block: nn.Module,
    structure: Structure,
    folds: Mapping[str, Fold],
    call: Call,
    seed: int = 0,
    *,
    whatever_weights: bool = False,
) -> float:
    """Return the relative change of a block's outputs under folds with random scales in 0.25..4, in float64.

    Folds hold if it is at most 1e-10. `whatever_weights` first moves all weights at random: a zero bias or a dead
    channel
    may hide that a fold holds only for these weights.
    """
    exact = in_double(block)
    twice = call.double()
    generator = torch.Generator().manual_seed(seed)
    for value in exact.parameters() if whatever_weights else ():
        if value.is_floating_point():
            moved = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
            value.add_(moved * value.square().mean().sqrt().clamp(min=0.01) / 2)
    groups = {group.name: group for group in structure.groups}
    with InDouble():  # type: ignore[no-untyped-call]
        before = twice(exact)
        for name, fold in folds.items():
            scales = torch.exp2(torch.rand(fold.channels, generator=generator, dtype=torch.float64) * 4 - 2)
            if name not in groups or groups[name].features != fold.index.numel():
                return float("inf")
            apply(exact, fold, groups[name], scales.to(fold.index.device)[fold.index])
        return disagreement(before, twice(exact))


@torch.no_grad()
def find(
    block: nn.Module, structure: Structure, call: Call, wanted: Collection[str] | None = None
) -> tuple[dict[str, Fold], dict[str, str]]:
    """Find the folds of a block, each proved on it: group name -> fold, and group name -> reason without one.

    Experts of one module are alike: the folds of the first are tried on all others at once.

    Args:
        wanted: names of the groups that are to be scaled; None for all.
    """
    probe = _Probe(in_double(block), call.double())
    folds: dict[str, Fold] = {}
    declined: dict[str, str] = {}
    owners = {group.name: expert_of(group.name, block) for group in structure.groups}
    for group in structure.groups:
        if wanted is not None and group.name not in wanted:
            declined[group.name] = UNASKED
            continue
        if group.name in folds or group.name in declined:
            continue
        reason, nearly = "its input is the block's own input", ""
        candidates = structure.order[: structure.order.index(group.name)]
        for name in reversed(candidates):
            producer = block.get_submodule(name)
            if name in group.members or not _can_absorb(producer):
                continue
            if are_apart(name, group.name, block):
                reason = _ELSEWHERE
                continue
            if (path := probe.index(name, group)) is None:
                reason = "no producer's channels reach it unmixed"
                continue
            index, channels = path
            tied = bool((index.sort().values.diff() == 0).any())
            forms: tuple[Form, ...] = ("linear",) if is_linear(producer) else ("weight", "one_plus_weight")
            errors = []
            for form in forms:
                fold = Fold(group.name, name, index, channels, form, tied)
                error = prove(probe.block, structure, fold, call)
                if error <= TOLERANCE:
                    folds[group.name] = fold
                    break
                errors.append(error)
            if group.name in folds:
                break
            nearly = nearly or f"the outputs would differ by {min(errors):.1e} after folding into {name}"
        if group.name not in folds:
            declined[group.name] = nearly or reason
        if (owner := owners[group.name]) is not None:
            leaf = group.name.removeprefix(f"{owner}.")
            names = [f"{other}.{leaf}" for other in dict.fromkeys(owners.values()) if other and _beside(other, owner)]
            like = [name for name in names if name in owners and (wanted is None or name in wanted)]
            if group.name in folds:
                fold = folds[group.name]
                maker = fold.producer.removeprefix(f"{owner}.")
                others = {
                    name: replace(fold, group=name, producer=f"{owners[name]}.{maker}")
                    for name in like
                    if fold.producer.startswith(f"{owner}.")
                }
                if others and prove_all(probe.block, structure, others, call) <= TOLERANCE:
                    folds |= others
            elif reason == _ELSEWHERE and not nearly:
                declined |= dict.fromkeys(like, reason)
    return folds, declined


def _beside(one: str, other: str) -> bool:
    """Tell whether two experts are of one module."""
    return one != other and one.rpartition(".")[0] == other.rpartition(".")[0]


def _can_absorb(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return is_linear(module) or (isinstance(weight, Tensor) and weight.dim() == 1)


class _Probe:
    """Runner of a block in float64 with gains on one module's outputs, which returns one shared input."""

    def __init__(self, block: nn.Module, call: Call) -> None:
        self.block, self.call = block, call

    def seen(self, group: SharedInput, producer: str | None = None, gains: Tensor | None = None) -> tuple[Tensor, int]:
        """Return the group's input, [tokens, K], and the width of the producer's output."""
        caught: list[Tensor] = []
        width = [0]

        def catch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0].reshape(-1, group.features))

        def gain(_: nn.Module, __: object, output: Tensor) -> Tensor:
            width[0] = output.shape[-1]
            return output if gains is None else output * gains

        hooks = [self.block.get_submodule(group.name).register_forward_pre_hook(catch)]
        if producer is not None:
            hooks.append(self.block.get_submodule(producer).register_forward_hook(gain))
        with hooked(hooks), InDouble():  # type: ignore[no-untyped-call]
            self.call(self.block)
        return caught[0], width[0]

    def index(self, producer: str, group: SharedInput) -> tuple[Tensor, int] | None:
        """Return the producer's channel behind each of [K] inputs, and the number of channels; None if the path does
        not commute.
        """
        base, channels = self.seen(group, producer)
        if channels == 0:
            return None
        index = self._match(base, producer, group, 0, channels, channels)
        if index is None and channels > 1:
            for low, high in self._commuting_parts(base, producer, group, channels):
                if (index := self._match(base, producer, group, low, high, channels)) is not None:
                    break
        return None if index is None else (index, channels)

    def _match(
        self, base: Tensor, producer: str, group: SharedInput, low: int, high: int, channels: int
    ) -> Tensor | None:
        gains = base.new_ones(channels)
        # distinct, shuffled: neighbouring channels get far-apart gains
        order = torch.randperm(high - low, generator=torch.Generator().manual_seed(1))
        gains[low:high] = torch.exp2((order.double() + 0.5) / (high - low) * 2 - 1).to(base.device)
        moved, _ = self.seen(group, producer, gains)
        alive = base.abs() > base.abs().amax() * 1e-9
        ratio = torch.where(alive, moved / torch.where(alive, base, torch.ones_like(base)), torch.nan)
        typical = ratio.nanmean(dim=0)
        steady = (ratio - typical).abs().nan_to_num(0.0).amax(dim=0) <= 1e-7
        known = ~typical.isnan()
        if not bool((steady | ~known).all()) or not bool(known.any()):
            return None
        ordered, places = gains[low:high].sort()
        after = torch.searchsorted(ordered, typical.nan_to_num(0.0)).clamp(1, max(high - low - 1, 1))
        if high - low == 1:
            after = torch.zeros_like(after)
        before = (after - 1).clamp(min=0)
        nearer = torch.where((ordered[after] - typical).abs() < (ordered[before] - typical).abs(), after, before)
        if not bool((((ordered[nearer] - typical).abs() <= 1e-7) | ~known).all()):
            return None
        index = places[nearer] + low
        if not bool(known.all()):
            # for a channel of zeros on every probed token (ReLU), assume the identity; the proof decides
            identity = torch.arange(group.features, device=base.device)
            if channels != group.features or not bool(((index == identity) | ~known).all()):
                return None
            index = identity
        return index

    def _commuting_parts(self, base: Tensor, producer: str, group: SharedInput, channels: int) -> list[tuple[int, int]]:
        def commutes(channel: int) -> bool:
            gains = base.new_ones(channels)
            gains[channel] = 2.0
            moved, _ = self.seen(group, producer, gains)
            change = (moved - base).abs()
            touched = change.amax(dim=0) > base.abs().amax() * 1e-9
            doubled = (moved - 2 * base).abs() <= base.abs().amax() * 1e-9
            return bool(touched.any()) and bool((doubled | ~touched).all())

        def boundary(good: int, bad: int) -> int:
            """Return the last commuting channel, from `good` towards `bad`."""
            while abs(good - bad) > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if commutes(middle) else (good, middle)
            return good

        parts = []
        if commutes(channels - 1):
            parts.append((boundary(channels - 1, -1), channels))
        if commutes(0):
            parts.append((0, boundary(0, channels) + 1))
        return parts
