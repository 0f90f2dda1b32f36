"""Codes in the shape of the weight: compressed-tensors' `int-quantized` and `float-quantized`.

A matrix [N, K] becomes

    weight             int8 or float8_e4m3fn [N, K]
    weight_scale       float of the scheme: channel [N, 1], tensor [1], block [⌈N/128⌉, ⌈K/128⌉], group [N, K/group]
    weight_zero_point  int8, as the scale; asymmetric only
    input_scale        [1], where calibration fixed the scale of the input (written by the checkpoint, in any layout)

These are the layouts that kernels compute on directly, when the inputs are quantized too. See
`compressed_tensors/compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit import registry
from quantkit.errors import InputError
from quantkit.formats import QuantTensor
from quantkit.model.layouts import Expansion, Header, Read, _compressed_tensors
from quantkit.model.layouts._words import FLOATS
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

WEIGHT, SCALE, ZERO = ".weight", ".weight_scale", ".weight_zero_point"


@dataclass(frozen=True)
class PlainCodes:
    """A layout for one format.

    Args:
        name: the file's stem.
        format: whose codes it holds.
        stored: their dtype in safetensors.
        type: what compressed-tensors calls the kind of number.
    """

    name: str
    format: str
    stored: str
    type: str
    libraries: tuple[str, ...] = (_compressed_tensors.LIBRARY,)
    kernels: bool = False
    codes: str = WEIGHT
    parts: tuple[str, ...] = (WEIGHT, SCALE, ZERO)

    def accepts(self, schemes: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        layout = self.name.replace("_", "-")
        for linear, scheme in schemes.items():
            if scheme.format != self.format:
                raise InputError(
                    "layout-unsupported",
                    where=linear,
                    value=f"{layout} of {scheme.format}",
                    rule=f"this layout holds {self.format}",
                    remedy="export: checkpoint: {layout: pack-quantized}, or `dense`",
                )
        self.quantization_config(schemes, [], "float32")

    def served(self, scheme: WeightScheme) -> bool:
        """Beside quantized inputs; blocks of floats alone."""
        blocks = ("channel", "tensor", "block") if self.type == "float" else ("channel", "tensor")
        return scheme.symmetric and scheme.granularity in blocks

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """See `Layout`."""
        rows, columns = shape
        found: list[Header] = [
            (prefix + WEIGHT, self.stored, shape),
            (prefix + SCALE, FLOATS[scheme.scale], _scales(rows, columns, scheme)),
        ]
        if not scheme.symmetric:
            found.append((prefix + ZERO, "I8", _scales(rows, columns, scheme)))
        return found

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """The codes as they are, [N, K]."""
        return tensor.codes.contiguous()

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Scales and zero points.

        Raises:
            InputError: `scale-inexact`, a scale that `dtype` cannot hold: loaders cast scales to it.
        """
        import torch

        scheme = tensor.scheme
        shape = _scales(*tensor.shape, scheme)
        stored = tensor.scale.to(getattr(torch, scheme.scale))
        if not torch.equal(stored.to(dtype).float(), tensor.scale.float()):
            raise InputError(
                "scale-inexact",
                where=prefix,
                value=f"{scheme.scale} scales in a {str(dtype).removeprefix('torch.')} model",
                rule="who loads the checkpoint casts its scales to the model's dtype",
                remedy=f"scheme.weights.scale={str(dtype).removeprefix('torch.')}",
            )
        found = {prefix + SCALE: stored.reshape(shape).contiguous()}
        if tensor.zero is not None:
            found[prefix + ZERO] = tensor.zero.reshape(shape).contiguous()
        return found

    def quantization_config(
        self, layers: Mapping[str, WeightScheme], ignore: Sequence[str], dtype: str
    ) -> dict[str, Any]:
        """See `Layout`."""
        layout = self.name.replace("_", "-")
        return _compressed_tensors.quantization_config(layers, ignore, layout=layout, weights=self._arguments)

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """See `Layout`."""
        return config.get("quant_method") == "compressed-tensors" and config.get("format") == self.name.replace(
            "_", "-"
        )

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """See `Layout`."""
        return [name.removesuffix(SCALE) for name in names if name.endswith(SCALE)]

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """See `Layout`."""
        rows, columns = read(prefix + WEIGHT).shape
        return rows, columns

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        """See `Layout`."""
        return read(prefix + SCALE)

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Nothing is padded; one zero point takes a byte."""
        return 8

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """See `Layout`."""
        scale = read(prefix + SCALE)
        zero = None if scheme.symmetric else read(prefix + ZERO)
        if scheme.granularity == "tensor":
            scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
        return QuantTensor(read(prefix + WEIGHT), scale, zero, scheme)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, among: Collection[WeightScheme]) -> torch.Tensor:
        """See `Layout`. Code and scale are multiplied in the model's dtype."""
        values: torch.Tensor = registry.load("formats", tensor.scheme.format).dequantize(tensor)
        return values.to(dtype)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """See `Layout`."""
        return _compressed_tensors.expansion(config, dtype)

    def _arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        block = scheme.granularity == "block" and scheme.group
        return {
            "num_bits": 8,
            "type": self.type,
            "symmetric": scheme.symmetric,
            "strategy": scheme.granularity,
            "group_size": scheme.group if scheme.granularity == "group" else None,
            "block_structure": (block, block) if block else None,
        }


def _scales(rows: int, columns: int, scheme: WeightScheme) -> tuple[int, ...]:
    """The shape that scales are stored in."""
    if scheme.granularity == "tensor":
        return (1,)
    if scheme.granularity == "block" and scheme.group:
        return -(-rows // scheme.group), -(-columns // scheme.group)
    return rows, columns // scheme.group if scheme.group else 1
