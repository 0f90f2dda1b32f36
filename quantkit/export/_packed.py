"""One linear in compressed-tensors' `pack-quantized` layout, and back.

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
from typing import TYPE_CHECKING, Any

from quantkit import registry
from quantkit.errors import InputError
from quantkit.formats import QuantTensor
from quantkit.recipe import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

PACKED, SCALE, ZERO, SHAPE = (
    ".weight_packed",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
)
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def bits_of(scheme: WeightScheme) -> int:
    """Bits of a code.

    Raises:
        InputError: `layout-unsupported`, not an integer format.
    """
    if scheme.format not in ("int8", "int4", "int3", "int2"):
        raise InputError(
            "layout-unsupported",
            value=f"pack-quantized of {scheme.format}",
            rule="this layout holds integers of up to 8 bits",
            remedy="export: checkpoint: {layout: dense}",
        )
    return int(scheme.format.removeprefix("int"))


def headers(prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors dtype, shape) of what `quantized_tensors` makes, without making it."""
    rows, columns = shape
    bits = bits_of(scheme)
    tensor = scheme.granularity == "tensor"
    groups = columns // (scheme.group or columns)
    found: list[tuple[str, str, tuple[int, ...]]] = [
        (prefix + PACKED, "I32", (rows, math.ceil(columns * bits / 32))),
        (prefix + SCALE, _DTYPES[scheme.scale], (1,) if tensor else (rows, groups)),
    ]
    if not scheme.symmetric:
        whole = (prefix + ZERO, "I8", (1,))
        found.append(whole if tensor else (prefix + ZERO, "I32", (math.ceil(rows * bits / 32), groups)))
    return [*found, (prefix + SHAPE, "I64", (2,))]


def quantized_tensors(prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the checkpoint stores of a quantized linear.

    Args:
        prefix: the linear's name in the files, such as `model.layers.0.self_attn.q_proj`.
        tensor: its codes.
        dtype: the dtype the model will be loaded in: loaders cast scales to it.

    Raises:
        InputError: `scale-inexact`, a scale that `dtype` cannot hold; `layout-unsupported`.
    """
    import torch

    scheme, bits = tensor.scheme, bits_of(tensor.scheme)
    stored = tensor.scale.to(getattr(torch, scheme.scale))
    if not torch.equal(stored.to(dtype).float(), tensor.scale.float()):
        raise InputError(
            "scale-inexact",
            where=prefix,
            value=f"{scheme.scale} scales in a {str(dtype).removeprefix('torch.')} model",
            rule="who loads the checkpoint casts its scales to the model's dtype",
            remedy=f"scheme.weights.scale={str(dtype).removeprefix('torch.')}",
        )
    whole = scheme.granularity == "tensor"
    found = {
        prefix + PACKED: _pack(tensor.codes, bits),
        prefix + SCALE: stored.reshape(1) if whole else stored,
    }
    if tensor.zero is not None:
        found[prefix + ZERO] = tensor.zero.reshape(1) if whole else _pack(tensor.zero.T, bits).T.contiguous()
    found[prefix + SHAPE] = torch.tensor(tensor.shape, dtype=torch.int64)
    return found


def read_back(prefix: str, scheme: WeightScheme, read: Callable[[str], torch.Tensor]) -> QuantTensor:
    """The inverse of `quantized_tensors`; `read` gives a stored tensor by name."""
    bits = bits_of(scheme)
    rows, columns = (int(size) for size in read(prefix + SHAPE))
    scale = read(prefix + SCALE)
    codes = _unpack(read(prefix + PACKED), bits, columns)
    if scheme.granularity == "tensor":
        zero = None if scheme.symmetric else read(prefix + ZERO).reshape(1, 1)
        return QuantTensor(codes, scale.reshape(1, 1), zero, scheme)
    zero = None if scheme.symmetric else _unpack(read(prefix + ZERO).T.contiguous(), bits, rows).T
    return QuantTensor(codes, scale, zero, scheme)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> int32 [N, ceil(K b / 32)], rows filled up with zero bits."""
    import torch

    rows, columns = codes.shape
    words = math.ceil(columns * bits / 32)
    if bits in (4, 8):
        # whole bytes at once: this is every weight of a model
        packed = codes.contiguous().view(torch.uint8) + 2 ** (bits - 1)
        missing = words * 32 // bits - columns
        if missing:
            packed = torch.nn.functional.pad(packed & (2**bits - 1), (0, missing))
        if bits == 4:
            # a pair of bytes is 0000 bbbb 0000 aaaa; its low byte is to be bbbb aaaa
            pairs = (packed & 15).reshape(-1).view(torch.int16)
            packed = (pairs | (pairs >> 4)).to(torch.uint8)
    else:
        packed = registry.load("formats", f"int{bits}").pack(codes)
        packed = torch.nn.functional.pad(packed, (0, 4 * words - packed.shape[1]))
    found: torch.Tensor = packed.reshape(-1).view(torch.int32).reshape(rows, words)
    return found


def _unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 [N, ceil(K b / 32)] -> int8 [N, K]."""
    import torch

    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (packed[:, :columns] ^ 0x80).view(torch.int8)
    if bits == 4:
        pairs = torch.stack((packed & 15, packed >> 4), dim=2).reshape(packed.shape[0], -1)
        return pairs[:, :columns].to(torch.int8) - 8
    codes: torch.Tensor = registry.load("formats", f"int{bits}").unpack(packed, columns)
    return codes


def as_loaded(tensor: QuantTensor, dtype: torch.dtype, *, single: bool) -> torch.Tensor:
    """The weight [N, K] as plain transformers has it after loading, bit for bit.

    Args:
        tensor: its codes.
        dtype: what the model is loaded in.
        single: whether the checkpoint has one scheme. Then code and scale are multiplied in the dtype the scale is
            stored in (see `quantization_config`), else in the model's. The two differ where float16 scales stand in a
            float32 model, by one rounding to 11 bits.
    """
    values: torch.Tensor = registry.load("formats", tensor.scheme.format).dequantize(tensor)
    # codes and scales are short enough for their product to be exact in float32: what follows is the only rounding
    return values.to(tensor.scale.dtype).to(dtype) if single else values.to(dtype)


def kinds(schemes: Iterable[WeightScheme]) -> set[tuple[int, str, int | None, bool]]:
    """The schemes that the library tells apart: (bits, granularity, group, symmetric)."""
    return {(bits_of(scheme), scheme.granularity, scheme.group, scheme.symmetric) for scheme in schemes}


def quantization_config(layers: Mapping[str, WeightScheme], ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json, as transformers and vLLM read it.

    Args:
        layers: linear -> scheme.
        ignore: the other linears of the model.

    Raises:
        InputError: `layout-unsupported`, several schemes of which one has zero points.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    groups: dict[tuple[int, str, int | None, bool], list[str]] = {}
    for name, scheme in layers.items():
        key = (bits_of(scheme), scheme.granularity, scheme.group, scheme.symmetric)
        groups.setdefault(key, []).append(name)
    asymmetric = any(not symmetric for *_, symmetric in groups)
    if asymmetric and len(groups) > 1:
        raise InputError(
            "layout-unsupported",
            where=next(iter(list(groups.values())[1])),
            value=f"{len(groups)} different schemes, at least one with zero points",
            rule="transformers loads packed zero points of a single scheme only",
            remedy="make them symmetric, or give all layers one scheme",
        )
    config_groups = {}
    for index, ((bits, granularity, group, symmetric), names) in enumerate(groups.items()):
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=symmetric, strategy=granularity, group_size=group
        )
        config_groups[f"group_{index}"] = QuantizationScheme(
            targets=["Linear"] if len(groups) == 1 else names, weights=weights, format="pack-quantized"
        )
    config = QuantizationConfig(
        config_groups=config_groups,
        format="pack-quantized",
        quantization_status="compressed",
        ignore=list(ignore) if len(groups) == 1 else [],
    )
    written: dict[str, Any] = config.model_dump(mode="json")
    if QuantizationConfig.model_validate(written) != config:
        raise AssertionError("compressed-tensors does not read back its own configuration")
    if len(groups) == 1:
        # compressed-tensors 0.18 to 0.20 expects *unpacked* zero points in a model that is built without weights, as
        # transformers builds it, and so rejects the packed ones, which its own writer makes. transformers' other way
        # in, which expands every linear as it is read, takes them; it knows one scheme only. vLLM ignores this key.
        written["dequantize"] = True
    return written
