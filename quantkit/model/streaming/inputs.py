"""Linears that see their inputs as a kernel would that quantizes them: forward pre-hooks, one a linear.

Nothing of the model is changed: a hook can be removed, and a model that has none runs as it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputScale, Moved
from quantkit.scheme import ActivationScheme


@dataclass
class QuantizedInput:
    """The pre-hook of one linear.

    Args:
        scheme: how its input [..., K] is quantized.
        static: its scale, where calibration fixes it.
        on: whether the linear gets the quantized input; while its weight has no codes yet, it does not.
        moved: what becomes of the channels before; the linear's weight and bias are for what comes out.
    """

    scheme: ActivationScheme
    static: InputScale | None = None
    on: bool = False
    moved: Moved | None = None

    @property
    def waits(self) -> bool:
        """Whether calibration still has to find its scale."""
        return not self.scheme.dynamic and self.static is None

    def quantize(self, x: Tensor) -> Tensor:
        """What the kernel multiplies instead of `x`."""
        return activation.fake_quantize(self.move(x), self.scheme, self.static)

    def move(self, x: Tensor) -> Tensor:
        """What is quantized: `x` with its channels moved."""
        return x if self.moved is None else (x - self.moved.shift) / self.moved.scale

    def settle(self, static: InputScale) -> None:
        """Fix the scale; where its channels lie is stored with it."""
        self.static = replace(static, moved=self.moved)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The hook."""
        if not self.on and self.moved is None:
            return None
        return (self.quantize(args[0]) if self.on else self.move(args[0]), *args[1:])


def attach(module: nn.Module, schemes: Mapping[str, ActivationScheme]) -> dict[str, QuantizedInput]:
    """Hooks, off, for linears of a module by their names within it."""
    hooks = {name: QuantizedInput(scheme) for name, scheme in schemes.items()}
    for name, hook in hooks.items():
        module.get_submodule(name).register_forward_pre_hook(hook)
    return hooks


@dataclass(frozen=True)
class QuantizedInputs:
    """A `Transform` of a streamed model: every linear of its blocks that is named sees its input quantized.

    Args:
        block_names: full names of the blocks.
        schemes: linear's full name -> scheme.
        scales: linear's full name -> its scale, of those whose scheme is not dynamic.
        dtype: what the model is loaded in; a scale is cast to it.
        on: whether they are quantized; if not, channels are moved all the same, because weights are for that.
    """

    block_names: list[str]
    schemes: Mapping[str, ActivationScheme]
    scales: Mapping[str, InputScale]
    dtype: torch.dtype
    on: bool = True

    def block(self, index: int, block: nn.Module) -> None:
        """Attach hooks, on."""
        prefix = f"{self.block_names[index]}."
        chosen = {name.removeprefix(prefix): each for name, each in self.schemes.items() if name.startswith(prefix)}
        for name, hook in attach(block, chosen).items():
            static = self.scales.get(prefix + name)
            if static is not None:
                device = next(block.get_submodule(name).parameters()).device
                static = replace(static, scale=static.scale.to(self.dtype)).on(device)
                hook.moved = static.moved
            hook.static, hook.on = static, self.on

    def rest(self, model: nn.Module) -> None:
        """Nothing: what lies outside the blocks is not quantized."""
