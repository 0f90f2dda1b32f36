"""Quantize activations as a linear's kernel does with its input [..., K], in the dtype of the input.

    symmetric:   s = max|x| / ((high - low) / 2)      x̂ = clip(x / s, low, high) rounded to a code, times s
    asymmetric:  s = (max - min) / (high - low)       z = round(clip(low - min / s, low, high))
                                                      x̂ = (clip(x / s + z, low, high) rounded - z) · s

with min <= 0 <= max, so that zero is a code, and `low`, `high` the format's smallest and largest value: -128 and 127
for int8, ±448 for fp8_e4m3. A range without extent takes the dtype's epsilon for its scale. This is what
compressed-tensors computes, bit for bit (its `quantization/utils/helpers.py` and `lifecycle/forward_helpers.py`);
vLLM's int8 kernels divide by 127 instead of 127.5 when they quantize dynamically: their steps are 0.4 % longer.

Values that share a scale: a `token` (one row of [..., K]), a `group` of its features, or the whole `tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.formats.base.grid import load_grid
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import ActivationScheme, CacheScheme


@dataclass(frozen=True)
class Moved:
    """Channels that are shifted and scaled before they are quantized: (x - shift) / scale, both [K] float32."""

    shift: Tensor
    scale: Tensor


@dataclass(frozen=True)
class InputScale:
    """A scale fixed by calibration, of any shape that broadcasts against its input."""

    scale: Tensor  # in the model's storage dtype
    zero: Tensor | None = None  # int8, as `scale`; None when symmetric
    moved: Moved | None = None  # shift and scale of channels beforehand; not applied here

    def on(self, device: torch.device) -> InputScale:
        """Copy the scale to a device."""
        zero = None if self.zero is None else self.zero.to(device)
        moved = None if self.moved is None else Moved(self.moved.shift.to(device), self.moved.scale.to(device))
        return InputScale(self.scale.to(device), zero, moved)


@dataclass(frozen=True)
class InputCodes:
    """Quantization of a linear's input, in plain numbers."""

    scheme: ActivationScheme  # granularity and symmetry
    scale: float | None = None  # fixed by calibration; None if computed as the model runs
    zero: int = 0  # int8; 0 if there is none
    # shift and scale of every channel beforehand, (x - shift) / scale; empty if there are none
    moved: tuple[tuple[float, ...], ...] = ()


def parameters(low: Tensor, high: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point (int8 or None) for values between `low` and `high`, all of one shape and dtype."""
    form = load_grid(scheme.format)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if scheme.symmetric:
        scale = torch.maximum(-low, high) / ((form.high - form.low) / 2)
        return _positive(scale), None
    scale = _positive((high - low) / (form.high - form.low))
    zero = (form.low - low / scale).clamp(form.low, form.high)
    return scale, zero.round().to(torch.int8)


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def dynamic(x: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[Tensor, Tensor | None]:
    """Compute scale and zero point from the values: [..., 1] for a token or a group (K split into groups), else [1]."""
    if scheme.granularity == "tensor":
        low, high = torch.aminmax(x.reshape(-1))
        return parameters(low.reshape(1), high.reshape(1), scheme)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    return parameters(low, high, scheme)


def fake_quantize(x: Tensor, scheme: ActivationScheme | CacheScheme, static: InputScale | None = None) -> Tensor:
    """Round `x` to the values of its codes, in its dtype; `x` is not modified.

    Args:
        x: [..., K].
        static: scale from calibration; None computes it from the values.
    """
    group = getattr(scheme, "group", None)
    shape = x.shape
    if group is not None:
        x = x.unflatten(-1, (shape[-1] // group, group))
    if x.numel() == 0:
        return x.reshape(shape)
    scale, zero = dynamic(x, scheme) if static is None else (static.scale, static.zero)
    return apply(x, scheme, scale, zero).reshape(shape)


def apply(x: Tensor, scheme: ActivationScheme | CacheScheme, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Round as `fake_quantize` does, with a scale and zero point that broadcast against `x`."""
    form = load_grid(scheme.format)
    scaled = x / scale
    if zero is not None:
        scaled = scaled + zero.to(x.dtype)
    # a fixed scale is stored in the model's dtype, which may have fewer bits than the computation
    values = form.snap(scaled.clamp(form.low, form.high)).to(x.dtype)
    if zero is not None:
        values = values - zero.to(x.dtype)
    return values * scale.to(x.dtype)
