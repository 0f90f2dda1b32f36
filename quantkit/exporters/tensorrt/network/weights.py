"""Quantized weights as TensorRT reads them: codes under DequantizeLinear, [K, N], nothing else.

    int8, int4            scale of the tensor, a channel, or blocks of 16 to 128 along K; never a zero point
    fp8_e4m3, mxfp8       the same; a square block's scale is repeated for each of its channels
    nvfp4                 blocks of 16, their scales E4M3 under one float32: two DequantizeLinear
    nf4                   int4 codes as places in a codebook: a Gather, times the scale

A DequantizeLinear gives what type its scale has, so scales are stored in the graph's 16 bits; where these would lose
more than 16 bits do everywhere (scales below 6e-5 are subnormal there), they stay float32, and the product is rounded.
(NVIDIA TensorRT documentation, "Working with Quantized Types"; what 1.7.1 of TensorRT-RTX builds is in docs/design.md.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor

Array = NDArray[Any]
# what codes are stored as
TYPES = {
    "int8": np.dtype(np.int8),
    "int7": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "nvfp4": np.dtype(ml_dtypes.float4_e2m1fn),
    "nf4": np.dtype(ml_dtypes.int4),
}
# half a unit in the last place of float16 (of bfloat16: 2^-8), the rounding that all of such a graph has
_ROUNDING = 2.0**-11


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one weight, but for its codes.

    Args:
        shape: [K, N].
        type: of the codes.
        scale: [] of the tensor, [N] of channels, [K / block, N] of blocks.
        axis: of DequantizeLinear; None of a tensor's scale.
        block: values along K under one scale; None without blocks.
        whole: one more factor, which the scales (E4M3 then) are multiplied with; None without.
        codebook: what codes are places in, less 8; None where they are numbers.
    """

    shape: tuple[int, int]
    type: np.dtype[Any]
    scale: Array
    axis: int | None
    block: int | None
    whole: Array | None = None
    codebook: Array | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of DequantizeLinear."""
        found = {"axis": self.axis, "block_size": self.block}
        return {name: value for name, value in found.items() if value is not None}


def codes(tensor: QuantTensor) -> Array:
    """[K, N], in the type that they are stored in."""
    import torch

    kind = TYPES[tensor.scheme.format]
    values = tensor.codes.view(torch.uint8) if tensor.codes.dtype == torch.float8_e4m3fn else tensor.codes
    turned = np.ascontiguousarray(values.numpy().T)
    if tensor.scheme.format == "nf4":
        return (turned.astype(np.int8) - 8).astype(kind)
    # bytes that hold small floats are those, not numbers
    return turned.view(np.uint8).view(kind) if kind.kind == "V" and kind != TYPES["int4"] else turned.astype(kind)


def stored(tensor: QuantTensor, floats: np.dtype[Any]) -> StoredTensors:
    """A quantized linear's weight; its codes are not looked at. `floats` is the graph's type."""
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    scale = tensor.scale.float().numpy()
    whole = None if tensor.global_scale is None else np.asarray(tensor.global_scale.float().numpy()).reshape(())
    book = None if scheme.format != "nf4" else np.asarray(tensor.codebook.float().numpy()).astype(floats)  # type: ignore[union-attr]
    axis: int | None = 0
    block = scheme.group
    if scheme.granularity == "tensor":
        scale, axis, block = scale.reshape(()), None, None
    elif scheme.granularity == "channel":
        scale, axis, block = scale.reshape(-1), 1, None
    else:
        if scheme.granularity == "block":
            scale = np.repeat(scale, scheme.group or 1, axis=0)[:rows]
        scale = np.ascontiguousarray(scale.T)
    kept = fitting(scale, floats) if whole is None else scale.astype(ml_dtypes.float8_e4m3fn)
    return StoredTensors((columns, rows), TYPES[scheme.format], kept, axis, block, whole, book)


def fitting(scale: Array, floats: np.dtype[Any]) -> Array:
    """Scales in the graph's type, or in float32 where that would lose more than its rounding."""
    scale = np.asarray(scale, np.float32)
    found = scale.astype(floats)
    bound = _ROUNDING if floats == np.float16 else 2.0**-8
    if bool((np.abs(found.astype(np.float32) - scale) <= bound * np.abs(scale)).all()):
        return found
    return scale
