"""A KV cache that stores what its format holds: a pre-hook of a block, so that no model's own code is known or changed.

Every attention of transformers hands its keys, after the rotary embedding, and its values to `past_key_values.update`
and attends to what comes back. The hook puts a cache there whose `update` quantizes first, and then hands on to the
cache that was there, if any.

    keys, values [batch B, heads H, tokens T, features D]
    scales of a  tensor [1], a head [H, 1, 1], a channel [H, 1, D], a token [B, H, T, 1]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputScale
from quantkit.scheme import CacheScheme

# sees keys and values as they come, [batch, heads, tokens, features], before they are quantized
Observer = Callable[[Tensor, Tensor], None]


@dataclass
class QuantizedCache:
    """The pre-hook of one block.

    Args:
        keys, values: their scales, where calibration fixes them.
        on: whether anything is done.
        observer: sees what comes; while it does, nothing is quantized that still lacks its scale.
    """

    scheme: CacheScheme
    keys: InputScale | None = None
    values: InputScale | None = None
    on: bool = False
    observer: Observer | None = None

    @property
    def waits(self) -> bool:
        """Whether calibration still has to find its scales."""
        return not self.scheme.dynamic and self.keys is None

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read from the cache."""
        if self.waits and self.observer is not None:
            self.observer(keys, values)
        if self.waits:
            return keys, values
        return (
            activation.fake_quantize(keys, self.scheme, self.keys),
            activation.fake_quantize(values, self.scheme, self.values),
        )

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook."""
        if not self.on:
            return None
        place = list(inspect.signature(module.forward).parameters).index("past_key_values")
        if place < len(args):
            return (*args[:place], _Storing(self, args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, "past_key_values": _Storing(self, kwargs.get("past_key_values"))}


class _Storing:
    """Stands where a cache stands."""

    def __init__(self, hook: QuantizedCache, behind: Any) -> None:
        self._hook, self._behind = hook, behind

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._hook.stored(keys, values)
        if self._behind is None:
            return keys, values
        found: tuple[Tensor, Tensor] = self._behind.update(keys, values, *args, **kwargs)
        return found

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self._behind is None else int(self._behind.get_seq_length(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def attach(block: nn.Module, scheme: CacheScheme) -> QuantizedCache:
    """A hook, off, for a block. Raises InputError (`cache-unknown`, a block that takes no cache)."""
    if "past_key_values" not in inspect.signature(block.forward).parameters:
        raise InputError(
            "cache-unknown",
            where=type(block).__name__,
            value="takes no past_key_values",
            rule="a KV cache is quantized where a block is handed one",
            remedy="--set scheme.kv_cache=null",
        )
    hook = QuantizedCache(scheme)
    block.register_forward_pre_hook(hook, with_kwargs=True)
    return hook


def rows_of(states: Tensor, scheme: CacheScheme) -> Tensor:
    """Keys or values [B, H, T, D] as [scales, values of each]: [1, …], a head [H, …] or a channel [H D, …]."""
    if scheme.granularity == "tensor":
        return states.reshape(1, -1)
    if scheme.granularity == "head":
        return states.transpose(0, 1).reshape(states.shape[1], -1)
    return states.permute(1, 3, 0, 2).reshape(states.shape[1] * states.shape[3], -1)


def shaped(scale: InputScale, scheme: CacheScheme, heads: int) -> InputScale:
    """Scales of `rows_of` in a shape that broadcasts against [B, H, T, D]."""
    shape = {"tensor": (1,), "head": (heads, 1, 1), "channel": (heads, 1, -1)}[scheme.granularity]
    return InputScale(scale.scale.reshape(shape), None if scale.zero is None else scale.zero.reshape(shape))


@dataclass(frozen=True)
class QuantizedCaches:
    """A `Transform` of a streamed model: every block stores its keys and values as `scheme` says.

    Args:
        scales: of keys and values, a block; empty where the scheme takes them from the values.
        dtype: what the model is loaded in; scales are cast to it.
    """

    scheme: CacheScheme
    scales: Sequence[tuple[InputScale, InputScale]] | Mapping[int, tuple[InputScale, InputScale]]
    dtype: torch.dtype

    def block(self, index: int, block: nn.Module) -> None:
        """Attach the hook, on."""
        hook = attach(block, self.scheme)
        if not self.scheme.dynamic:
            device = next(block.parameters()).device
            keys, values = (each.on(device) for each in self.scales[index])
            hook.keys = InputScale(keys.scale.to(self.dtype), keys.zero)
            hook.values = InputScale(values.scale.to(self.dtype), values.zero)
        hook.on = True

    def rest(self, model: nn.Module) -> None:
        """Nothing: only blocks have a cache."""
