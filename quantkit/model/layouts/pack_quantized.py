"""Integers of up to 8 bits in compressed-tensors' `pack-quantized` layout.

A matrix [N, K] of b-bit codes in G groups becomes

    weight_packed      int32 [N, ceil(K b / 32)]   code + 2^(b-1), densely, least significant bit first
    weight_scale       [N, G]; [1] per tensor      in the scheme's scale dtype
    weight_zero_point  int32 [ceil(N b / 32), G]   zero + 2^(b-1), packed along N; int8 [1] per tensor; asymmetric only
    weight_shape       int64 [2]                   N, K

so that [4096, 4096] in 4 bits and groups of 128 is int32 [4096, 512], [4096, 32] and [512, 32].
Packing and unpacking are our own code, so that compressed-tensors' expansion is an independent check.
See `compressed_tensors/compressors/pack_quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.model.layouts import MARLIN_GROUPS, Header, Layout, Read, Schemes, Shapes, unsupported
from quantkit.model.layouts._compressed_tensors import (
    FLOATS,
    PACKED,
    SCALE,
    ZERO,
    CompressedTensors,
    bits_of,
    exact_scale,
    pack,
    unpack,
)
from quantkit.scheme import WeightScheme

SHAPE = ".weight_shape"


@dataclass(frozen=True)
class PackQuantized(CompressedTensors):
    """Layout of packed integers, as described in the module."""

    codes: ClassVar[str] = PACKED
    parts: ClassVar[tuple[str, ...]] = (PACKED, SCALE, ZERO, SHAPE)

    def served(self, scheme: WeightScheme) -> bool:
        groups = scheme.granularity != "tensor" and (scheme.group or -1) in MARLIN_GROUPS
        return groups and scheme.format in ("int2", "int3", "int4", "int8")

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        for linear, scheme in schemes.items():
            bits, (rows, columns) = bits_of(scheme, linear=linear), shapes.get(linear, (0, 0))
            groups = columns // scheme.group if scheme.group else 1
            if not scheme.symmetric and bits == 4 and 0 < rows <= 8 and groups > 1:
                value, rule = f"zero points of {rows} rows", "compressed-tensors reads those of more than 8 rows"
                remedy = "--set scheme.weights.symmetric=true, or an override that leaves it in floats (weights: null)"
                raise unsupported(linear, value, rule, remedy)
        super().accepts(schemes, shapes)

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        rows, columns = shape
        bits, tensor = bits_of(scheme), scheme.granularity == "tensor"
        groups = columns // (scheme.group or columns)
        listed: list[Header] = [
            (prefix + PACKED, "I32", (rows, math.ceil(columns * bits / 32))),
            (prefix + SCALE, FLOATS[scheme.scale], (1,) if tensor else (rows, groups)),
        ]
        if not scheme.symmetric:
            words = (math.ceil(rows * bits / 32), groups)
            listed.append((prefix + ZERO, "I8", (1,)) if tensor else (prefix + ZERO, "I32", words))
        return [*listed, (prefix + SHAPE, "I64", (2,))]

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        return pack(tensor.codes, bits_of(tensor.scheme))  # int32 [N, ceil(K b / 32)]

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        stored, whole = exact_scale(prefix, tensor, dtype), tensor.scheme.granularity == "tensor"
        companions = {prefix + SCALE: stored.reshape(1) if whole else stored}
        if tensor.zero is not None:
            packed = tensor.zero.reshape(1) if whole else pack(tensor.zero.T, bits_of(tensor.scheme)).T.contiguous()
            companions[prefix + ZERO] = packed
        return companions | {prefix + SHAPE: torch.tensor(tensor.shape, dtype=torch.int64)}

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        """Return the config. Raises InputError (`layout-unsupported`) for several schemes with zero points."""
        # properties that make separate groups in the library
        kinds = {name: (bits_of(how), how.granularity, how.group, how.symmetric) for name, how in layers.items()}
        several = len(set(kinds.values()))
        if several > 1 and any(not scheme.symmetric for scheme in layers.values()):
            first = next(iter(kinds.values()))
            raise unsupported(
                next(name for name, kind in kinds.items() if kind != first),
                f"{several} different schemes, at least one with zero points",
                "transformers loads packed zero points of a single scheme only",
                "make them symmetric, or give all layers one scheme",
            )
        written = super().quantization_config(layers, ignore, dtype)
        if several == 1:
            # compressed-tensors 0.18 to 0.20 expects *unpacked* zero points in a model built without weights, as
            # transformers builds it, and so rejects the packed ones of its own writer. Expansion on loading, the other
            # way in transformers, accepts them, for a single scheme. vLLM ignores this key.
            written["dequantize"] = True
        return written

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        rows, columns = (int(size) for size in read(prefix + SHAPE))
        return rows, columns

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Return the bits of padding to 32-bit words, per row of codes and column of zero points; one zero point takes
        a byte.
        """
        rows, columns = shape
        return 128 + 31 * rows + (0 if scheme.symmetric else 31 * (columns // (scheme.group or columns)))

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        bits, (rows, columns), scale = bits_of(scheme), self.shape(prefix, read), read(prefix + SCALE)
        codes = unpack(read(prefix + PACKED), bits, columns)
        zero = None if scheme.symmetric else read(prefix + ZERO)
        if scheme.granularity == "tensor":
            return QuantTensor(codes, scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1), scheme)
        return QuantTensor(codes, scale, None if zero is None else unpack(zero.T.contiguous(), bits, rows).T, scheme)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """Multiply code and scale in the scale's dtype if weights are expanded on loading, else in the model's."""
        # the two differ for float16 scales in a float32 model, by one rounding to 11 bits.
        # the product of code and scale is exact in float32, so the cast below is the only rounding
        first = tensor.scale.dtype if config.get("dequantize") else dtype
        return super().as_loaded(tensor, first, config).to(dtype)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        kind = {"num_bits": bits_of(scheme), "type": "int", "symmetric": scheme.symmetric}
        return {**kind, "strategy": scheme.granularity, "group_size": scheme.group}


LAYOUT: Layout = PackQuantized("pack_quantized")
