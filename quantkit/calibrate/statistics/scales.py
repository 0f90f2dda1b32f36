"""The fixed scales of a block: found while it runs on the calibration set, each from what comes when all before it is
quantized already. Linears that share an input get one scale, so that they can be served as one.
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
    """Values of a linear, or of `keys` or `values`, that calibration saw beyond the reach of a fixed scale."""

    name: str
    beyond: int
    total: int


@dataclass
class Scales:
    """The quantizers of one block: of its inputs, linear -> hook, and of its cache.

    Args:
        dtype: what fixed scales are stored in.
        saturated: what lies beyond one of them.
        unsettled: on a GPU, what will be `saturated` (name, [2] int64), until somebody asks (`look`).
        checked: on a GPU, what is to be finite: name -> values.
    """

    inputs: Mapping[str, QuantizedInput] = field(default_factory=dict)
    cache: QuantizedCache | None = None
    dtype: torch.dtype = torch.float32
    saturated: list[Saturation] = field(default_factory=list)
    unsettled: list[tuple[str, Tensor]] = field(default_factory=list)
    checked: dict[str, Tensor] = field(default_factory=dict)

    def look(self) -> None:
        """Read what a GPU has counted; it has been waited for, or is now."""
        counts = torch.stack([found for _, found in self.unsettled]).tolist() if self.unsettled else []
        for (name, _), (beyond, total) in zip(self.unsettled, counts, strict=True):
            self._note(name, beyond, total)
        self.unsettled.clear()

    def _note(self, name: str, beyond: int, total: int) -> None:
        if beyond:
            self.saturated.append(Saturation(name, beyond, total))

    def _settled(self, observed: Observed, scheme: ActivationScheme | CacheScheme, name: str) -> InputScale:
        """Return the scale of what was observed; what lies beyond it is noted."""
        if observed.device.type == "cpu" or scheme.range not in AT_ONCE:
            found, beyond, total = observed.settle(scheme, self.dtype)
            self._note(name, beyond, total)
            return found
        found, counts, self.checked[name] = observed.settle_at_once(scheme, self.dtype)
        self.unsettled.append((name, counts))
        return found

    def waiting(self, group: SharedInput) -> list[str]:
        """Return the linears of a group whose scale is still to be found."""
        return [name for name in group.members if name in self.inputs and self.inputs[name].waits]

    @property
    def cache_waits(self) -> bool:
        """Whether the cache's scales are still to be found."""
        return self.cache is not None and self.cache.waits

    @property
    def waits(self) -> bool:
        """Whether any scale is still to be found."""
        return self.cache_waits or any(hook.waits for hook in self.inputs.values())

    def use_cache(self, quantized: bool) -> bool:
        """Have keys and values quantized from now on, or not; whether that is a change."""
        if self.cache is None or self.cache.on == quantized:
            return False
        self.cache.on = quantized
        return True

    def observed(self, group: SharedInput) -> Observed:
        """Tell where to collect a group's inputs, [1, n]."""
        counted = any(self.inputs[name].scheme.range != "minmax" for name in self.waiting(group))
        return Observed(counted=counted, name=group.name)

    def settle(self, group: SharedInput, observed: Observed) -> None:
        """Fix the scale of a group's linears; nothing, where nothing was observed."""
        for name in self.waiting(group) if observed.seen else []:
            self.inputs[name].settle(self._settled(observed, self.inputs[name].scheme, name))

    def at_once(self, group: SharedInput, found: Tensor) -> None:
        """Fix the scale of a group's linears from all the inputs there will be."""
        if self.waiting(group):
            observed = self.observed(group)
            values = self.moved(group, found)
            observed.add(values.reshape(1, -1), samples_of(values))
            self.settle(group, observed)

    def moved(self, group: SharedInput, found: Tensor) -> Tensor:
        """Return an input as its group's kernels quantize it: with its channels moved, where a pass said so."""
        hook = self.inputs.get(group.members[0])
        return found if hook is None else hook.move(found)

    def seen(self, group: SharedInput, found: Tensor) -> Tensor:
        """Return an input as a group's kernels see it; as it is, where they differ in that."""
        hooks = [self.inputs[name] for name in group.members if name in self.inputs]
        if not hooks or any(hook.scheme != hooks[0].scheme for hook in hooks):
            return found
        return hooks[0].quantize(found)

    @contextmanager
    def watching_cache(self, *, whole: bool) -> Iterator[None]:
        """Find the cache's scales, if they are missing, from the keys and values that come meanwhile.

        Args:
            whole: whether they come in one piece, and are to be quantized by what is found in it.
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
        found = []
        for observed, count, name in zip(pair, heads, ("keys", "values"), strict=True):
            found.append(shaped(self._settled(observed, cache.scheme, name), cache.scheme, count))
        cache.keys, cache.values = found


def samples_of(found: Tensor) -> int:
    """Tell how many sequences [B, T, K] holds; tokens that came to an expert [n, K] are not told apart."""
    return found.shape[0] if found.dim() > 2 else 1
