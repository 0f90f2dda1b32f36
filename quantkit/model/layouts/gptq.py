"""Integers in the layout of AutoGPTQ and GPTQModel, version 1, which stores zero points minus one.

A matrix [N, K] of b-bit codes in G groups becomes

    qweight  int32 [K b / 32, N]   code + 2^(b-1), densely along K, least significant bit first
    qzeros   int32 [G, N b / 32]   zero + 2^(b-1), densely along N; minus one in version 1; symmetric: zero = 0
    scales   [G, N]                in the scheme's scale dtype
    g_idx    int32 [K]             group of each input: k // group

so that [4096, 4096] in 4 bits and groups of 128 is int32 [512, 4096], [32, 512], [32, 4096] and [4096]. Readers compute
`scales * (code - zero)` in the dtype of the scales.

See `BaseQuantLinear.dequantize_weight` and `convert_gptq_v1_to_v2_format_module` of GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.model.layouts import (
    MARLIN_GROUPS,
    REGEX,
    Expansion,
    Header,
    Layout,
    Read,
    Schemes,
    Shapes,
    missing,
    unsupported,
)
from quantkit.model.layouts._compressed_tensors import FLOATS, bits_of, pack, unpack
from quantkit.scheme import WeightScheme

QWEIGHT, QZEROS, SCALES, G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
_IN_A_BLOCK = re.compile(r"(?:^|\.)\d+\\?\.")


@dataclass(frozen=True)
class GptqLayout(Layout):
    """Layout of both versions.

    Args:
        name: `checkpoint_format` in the config.
        less: number subtracted from a stored zero point.
    """

    name: str
    less: int
    serving: str = ""
    libraries: ClassVar[tuple[str, ...]] = ("gptqmodel", "optimum")
    kernels: ClassVar[bool] = True
    codes: ClassVar[str] = QWEIGHT
    parts: ClassVar[tuple[str, ...]] = (QWEIGHT, QZEROS, SCALES, G_IDX)
    needed: ClassVar[tuple[str, ...]] = (QZEROS, SCALES, G_IDX)

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        kinds = {self._kind(scheme, linear): linear for linear, scheme in schemes.items()}
        if len(kinds) > 1:
            second, rule = list(kinds.values())[1], "transformers reads a single scheme in it"
            remedy = "give all layers one scheme, or layout: pack-quantized"
            raise unsupported(second, f"{len(kinds)} different schemes", rule, remedy)
        for linear, scheme in schemes.items():
            bits = bits_of(scheme, self.name, linear)
            if not _IN_A_BLOCK.search(linear):
                rule = "its readers quantize only linears inside of blocks"
                raise unsupported(linear, "outside of the blocks", rule, "keep: [lm_head]")
            if scheme.granularity == "tensor":
                raise unsupported(linear, "one scale per tensor", "a scale for every row", "granularity: channel")
            if not scheme.symmetric and self.less:
                rule = "version 1 stores them minus one, and has no place for a zero point of 0"
                raise unsupported(linear, "zero points", rule, "layout: gptq-v2")
            rows, columns = shapes.get(linear, (32, 32))
            if rows * bits % 32 or columns * bits % 32:
                raise unsupported(linear, f"[{rows}, {columns}]", f"multiples of {32 // bits if bits != 3 else 32}")

    def served(self, scheme: WeightScheme) -> bool:
        return scheme.format in ("int4", "int8") and scheme.symmetric and (scheme.group or -1) in MARLIN_GROUPS

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        rows, columns = shape
        bits, groups = bits_of(scheme, self.name), columns // (scheme.group or columns)
        return [
            (prefix + QWEIGHT, "I32", (columns * bits // 32, rows)),
            (prefix + QZEROS, "I32", (groups, rows * bits // 32)),
            (prefix + SCALES, FLOATS[scheme.scale], (groups, rows)),
            (prefix + G_IDX, "I32", (columns,)),
        ]

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        return pack(tensor.codes, bits_of(tensor.scheme)).T.contiguous()  # int32 [K b / 32, N]

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        columns, groups = tensor.codes.shape[1], tensor.scale.shape[1]
        zero = torch.zeros(tensor.scale.shape, dtype=torch.int8) if tensor.zero is None else tensor.zero
        return {
            prefix + QZEROS: pack(zero.T - self.less, bits_of(tensor.scheme)),
            prefix + SCALES: tensor.scale.to(getattr(torch, tensor.scheme.scale)).T.contiguous(),
            prefix + G_IDX: torch.arange(columns, dtype=torch.int32) // (columns // groups),
        }

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        bits, group, symmetric = self._kind(next(iter(layers.values())))
        config = {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
        }
        kept = [name for name in ignore if name.startswith(REGEX) or _IN_A_BLOCK.search(name)]
        if kept:
            # `modules_in_block_to_quantize` is for transformers (optimum), `dynamic` for GPTQModel and vLLM,
            # `modules_to_not_convert` for vLLM's other kernels of experts, which match parts of a name
            config["modules_in_block_to_quantize"] = [list(layers)]
            patterns = [name.removeprefix(REGEX) if name.startswith(REGEX) else f"{re.escape(name)}$" for name in kept]
            config["dynamic"] = {f"-:^{pattern}": {} for pattern in patterns}
            experts = [name for name in kept if name.endswith(".experts")]
            config |= {"modules_to_not_convert": experts} if experts else {}
        return config

    def wrote(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "gptq" and config.get("checkpoint_format", "gptq") == self.name

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        return read(prefix + SCALES).shape[1], read(prefix + G_IDX).shape[0]

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        return read(prefix + SCALES)

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Return the bits of the groups of inputs, and of zero points, which symmetric weights store too."""
        rows, columns = shape
        groups = columns // (scheme.group or columns)
        return 32 * columns + (groups * rows * bits_of(scheme) if scheme.symmetric else 0)

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        bits, (rows, columns) = bits_of(scheme), self.shape(prefix, read)
        codes = unpack(read(prefix + QWEIGHT).T, bits, columns)
        stored = unpack(read(prefix + QZEROS), bits, rows).T
        zero = None if scheme.symmetric else (stored + self.less).contiguous()
        return QuantTensor(codes, read(prefix + SCALES).T.contiguous(), zero, scheme)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """Multiply code and scale in the dtype of the scale."""
        return super().as_loaded(tensor, tensor.scale.dtype, config).to(dtype)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """Expand by GPTQModel's `TorchLinear.dequantize_weight`, or by our own reader."""
        if missing(self):
            return Expansion(None, lambda prefix, read: self._own(prefix, read).to(dtype))
        return Expansion("gptqmodel", lambda prefix, read: self._theirs(config, prefix, read).to(dtype))

    def _own(self, prefix: str, read: Read) -> torch.Tensor:
        # some linears of a file may have other bits and groups than its config says, which their shapes tell
        bits = 32 * read(prefix + QWEIGHT).shape[0] // self.shape(prefix, read)[1]
        # the file has zero points in any case
        tensor = self.read_back(prefix, WeightScheme(format=f"int{bits}", symmetric=False), read)
        groups = read(prefix + G_IDX).long()
        assert tensor.zero is not None
        scale, zero = tensor.scale[:, groups], tensor.zero[:, groups]
        # the product of a code and a 16-bit scale is exact in float32, so the only rounding is the reader's
        return ((tensor.codes.float() - zero.float()) * scale.float()).to(scale.dtype)

    def _theirs(self, config: Mapping[str, Any], prefix: str, read: Read) -> torch.Tensor:
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

        stored = {part.removeprefix("."): read(prefix + part) for part in self.parts}
        rows, columns = self.shape(prefix, read)
        module = TorchLinear(
            config["bits"], config["group_size"], config["sym"], config["desc_act"], columns, rows, bias=False
        )
        for name, value in stored.items():
            setattr(module, name, value)
        if self.less:
            convert_gptq_v1_to_v2_format_module(module, bits=config["bits"], pack_dtype=torch.int32)
        module.post_init()
        weight: torch.Tensor = module.dequantize_weight()
        return weight.T.contiguous()

    def _kind(self, scheme: WeightScheme, linear: str = "") -> tuple[int, int, bool]:
        return bits_of(scheme, self.name, linear), scheme.group or -1, scheme.symmetric


LAYOUT: Layout = GptqLayout("gptq", less=1)
