"""Fixed scales of a block, found while it runs on the calibration set, from inputs behind quantized layers.

Linears with a shared input get one scale, so that they can be served as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.calibrate.statistics.observed import AT_ONCE, Observed
from quantkit.formats.base.activation import InputScale
from quantkit.model.streaming.transforms import QuantizedCache, QuantizedInput, rows_of, shaped
from quantkit.model.structure.traced import SharedInput
from quantkit.scheme import ActivationScheme, CacheScheme


class Saturation(NamedTuple):
    """Calibration values beyond a fixed scale.

    Args:
        name: the linear, or `keys` or `values`.
        beyond: number of values beyond the scale.
        total: number of values.
    """

    name: str
    beyond: int
    total: int


@dataclass
class Scales:
    """Quantizers of one block: of its inputs, linear -> hook, and of its cache.

    Args:
        inputs: linear -> quantizer of its input.
        cache: quantizer of keys and values.
        dtype: stored dtype of fixed scales.
        saturated: values beyond the scales.
        unsettled: counts on a GPU that `look` will add to `saturated` (name, [2] int64).
        checked: name -> values on a GPU that must be finite.
    """

    inputs: Mapping[str, QuantizedInput] = field(default_factory=dict)
    cache: QuantizedCache | None = None
    dtype: torch.dtype = torch.float32
    saturated: list[Saturation] = field(default_factory=list)
    unsettled: list[tuple[str, Tensor]] = field(default_factory=list)
    checked: dict[str, Tensor] = field(default_factory=dict)

    def look(self) -> None:
        """Read the counts from a GPU, which may wait for it."""
        counts = torch.stack([pair for _, pair in self.unsettled]).tolist() if self.unsettled else []
        for (name, _), (beyond, total) in zip(self.unsettled, counts, strict=True):
            self._note(name, beyond, total)
        self.unsettled.clear()

    def _note(self, name: str, beyond: int, total: int) -> None:
        if beyond:
            self.saturated.append(Saturation(name, beyond, total))

    def _settled(self, observed: Observed, scheme: ActivationScheme | CacheScheme, name: str) -> InputScale:
        """Return the scale for observed values, and record values beyond it."""
        if observed.device.type == "cpu" or scheme.range not in AT_ONCE:
            scale, beyond, total = observed.settle(scheme, self.dtype)
            self._note(name, beyond, total)
            return scale
        scale, counts, self.checked[name] = observed.settle_at_once(scheme, self.dtype)
        self.unsettled.append((name, counts))
        return scale

    def waiting(self, group: SharedInput) -> list[str]:
        """Return the linears of a group without a fixed scale so far."""
        return [name for name in group.members if name in self.inputs and self.inputs[name].waits]

    @property
    def cache_waits(self) -> bool:
        """True if the cache's fixed scales are missing."""
        return self.cache is not None and self.cache.waits

    @property
    def waits(self) -> bool:
        """True if any fixed scale is missing."""
        return self.cache_waits or any(hook.waits for hook in self.inputs.values())

    def use_cache(self, quantized: bool) -> bool:
        """Switch the quantization of keys and values, and tell whether that is a change."""
        if self.cache is None or self.cache.on == quantized:
            return False
        self.cache.on = quantized
        return True

    def observed(self, group: SharedInput) -> Observed:
        """Return an observer of a group's inputs, [1, n]."""
        counted = any(self.inputs[name].scheme.range != "minmax" for name in self.waiting(group))
        return Observed(counted=counted, name=group.name)

    def settle(self, group: SharedInput, observed: Observed) -> None:
        """Set the scale of a group's linears, if anything was observed."""
        for name in self.waiting(group) if observed.seen else []:
            self.inputs[name].settle(self._settled(observed, self.inputs[name].scheme, name))

    def at_once(self, group: SharedInput, inputs: Tensor) -> None:
        """Set the scale of a group's linears from its complete inputs."""
        if self.waiting(group):
            observed = self.observed(group)
            values = self.moved(group, inputs)
            observed.add(values.reshape(1, -1), samples_of(values))
            self.settle(group, observed)

    def moved(self, group: SharedInput, inputs: Tensor) -> Tensor:
        """Return an input with its channels moved, if a pass requires it."""
        hook = self.inputs.get(group.members[0])
        return inputs if hook is None else hook.move(inputs)

    def seen(self, group: SharedInput, inputs: Tensor) -> Tensor:
        """Return an input as a group's kernels see it; unchanged if they differ."""
        hooks = [self.inputs[name] for name in group.members if name in self.inputs]
        if not hooks or any(hook.scheme != hooks[0].scheme for hook in hooks):
            return inputs
        return hooks[0].quantize(inputs)

    @contextmanager
    def watching_cache(self, *, whole: bool) -> Iterator[None]:
        """Find the cache's missing scales from the keys and values in the block.

        Args:
            whole: True if they come in one piece, and must be quantized with the scales from it.
        """
        cache = self.cache
        if cache is None or not cache.waits:
            yield
            return
        pair = [Observed(counted=cache.scheme.range != "minmax", name=name) for name in ("keys", "values")]
        heads = [0, 0]

        def observe(keys: Tensor, values: Tensor) -> None:
            for place, states in enumerate((keys, values)):
                pair[place].add(rows_of(states, cache.scheme), states.shape[0])
                heads[place] = states.shape[1]
            if whole:
                self._settle_cache(cache, pair, heads)

        cache.observer = observe
        try:
            yield
        finally:
            cache.observer = None
        if cache.waits and pair[0].seen:
            self._settle_cache(cache, pair, heads)

    def _settle_cache(self, cache: QuantizedCache, pair: list[Observed], heads: list[int]) -> None:
        scales = []
        for observed, count, name in zip(pair, heads, ("keys", "values"), strict=True):
            scales.append(shaped(self._settled(observed, cache.scheme, name), cache.scheme, count))
        cache.keys, cache.values = scales


def samples_of(inputs: Tensor) -> int:
    """Return the number of sequences in [B, T, K]; an expert's tokens [n, K] count as one."""
    return inputs.shape[0] if inputs.dim() > 2 else 1
