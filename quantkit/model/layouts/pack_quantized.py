"""Integers of up to 8 bits in compressed-tensors' `pack-quantized` layout, and back.

A matrix [N, K] of b-bit codes in G groups becomes

    weight_packed      int32 [N, ceil(K b / 32)]   code + 2^(b-1), densely, least significant bit first
    weight_scale       [N, G]; [1] per tensor      in the scheme's scale dtype
    weight_zero_point  int32 [ceil(N b / 32), G]   zero + 2^(b-1), packed along N; int8 [1] per tensor; asymmetric only
    weight_shape       int64 [2]                   N, K

so that [4096, 4096] in 4 bits and groups of 128 is int32 [4096, 512], [4096, 32] and [512, 32].
Packed and unpacked by our own code, so that what compressed-tensors makes of it is an independent check.
See `compressed_tensors/compressors/pack_quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.model.layouts import MARLIN_GROUPS, Header, Layout, Read, unsupported
from quantkit.model.layouts._compressed_tensors import SCALE, CompressedTensors, exact_scale
from quantkit.model.layouts._plain_codes import FLOATS, bits_of, pack, unpack
from quantkit.scheme import WeightScheme

PACKED, ZERO, SHAPE = ".weight_packed", ".weight_zero_point", ".weight_shape"


def kinds(schemes: Iterable[WeightScheme]) -> set[tuple[int, str, int | None, bool]]:
    """The schemes that the library tells apart: (bits, granularity, group, symmetric)."""
    return {(bits_of(scheme), scheme.granularity, scheme.group, scheme.symmetric) for scheme in schemes}


@dataclass(frozen=True)
class PackQuantized(CompressedTensors):
    """See the module."""

    codes: ClassVar[str] = PACKED
    parts: ClassVar[tuple[str, ...]] = (PACKED, SCALE, ZERO, SHAPE)

    def served(self, scheme: WeightScheme) -> bool:
        """See `Layout`."""
        return (
            scheme.format in ("int2", "int3", "int4", "int8")
            and (scheme.group or -1) in MARLIN_GROUPS
            and scheme.granularity != "tensor"
        )

    def accepts(self, schemes: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        for linear, scheme in schemes.items():
            bits_of(scheme, linear=linear)
        super().accepts(schemes, shapes)

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """See `Layout`."""
        rows, columns = shape
        bits = bits_of(scheme)
        tensor = scheme.granularity == "tensor"
        groups = columns // (scheme.group or columns)
        found: list[Header] = [
            (prefix + PACKED, "I32", (rows, math.ceil(columns * bits / 32))),
            (prefix + SCALE, FLOATS[scheme.scale], (1,) if tensor else (rows, groups)),
        ]
        if not scheme.symmetric:
            whole = (prefix + ZERO, "I8", (1,))
            found.append(whole if tensor else (prefix + ZERO, "I32", (math.ceil(rows * bits / 32), groups)))
        return [*found, (prefix + SHAPE, "I64", (2,))]

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """int32 [N, ceil(K b / 32)]."""
        return pack(tensor.codes, bits_of(tensor.scheme))

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Scales, packed zero points, shape.

        Raises:
            InputError: `scale-inexact`, a scale that `dtype` cannot hold: loaders cast scales to it.
        """
        scheme = tensor.scheme
        stored = exact_scale(prefix, tensor, dtype)
        whole = scheme.granularity == "tensor"
        found = {prefix + SCALE: stored.reshape(1) if whole else stored}
        if tensor.zero is not None:
            packed = tensor.zero.reshape(1) if whole else pack(tensor.zero.T, bits_of(scheme)).T.contiguous()
            found[prefix + ZERO] = packed
        found[prefix + SHAPE] = torch.tensor(tensor.shape, dtype=torch.int64)
        return found

    def quantization_config(
        self, layers: Mapping[str, WeightScheme], ignore: Sequence[str], dtype: str
    ) -> dict[str, Any]:
        """See `Layout`.

        Raises:
            InputError: `layout-unsupported`, several schemes of which one has zero points.
            MissingDependency: compressed-tensors.
        """
        single = len(kinds(layers.values())) == 1
        if not single and any(not scheme.symmetric for scheme in layers.values()):
            first = next(iter(layers.values()))
            raise unsupported(
                next(name for name, scheme in layers.items() if kinds([scheme]) != kinds([first])),
                f"{len(kinds(layers.values()))} different schemes, at least one with zero points",
                "transformers loads packed zero points of a single scheme only",
                "make them symmetric, or give all layers one scheme",
            )
        written = super().quantization_config(layers, ignore, dtype)
        if single:
            # compressed-tensors 0.18 to 0.20 expects *unpacked* zero points in a model that is built without weights,
            # as transformers builds it, and so rejects the packed ones, which its own writer makes. transformers' other
            # way in, which expands every linear as it is read, takes them; it knows one scheme only. vLLM ignores it.
            written["dequantize"] = True
        return written

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """See `Layout`."""
        rows, columns = (int(size) for size in read(prefix + SHAPE))
        return rows, columns

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """A row of codes, and a column of zero points, is padded to whole 32-bit words; one zero point takes a byte."""
        rows, columns = shape
        groups = columns // (scheme.group or columns)
        return 128 + 31 * rows + (0 if scheme.symmetric else 31 * groups)

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """See `Layout`."""
        bits = bits_of(scheme)
        rows, columns = self.shape(prefix, read)
        scale = read(prefix + SCALE)
        codes = unpack(read(prefix + PACKED), bits, columns)
        if scheme.granularity == "tensor":
            zero = None if scheme.symmetric else read(prefix + ZERO).reshape(1, 1)
            return QuantTensor(codes, scale.reshape(1, 1), zero, scheme)
        zero = None if scheme.symmetric else unpack(read(prefix + ZERO).T.contiguous(), bits, rows).T
        return QuantTensor(codes, scale, zero, scheme)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """See `Layout`.

        Where weights are expanded as they are read (see `quantization_config`), code and scale are multiplied in the
        dtype the scale is stored in, else in the model's. The two differ where float16 scales stand in a float32 model,
        by one rounding to 11 bits.
        """
        # codes and scales are short enough for their product to be exact in float32: what follows is the only rounding
        first = tensor.scale.dtype if config.get("dequantize") else dtype
        return super().as_loaded(tensor, first, config).to(dtype)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        """See `CompressedTensors`."""
        return {
            "num_bits": bits_of(scheme),
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": scheme.granularity,
            "group_size": scheme.group,
        }


LAYOUT: Layout = PackQuantized("pack_quantized")
