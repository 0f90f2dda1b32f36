"""Changes of a streamed model, made by hooks as its parts load: no model's own code is changed.

Inputs of linears: a pre-hook quantizes the linear's input, as a kernel would.

Keys and values: every attention of transformers passes its keys, after the rotary embedding, and its values to
`past_key_values.update`, and attends to the result. A pre-hook of the block inserts a cache whose `update` quantizes
first, and then calls the cache that was there, if any.

    keys, values [batch B, heads H, tokens T, features D]
    scales of a  tensor [1], a head [H, 1, 1], a channel [H, 1, D], a token [B, H, T, 1]

Rounded products: allowed difference of a correct model's outputs, if a library multiplies in kernels of half precision.
Such a kernel sums in float32, but its factors and result have 8 significant bits on some processors, whatever the
model's dtype. The effect depends on the model: its depth, its attention, the spread of its logits. So it is measured:
the expected model runs once more with the same products rounded (`rounding`), and differs from itself by d. The
library's outputs are the same sum of roundings, drawn once more:

    d       = √(Σ (rounded - expected)² / Σ expected²)   over all outputs: a maximum would depend on chance
    √(5/3) d   if the library rounds the scale and the code's value too: five roundings instead of three
    2 d        is allowed, half as much again, beside the error of float32

For random Llamas, GPT-NeoX and Gemma 3, 2 to 8 blocks deep, models with five roundings differ by 0.97 to 1.49 d, 1.27 d
on average (`tests/model/test_transforms.py`). Smaller errors are found elsewhere: stored tensors are compared one by
one, to 1e-4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputScale, Moved
from quantkit.model.structure.traced import set_parameter
from quantkit.scheme import ActivationScheme, CacheScheme

DEPARTURES = 2.0
# function of keys and values [batch, heads, tokens, features], before they are quantized
Observer = Callable[[Tensor, Tensor], None]


class Transform(Protocol):
    """Exact change of the whole model, made in place as its parts load: a rotation, an untying, a permutation."""

    def block(self, index: int, block: nn.Module) -> None:
        """Change a block."""
        return

    def rest(self, model: nn.Module) -> None:
        """Change the parts outside of the blocks."""
        return


@dataclass
class QuantizedInput:
    """Pre-hook of one linear.

    Args:
        scheme: scheme of its input [..., K].
        static: fixed scale from calibration.
        on: True to quantize; False while its weight has no codes yet.
        moved: transform of the channels before; the linear's weight and bias already include its inverse.
        library: True to scale as compressed-tensors does: by token in [batch, tokens, K] alone; else by the first two
            dimensions, and [tokens, K] as a whole.
    """

    scheme: ActivationScheme
    static: InputScale | None = None
    on: bool = False
    moved: Moved | None = None
    library: bool = False

    @property
    def waits(self) -> bool:
        """True if calibration still has to set its scale."""
        return not self.scheme.dynamic and self.static is None

    def quantize(self, x: Tensor) -> Tensor:
        """Return `x` as the kernel multiplies it."""
        moved = rows = self.move(x)
        if self.library and self.scheme.granularity == "token":
            rows = moved.flatten(2) if moved.dim() > 2 else moved.reshape(1, -1)
        return activation.fake_quantize(rows, self.scheme, self.static).reshape(moved.shape)

    def move(self, x: Tensor) -> Tensor:
        """Apply the transform of channels to `x`."""
        return x if self.moved is None else (x - self.moved.shift) / self.moved.scale

    def settle(self, static: InputScale) -> None:
        """Set the fixed scale, with the transform of channels."""
        self.static = replace(static, moved=self.moved)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Quantize the input, as a pre-hook."""
        if not self.on and self.moved is None:
            return None
        return (self.quantize(args[0]) if self.on else self.move(args[0]), *args[1:])


def attach_inputs(module: nn.Module, schemes: Mapping[str, ActivationScheme]) -> dict[str, QuantizedInput]:
    """Attach hooks, switched off, to linears of a module by their names in it."""
    hooks = {name: QuantizedInput(scheme) for name, scheme in schemes.items()}
    for name, hook in hooks.items():
        module.get_submodule(name).register_forward_pre_hook(hook)
    return hooks


@dataclass(frozen=True)
class QuantizedInputs(Transform):
    """Transform that quantizes the inputs of the named linears, by full names.

    Args:
        block_names: names of the blocks.
        schemes: linear -> scheme of its input.
        scales: linear -> fixed scale, for schemes that are not dynamic.
        dtype: dtype of the loaded model; scales are cast to it.
        on: False only to move channels, because weights already include that.
        library: as in `QuantizedInput`.
    """

    block_names: list[str]
    schemes: Mapping[str, ActivationScheme]
    scales: Mapping[str, InputScale]
    dtype: torch.dtype
    on: bool = True
    library: bool = False

    def block(self, index: int, block: nn.Module) -> None:
        """Attach the hooks."""
        prefix = f"{self.block_names[index]}."
        chosen = {name.removeprefix(prefix): how for name, how in self.schemes.items() if name.startswith(prefix)}
        for name, hook in attach_inputs(block, chosen).items():
            if (static := self.scales.get(prefix + name)) is not None:
                device = next(block.get_submodule(name).parameters()).device
                static = replace(static, scale=static.scale.to(self.dtype)).on(device)
                hook.moved = static.moved
            hook.static, hook.on, hook.library = static, self.on, self.library


@dataclass
class QuantizedCache:
    """Pre-hook of one block.

    Args:
        scheme: scheme of keys and values.
        keys, values: fixed scales from calibration.
        on: True to act.
        observer: observer of keys and values; until the scales are set, nothing is quantized.
    """

    scheme: CacheScheme
    keys: InputScale | None = None
    values: InputScale | None = None
    on: bool = False
    observer: Observer | None = None

    @property
    def waits(self) -> bool:
        """True if calibration still has to set its scales."""
        return not self.scheme.dynamic and self.keys is None

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as read from the cache."""
        if self.waits and self.observer is not None:
            self.observer(keys, values)  # may set the scales
        if self.waits:
            return keys, values
        stored = activation.fake_quantize(keys, self.scheme, self.keys)
        return stored, activation.fake_quantize(values, self.scheme, self.values)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Insert a quantizing cache into the block's arguments, as a pre-hook."""
        if not self.on:
            return None
        place = list(inspect.signature(module.forward).parameters).index("past_key_values")
        if place < len(args):
            return (*args[:place], _Storing(self, args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, "past_key_values": _Storing(self, kwargs.get("past_key_values"))}


class _Storing:
    """Wrapper of a cache that quantizes."""

    def __init__(self, hook: QuantizedCache, behind: Any) -> None:
        self._hook, self._behind = hook, behind

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._hook.stored(keys, values)
        if self._behind is not None:
            keys, values = self._behind.update(keys, values, *args, **kwargs)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self._behind is None else int(self._behind.get_seq_length(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def attach_cache(block: nn.Module, scheme: CacheScheme) -> QuantizedCache:
    """Attach a hook, switched off, to a block. Raises InputError (`cache-unknown` for a block without a cache)."""
    if "past_key_values" not in inspect.signature(block.forward).parameters:
        rule = "only blocks with a KV cache can have it quantized"
        remedy = "--set scheme.kv_cache=null"
        raise InputError("cache-unknown", type(block).__name__, "takes no past_key_values", rule, remedy)
    hook = QuantizedCache(scheme)
    block.register_forward_pre_hook(hook, with_kwargs=True)
    return hook


def rows_of(states: Tensor, scheme: CacheScheme) -> Tensor:
    """Reshape keys or values [B, H, T, D] to [scales, values]: [1, …], per head [H, …] or per channel [H D, …]."""
    if scheme.granularity == "tensor":
        return states.reshape(1, -1)
    if scheme.granularity == "head":
        return states.transpose(0, 1).reshape(states.shape[1], -1)
    return states.permute(1, 3, 0, 2).reshape(states.shape[1] * states.shape[3], -1)


def shaped(scale: InputScale, scheme: CacheScheme, heads: int) -> InputScale:
    """Reshape scales of `rows_of` to broadcast against [B, H, T, D]."""
    shape = {"tensor": (1,), "head": (heads, 1, 1), "channel": (heads, 1, -1)}[scheme.granularity]
    return InputScale(scale.scale.reshape(shape), None if scale.zero is None else scale.zero.reshape(shape))


@dataclass(frozen=True)
class QuantizedCaches(Transform):
    """Transform that quantizes every block's keys and values.

    Args:
        scheme: scheme of keys and values.
        scales: fixed scales of each block's keys and values; empty for a dynamic scheme.
        dtype: dtype of the model; scales are cast to it.
    """

    scheme: CacheScheme
    scales: Sequence[tuple[InputScale, InputScale]] | Mapping[int, tuple[InputScale, InputScale]]
    dtype: torch.dtype

    def block(self, index: int, block: nn.Module) -> None:
        """Attach the hook."""
        hook = attach_cache(block, self.scheme)
        if not self.scheme.dynamic:
            device = next(block.parameters()).device
            pair = [scale.on(device) for scale in self.scales[index]]
            hook.keys, hook.values = (InputScale(scale.scale.to(self.dtype), scale.zero) for scale in pair)
        hook.on = True


def departure(outputs: Tensor, expected: Tensor) -> float:
    """Return the relative difference of outputs, by norms."""
    if outputs.shape != expected.shape:
        return float("inf")
    wide = expected.double()
    return float((outputs.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def rounding(model: nn.Module, linears: Iterable[str]) -> nn.Module:
    """Round inputs, weights and results of a model's linears to bfloat16; their sums stay in float32."""
    for name in linears:
        linear = model.get_submodule(name)
        set_parameter(linear, "weight", _rounded(linear.weight.detach()))  # type: ignore[operator, union-attr]
        linear.register_forward_pre_hook(lambda _, args: (_rounded(args[0]), *args[1:]))
        linear.register_forward_hook(lambda _, args, result: _rounded(result))
    return model


@dataclass(frozen=True)
class RoundedProducts(Transform):
    """Transform that rounds the products of linears, by full names."""

    block_names: Sequence[str]
    linears: Collection[str]

    def block(self, index: int, block: nn.Module) -> None:
        """Attach the hooks."""
        prefix = f"{self.block_names[index]}."
        rounding(block, [name.removeprefix(prefix) for name in self.linears if name.startswith(prefix)])


@dataclass(frozen=True)
class TypedBlocks(Transform):
    """Transform that runs the blocks in another dtype, as a server in 16 bits; what lies outside stays in float32."""

    dtype: torch.dtype = torch.bfloat16

    def block(self, index: int, block: nn.Module) -> None:
        """Attach the hooks."""
        block.to(self.dtype)
        block.register_forward_pre_hook(
            lambda _, args, kwargs: (_cast(args, self.dtype), _cast(kwargs, self.dtype)), with_kwargs=True
        )
        block.register_forward_hook(lambda _, args, result: _cast(result, torch.float32))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return {key: _cast(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value


def _rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)
