"""Common parts of the layouts of compressed-tensors, and the layouts that several formats share.

All store the scales of a linear in `weight_scale`. The written configuration names the layout and the arguments of each
scheme; the library expands weights by them.

`PlainCodes`: codes in the shape of the weight (`int-quantized`, `float-quantized`). Kernels compute on them directly if
inputs are quantized too (`compressed_tensors/compressors/naive_quantized`). A matrix [N, K] becomes

    weight             int8 or float8_e4m3fn [N, K]
    weight_scale       float of the scheme: channel [N, 1], tensor [1], block [⌈N/128⌉, ⌈K/128⌉], group [N, K/group]
    weight_zero_point  int8, as the scale; asymmetric only
    input_scale        [1], if calibration fixed the scale of the input (written by the checkpoint, in any layout)

`PackedFp4`: 4-bit floats (E2M1), two per byte, the first in the low half (`compressors/nvfp4` and `mxfp4`, whose
expansion multiplies in bfloat16). [4096, 4096] in groups of 16 is uint8 [4096, 2048] and [4096, 256],

    weight_packed        uint8 [N, K / 2]   sign bit, then the index among 0, 0.5, 1, 1.5, 2, 3, 4, 6
    weight_scale         [N, G]             float8_e4m3fn (nvfp4), or uint8, the exponent plus 127 (mxfp4)
    weight_global_scale  float32 [1]        nvfp4 only: the *divisor* of the scales

`pack` and `unpack` store integer codes densely in 32-bit words, least significant bit first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from quantkit.errors import InputError, MissingDependency
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.scaled import FP4_E2M1
from quantkit.lazy import torch
from quantkit.model.layouts import (
    Expansion,
    Header,
    Layout,
    Read,
    Schemes,
    Shapes,
    check_format,
    stored_with,
    unsupported,
)
from quantkit.model.structure.names import names_it
from quantkit.scheme import WeightScheme

LIBRARY = "compressed_tensors"
WEIGHT, SCALE, ZERO = ".weight", ".weight_scale", ".weight_zero_point"
PACKED, GLOBAL = ".weight_packed", ".weight_global_scale"
# dtype of scales -> its name in safetensors
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """Base of a layout of compressed-tensors; its name with hyphens is the library's."""

    name: str
    serving: str = field(default="", kw_only=True)
    libraries: ClassVar[tuple[str, ...]] = (LIBRARY,)

    @property
    def title(self) -> str:
        return self.name.replace("_", "-")

    @abstractmethod
    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        """Return the arguments of the library's `QuantizationArgs`."""

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        self.quantization_config(schemes, [], "float32")

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        """Return one config group per kind of scheme.

        A single group targets the class `Linear` except ignored ones; several groups name their linears, and the
        ignored ones
        are listed too. Raises MissingDependency (compressed-tensors).
        """
        with MissingDependency.unless_found(LIBRARY, extra="compile", purpose="a packed checkpoint"):
            from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

        groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, scheme in layers.items():
            groups.setdefault(tuple(self.arguments(scheme).items()), []).append(name)
        config_groups = {}
        for index, (kind, names) in enumerate(groups.items()):
            targets, weights = ["Linear"] if len(groups) == 1 else names, QuantizationArgs(**dict(kind))
            config_groups[f"group_{index}"] = QuantizationScheme(targets=targets, weights=weights, format=self.title)
        options = {"format": self.title, "quantization_status": "compressed", "ignore": list(ignore)}
        config = QuantizationConfig(config_groups=config_groups, **options)
        written: dict[str, Any] = config.model_dump(mode="json")
        if QuantizationConfig.model_validate(written) != config:
            raise AssertionError("compressed-tensors does not read back its own configuration")
        return written

    def wrote(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "compressed-tensors" and config.get("format") == self.title

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        return read(prefix + SCALE)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        return expansion_of(config, dtype)


def expansion_of(config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
    """Expand by `BaseCompressor.decompress`, as transformers does for each linear; its group says its layout."""
    with MissingDependency.unless_found(LIBRARY, extra="compile", purpose="a packed checkpoint"):
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

    known = QuantizationConfig.model_fields.keys()
    parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key in known})
    groups = list(parsed.config_groups.values())
    # True if transformers expands weights on loading; else it keeps them packed, with scales in the model's dtype
    at_load = bool(config.get("dequantize"))

    def weight(prefix: str, read: Read) -> torch.Tensor:
        scheme = groups[group_of(prefix, [group.targets for group in groups])]
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format or parsed.format))
        parts = {
            name: read(f"{prefix}.{name}") for name in compressor.compression_param_names(scheme) if "input" not in name
        }
        if not at_load and parts["weight_scale"].dtype.itemsize > 1:
            parts["weight_scale"] = parts["weight_scale"].to(dtype)
        values: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
        return values.to(dtype)

    return Expansion(LIBRARY, weight, anywhere=True)


def group_of(linear: str, targets: Sequence[Sequence[str]]) -> int:
    """Return the number of the config group of a linear: the first that names it, else the one of its class, else 0."""
    named = (number for number, names in enumerate(targets) if any(names_it(linear, name) for name in names))
    classes = (number for number, names in enumerate(targets) if "Linear" in names)
    return next(named, next(classes, 0))


def exact_scale(prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast scales to their stored dtype; `scale-inexact` if the model's dtype cannot hold one."""
    stored, plain = tensor.scale.to(getattr(torch, tensor.scheme.scale)), str(dtype).removeprefix("torch.")
    if torch.equal(stored.to(dtype).float(), tensor.scale.float()):
        return stored
    value, rule = f"{tensor.scheme.scale} scales in a {plain} model", "loaders cast scales to the model's dtype"
    raise InputError("scale-inexact", prefix, value, rule, f"--set scheme.weights.scale={plain}")


@dataclass(frozen=True)
class PlainCodes(CompressedTensors):
    """Layout of one format with codes in the shape of the weight.

    Args:
        format: name of the format.
        stored: dtype of the codes in safetensors.
        type: the library's kind of number.
    """

    format: str
    stored: str
    type: str
    codes: ClassVar[str] = WEIGHT
    parts: ClassVar[tuple[str, ...]] = (WEIGHT, SCALE, ZERO)

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        check_format(self.title, self.format, schemes, "export: checkpoint: {layout: pack-quantized}, or `dense`")
        super().accepts(schemes, shapes)

    def served(self, scheme: WeightScheme) -> bool:
        """Tell whether vLLM reads it with quantized inputs; blocks only for floats."""
        blocks = ("channel", "tensor", "block") if self.type == "float" else ("channel", "tensor")
        return scheme.symmetric and scheme.granularity in blocks

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        scales = _scales(*shape, scheme)
        listed = [(prefix + WEIGHT, self.stored, shape), (prefix + SCALE, FLOATS[scheme.scale], scales)]
        return listed if scheme.symmetric else [*listed, (prefix + ZERO, "I8", scales)]

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        return tensor.codes.contiguous()

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        shape = _scales(*tensor.shape, tensor.scheme)
        stored = {SCALE: exact_scale(prefix, tensor, dtype), ZERO: tensor.zero}
        return {prefix + part: value.reshape(shape).contiguous() for part, value in stored.items() if value is not None}

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """List the linears with a scale, since every linear has a weight."""
        return stored_with(SCALE, names)

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        rows, columns = read(prefix + WEIGHT).shape
        return rows, columns

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        return 8  # nothing is padded; one zero point takes a byte

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        scale, zero = read(prefix + SCALE), None if scheme.symmetric else read(prefix + ZERO)
        if scheme.granularity == "tensor":
            scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
        return QuantTensor(read(prefix + WEIGHT), scale, zero, scheme)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
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
    """Return the stored shape of scales."""
    if scheme.granularity == "tensor":
        return (1,)
    if scheme.granularity == "block" and scheme.group:
        return -(-rows // scheme.group), -(-columns // scheme.group)
    return rows, columns // scheme.group if scheme.group else 1


@dataclass(frozen=True)
class PackedFp4(CompressedTensors):
    """Layout of 4-bit floats.

    Args:
        format: name of the format.
        strategy: the library's name of the granularity.
        dtype: dtype of the scales in safetensors.
        argument: the library's name of that dtype.
    """

    format: str
    strategy: str
    dtype: str
    argument: str
    codes: ClassVar[str] = PACKED
    parts: ClassVar[tuple[str, ...]] = (PACKED, SCALE, GLOBAL)

    @property
    def _global(self) -> bool:
        return self.strategy == "tensor_group"

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        check_format(self.title, self.format, schemes)
        super().accepts(schemes, shapes)

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        rows, columns = shape
        scales = (rows, columns // (scheme.group or columns))
        listed: list[Header] = [(prefix + PACKED, "U8", (rows, columns // 2)), (prefix + SCALE, self.dtype, scales)]
        return [*listed, (prefix + GLOBAL, "F32", (1,))] if self._global else listed

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        return tensor.codes[:, ::2] | (tensor.codes[:, 1::2] << 4)  # uint8 [N, K / 2]

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        stored = {prefix + SCALE: tensor.scale.view(torch.uint8) if self.dtype == "U8" else tensor.scale}
        if tensor.global_scale is not None:
            stored[prefix + GLOBAL] = (1 / tensor.global_scale.float()).reshape(1)
        return stored

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        # expanded on loading, which supports a single scheme
        return super().quantization_config(layers, ignore, dtype) | {"dequantize": True}

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        rows, half = read(prefix + PACKED).shape
        return rows, 2 * half

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        stored = read(prefix + SCALE)
        scale = stored.view(torch.float8_e8m0fnu).float() if self.dtype == "U8" else stored.float()
        return scale / read(prefix + GLOBAL) if self._global else scale

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        packed, scale = read(prefix + PACKED), read(prefix + SCALE)
        codes = torch.stack((packed & 15, packed >> 4), dim=2).reshape(packed.shape[0], -1)
        whole = 1 / read(prefix + GLOBAL).reshape(()) if self._global else None
        scale = scale.view(torch.float8_e8m0fnu) if self.dtype == "U8" else scale
        return QuantTensor(codes, scale, None, scheme, codebook=FP4_E2M1.codebook(), global_scale=whole)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """Divide scales by the global one in float32, and round the product to bfloat16, as the library does."""
        if tensor.global_scale is not None:
            # the last bit of a factor can decide the rounding to bfloat16
            tensor = replace(tensor, scale=tensor.scale.float() / (1 / tensor.global_scale.float()), global_scale=None)
        return super().as_loaded(tensor, torch.bfloat16, config).to(dtype)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        kind = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": self.strategy}
        return {**kind, "group_size": scheme.group, "scale_dtype": self.argument}


def bits_of(scheme: WeightScheme, layout: str = "pack-quantized", linear: str = "") -> int:
    """Return the bits of a code. Raises InputError (`layout-unsupported`) for other formats than integers."""
    if scheme.format not in ("int8", "int4", "int3", "int2"):
        raise unsupported(linear, f"{layout} of {scheme.format}", "this layout holds integers of up to 8 bits")
    return int(scheme.format.removeprefix("int"))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 [N, K] into int32 [N, ceil(K b / 32)], rows padded with zero bits."""
    rows, columns = codes.shape
    words = math.ceil(columns * bits / 32)
    if bits in (4, 8):
        # whole bytes at once: this is every weight of a model
        packed = codes.contiguous().view(torch.uint8) + 2 ** (bits - 1)
        if missing := words * 32 // bits - columns:
            packed = torch.nn.functional.pad(packed & (2**bits - 1), (0, missing))
        if bits == 4:
            # a pair of bytes is 0000 bbbb 0000 aaaa; its low byte is to be bbbb aaaa
            pairs = (packed & 15).reshape(-1).view(torch.int16)
            packed = (pairs | (pairs >> 4)).to(torch.uint8)
    else:
        packed = load_format(f"int{bits}").pack(codes)
        packed = torch.nn.functional.pad(packed, (0, 4 * words - packed.shape[1]))
    stored: torch.Tensor = packed.reshape(-1).view(torch.int32).reshape(rows, words)
    return stored


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack int32 [N, ceil(K b / 32)] to int8 [N, K]."""
    # `contiguous` returns a single column as it is, and a view in bytes wants a last stride of 1
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return (packed[:, :columns] ^ 0x80).view(torch.int8)
    if bits == 4:
        pairs = torch.stack((packed & 15, packed >> 4), dim=2).reshape(packed.shape[0], -1)
        return pairs[:, :columns].to(torch.int8) - 8
    return load_format(f"int{bits}").unpack(packed, columns)
