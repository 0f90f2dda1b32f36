"""Formats with scales: a grid of values, stretched by a scale for every part of a matrix.

    w ≈ snap(w / scale) * scale        snap(u): the value of the grid that is nearest to u

A format has its own grid (`snap`, `encode`, `decode`), its way to choose parameters for a range (`parameters`) and its
way to store scales (`stored`). `quantize`, `nearest`, `dequantize` and the bits per weight follow from these, and
solvers need no more: they work in effective scales, by which a weight is divided, and end with `nearest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.layout import against, extremes, scale_shape, split
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

# bits of one stored scale; `double` also has an absmax for every 256, and an offset
_SCALE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "e8m0": 8, "fp8_e4m3": 8, "double": 8}


@dataclass(frozen=True)
class GridFormat:
    """A format of codes and scales."""

    name: str
    bits: int
    rules: ClassVar[Rules]
    # ranges longer than min-max that a range search should also try
    stretches: ClassVar[tuple[float, ...]] = ()

    @property
    def low(self) -> float:
        """Smallest value of the grid."""
        raise NotImplementedError

    @property
    def high(self) -> float:
        """Largest value of the grid."""
        raise NotImplementedError

    def global_scale(self, amax: Tensor, scheme: WeightScheme) -> Tensor | None:
        """Return the factor for a whole matrix with the largest magnitude `amax` []; None for formats without one."""
        return None

    def shares_scale(self, scheme: WeightScheme) -> bool:
        """Tell whether linears with one input are rounded as one matrix, to share a scale.

        True for formats with one float for a whole matrix: runtimes fuse q, k and v, or gate and up, and keep one such
        number for them (vLLM). Integers would lose accuracy on one scale, and runtimes read a scale for every matrix.
        """
        return False

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Choose effective scale and zero point for values between `low` and `high`.

        Args:
            low, high: float32, of one shape.
            scheme: symmetry and scale type.
            global_scale: factor of the matrix, in a shape that broadcasts; None computes it from `low` and `high`.

        Returns:
            scale, storable (except type `double`, which needs the whole matrix), and zero (int8; None if symmetric).
        """
        raise NotImplementedError

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Round scales to the nearest effective ones that can be stored; never zero, never infinite."""
        return stored(scale, scheme)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest values of the grid, float32: `decode(encode(units, 1, zero), 1, zero)`."""
        raise NotImplementedError

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes; effective `scale` and `zero` broadcast against `weight`."""
        raise NotImplementedError

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the values of codes, float32, by broadcasting."""
        raise NotImplementedError

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [N, K] as uint8 [N, ceil(K * bits / 8)]."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        raise NotImplementedError

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round [N, K] to nearest; every range spans the smallest to the largest of its weights.

        Raises InputError: `group-indivisible`.
        """
        whole = self.global_scale(weight.float().abs().amax(), scheme)
        scale, zero = self.parameters(*extremes(weight, scheme), scheme, whole)
        return self.nearest(weight, scale, zero, scheme, whole)

    def nearest(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        scheme: WeightScheme,
        global_scale: Tensor | None = None,
    ) -> QuantTensor:
        """Round [N, K] to the nearest codes under given ranges.

        A value on the grid stays unchanged, so a solver that has chosen values also turns them into codes by this.

        Args:
            weight: [N, K] of any float dtype.
            scale: effective scale, in the shape of the scheme's scales ([N, G]; [1, 1] per tensor).
            zero: int8 of that shape, or None.
            global_scale: factor that `scale` was made with; None computes it from `weight`.

        Raises InputError: `group-indivisible`.
        """
        shape = (weight.shape[0], weight.shape[1])
        shift = None if zero is None else against(zero, shape, scheme)
        codes = self.encode(split(weight.float(), scheme), against(scale, shape, scheme), shift).reshape(shape)
        if global_scale is None:
            global_scale = self.global_scale(weight.float().abs().amax(), scheme)
        return QuantTensor(codes, zero=zero, scheme=scheme, **self.kept(scale, scheme, global_scale))

    def kept(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None) -> dict[str, Any]:
        """Return the fields of a `QuantTensor` for effective scales: `scale` and those that belong to it."""
        return {"scale": scale.to(storage(scheme))}

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """Dequantize as `Format.dequantize` does."""
        scale, zero = tensor.scale.float(), tensor.zero
        if tensor.global_scale is not None:
            scale = scale * tensor.global_scale
        shift = None if zero is None else against(zero, tensor.shape, tensor.scheme)
        codes = split(tensor.codes, tensor.scheme)
        return self.decode(codes, against(scale, tensor.shape, tensor.scheme), shift).reshape(tensor.shape)

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Count codes, scales and packed zero points: int4 in groups of 64, asymmetric, float16 scales: 4.3125.

        Raises InputError: `group-indivisible`.
        """
        scales = math.prod(scale_shape(shape, scheme))
        bits = scales * (_SCALE_BITS[scheme.scale] + (0 if scheme.symmetric else self.bits))
        if scheme.scale == "double":
            bits += 32 * (-(-scales // 256) + 1)
        if scheme.scale == "fp8_e4m3":
            bits += 32
        return self.bits + bits / (shape[0] * shape[1])


def load_grid(name: str) -> GridFormat:
    """Load a format with scales by its name.

    Raises InputError: `unknown-format`; `format-without-scale`, a plain floating-point format.
    """
    form = load_format(name)
    if not isinstance(form, GridFormat):
        rule, remedy = (
            "ranges are searched for formats with scales",
            "use a quantizing format, see `quantkit list formats`",
        )
        raise InputError("format-without-scale", value=f"format {name}", rule=rule, remedy=remedy)
    return form


def storage(scheme: WeightScheme) -> torch.dtype:
    """Return the dtype of `QuantTensor.scale`."""
    own = {"e8m0": "float8_e8m0fnu", "fp8_e4m3": "float8_e4m3fn", "double": "float32", "super": "float32"}
    return getattr(torch, own.get(scheme.scale, scheme.scale))  # type: ignore[no-any-return]


def effective(scheme: WeightScheme) -> torch.dtype:
    """Return the dtype of effective scales: the stored one if a runtime multiplies in it, else float32."""
    dtype = storage(scheme)
    return dtype if dtype.itemsize > 1 else torch.float32


def stored(scale: Tensor, scheme: WeightScheme) -> Tensor:
    """Round a scale of a wider float type to its dtype; never zero, never infinite there."""
    dtype = effective(scheme)
    limits = torch.finfo(dtype)
    # at least the smallest normal number: a subnormal scale has too few bits
    return scale.clamp(min=limits.tiny, max=limits.max).to(dtype)
