"""Modules of packed linears: a product that torch.compile keeps as one operator, and one product of several linears.

    y = x Wᵀ + b      `quantkit::linear` is the product; the bias is added outside of it, where it can be fused

A kernel of Triton or of another library is no torch operation, and leaving it out would end the compiled graph at every
linear. The operator names its layer by a number: packed weights are no inputs of a compiled graph, which would check or
copy them.

    [y₁ y₂ …] = x [W₁; W₂; …]ᵀ      q, k and v, or gate and up: weights with one input, joined along N

A row of a product does not depend on the other rows, so the numbers are those of the members, bit for bit, under equal
tile sizes. The members stay modules of the model: the first to run computes all outputs, and each returns its own part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.layout import ROWS, PackedWeight

_LAYERS: WeakValueDictionary[int, OpaqueLinear] = WeakValueDictionary()
_NUMBERS = itertools.count()


class OpaqueLinear(torch.nn.Module):
    """Linear layer with a product of its own.

    Args:
        shape: (N, K).
        bias: bias [N] or None.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None = None) -> None:
        super().__init__()
        self.shape, self.bias = shape, bias
        self._number()

    @property
    def resident_bytes(self) -> int:
        """Size of the packed weight."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """Return x [M, K], rows contiguous, times the transposed weight: y [M, N], in the dtype of x."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, as described in the module."""
        y: Tensor = linear(x, self.number, self.shape[0])
        return y if self.bias is None else y + self.bias

    def __setstate__(self, state: dict[str, object]) -> None:
        """Give a copy a number of its own."""
        super().__setstate__(state)
        self._number()

    def _number(self) -> None:
        self.number = next(_NUMBERS)
        _LAYERS[self.number] = self


@torch.library.custom_op("quantkit::linear", mutates_args=())
def linear(x: Tensor, number: int, rows: int) -> Tensor:
    """Return the product of the layer of this number, which has so many rows: y [..., N] of x [..., K]."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        rule, remedy = "kernels multiply in float16 or bfloat16", "give the model inputs of its own dtype"
        raise InputError("kernel-dtype", "the input of a packed linear", str(x.dtype), rule, remedy)
    if not x.numel():
        return x.new_empty((*x.shape[:-1], rows))
    # Triton launches on the present device, whichever x is on
    with torch.cuda.device_of(x):
        return _LAYERS[number].multiply(x.reshape(-1, x.shape[-1]).contiguous()).reshape(*x.shape[:-1], rows)


@linear.register_fake
def _(x: Tensor, number: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def apart_by(weight: PackedWeight, first: PackedWeight) -> str:
    """Tell why a weight cannot be joined to another; "" if it can."""
    for what, own, theirs in (
        ("a format", weight.kind, first.kind),
        ("an input", weight.shape[1], first.shape[1]),
        ("a group", weight.group, first.group),
        ("zero points", weight.zero is not None, first.zero is not None),
        ("a type of scale", weight.scale.dtype, first.scale.dtype),
    ):
        if own != theirs:
            return f"{own} beside {theirs}; joined weights have {what} in common"
    if weight.nested is not None:
        return "nested scales; each weight has an offset of its own"
    if weight.shape[0] % ROWS or first.shape[0] % ROWS:
        return f"{weight.shape[0]} and {first.shape[0]} rows; joined weights have a multiple of {ROWS}"
    return ""


def joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Join weights [N, K] along N; `apart_by` finds nothing between any two."""
    first = weights[0]
    zeros = [weight.zero for weight in weights if weight.zero is not None]
    return replace(
        first,
        words=torch.cat([weight.words for weight in weights]),
        scale=torch.cat([weight.scale for weight in weights], dim=1),
        zero=torch.cat(zeros, dim=1) if zeros else None,
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
        rows_share=1,
    )


class JoinedProduct(torch.nn.Module):
    """Product of several members.

    Args:
        linear: layer of the joined weight, without bias.
        rows: N of each member.
    """

    def __init__(self, linear: OpaqueLinear, rows: Sequence[int]) -> None:
        super().__init__()
        self.linear, self.rows = linear, list(rows)
        self._x: Tensor | None = None
        self._left: dict[int, Tensor] = {}

    def part(self, x: Tensor, member: int) -> Tensor:
        """Return a member's output for x; a second call of a member, or one with another tensor, computes anew."""
        if x is not self._x or member not in self._left:
            self._x, self._left = x, dict(enumerate(self.linear(x).split(self.rows, dim=-1)))
        y = self._left.pop(member)
        if not self._left:
            self._x = None
        return y


class JoinedMember(torch.nn.Module):
    """One member in a model.

    Args:
        whole: product of all members.
        member: place among them.
        bias: bias [N] of this member or None.
    """

    def __init__(self, whole: JoinedProduct, member: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.whole, self.member, self.bias = whole, member, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return this member's output."""
        y = self.whole.part(x, self.member)
        return y if self.bias is None else y + self.bias
