"""Quantization of a source, as its `config.json` states it: method, grid of the weights, bits. Torch-free.

method              example                               stored for a matrix [N, K]
fp8                 DeepSeek-V3, Qwen3-FP8, Ministral     float8_e4m3 codes, a float32 scale per block of 128 x 128
mxfp4               gpt-oss                               4-bit floats of the experts, an exponent per 32
compressed-tensors  llm-compressor, quantkit              integers and floats of 2 to 8 bits
gptq, awq           GPTQModel, AutoAWQ                    integers, a float16 scale and a zero point per group
bitsandbytes        nf4                                   4-bit codes of a table, a float32 scale per 64

Other methods are refused: `already-quantized`. The values themselves are read by `model/source/quantized.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import InputError

KEY = "quantization_config"
# older keys of the same, which no supported method writes
OTHERS = ("compression_config", "quantization")
DENSE = "dense"
_COMPRESSED = "compressed-tensors"
_METHODS = ("awq", "bitsandbytes", _COMPRESSED, "fp8", "gptq", "mxfp4")
_PACKED = {"int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"}
_PACKED |= {"nvfp4-pack-quantized", "mxfp4-pack-quantized", DENSE}
# a type of compressed-tensors and its bits -> format; 4-bit floats by their group
_FORMATS = {("float", 8): "fp8_e4m3", **{("int", bits): f"int{bits}" for bits in range(2, 9)}}
_FP4 = {16: "nvfp4", 32: "mxfp4"}


@dataclass(frozen=True)
class SourceGrid:
    """Numbers that a source's quantized weights can take.

    Args:
        method: `quant_method` of its config.
        format: `int4`, `fp8_e4m3`, ...; several are joined by a plus; "" if weights are floats, and the cache is not.
        shared: weights that share a scale: `group 128`, `block 128x128`, `channel`, `tensor`.
        bits: bits of a code.
        scale: bits of a scale, with its zero point.
        group: weights of a scale; 0 for one per row, -1 for one per matrix.
        experts: whether only experts are quantized.
    """

    method: str
    format: str
    shared: str
    bits: float
    scale: float
    group: int
    experts: bool = False

    @property
    def words(self) -> str:
        """Name of the grid: `gptq int4 group 128`, `fp8_e4m3 block 128x128`."""
        method = "" if self.format.startswith(self.method) else self.method
        return " ".join(part for part in (method, self.format, self.shared) if part)

    def bits_per_weight(self, columns: int) -> float:
        """Return the bits of a weight of a matrix with this many columns, with its share of a scale."""
        return self.bits + (self.scale / (self.group or columns) if self.group >= 0 else 0.0)


def grid_of(config: Mapping[str, Any], where: str) -> SourceGrid | None:
    """Read the grid of a source from its `config.json`; None for floats. Raises InputError `already-quantized`."""
    if key := next((key for key in OTHERS if config.get(key)), ""):
        raise refused(where, f"{key} in config.json")
    stated = config.get(KEY)
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method not in _METHODS:
        raise refused(where, f"quant_method {method!r:.60}" if method else f"{KEY} has no quant_method")
    try:
        return _READERS[method](stated, where)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        text = f"{type(problem).__name__}: {problem}"[:120]
        raise refused(where, f"{KEY} of {method} is not understood ({text})") from None


def refused(where: str, value: str) -> InputError:
    """Make the error `already-quantized` for a source that cannot be opened."""
    rule = f"a quantized source is opened if its quant_method is one of {', '.join(_METHODS)}"
    remedy = "open the original in float32, float16 or bfloat16, or a checkpoint of it in one of these"
    return InputError("already-quantized", where, value, rule, remedy)


def _fp8(stated: Mapping[str, Any], where: str) -> SourceGrid:
    block = stated.get("weight_block_size")
    if block is None:
        return SourceGrid("fp8", "fp8_e4m3", "tensor", 8, 32, -1)
    rows, columns = (int(size) for size in block)
    return SourceGrid("fp8", "fp8_e4m3", f"block {rows}x{columns}", 8, 32, rows * columns)


def _mxfp4(stated: Mapping[str, Any], where: str) -> SourceGrid:
    return SourceGrid("mxfp4", "mxfp4", "group 32", 4, 8, 32, experts=True)


def _compressed(stated: Mapping[str, Any], where: str) -> SourceGrid:
    groups = [group for group in stated["config_groups"].values() if group.get("weights")]
    formats = {group.get("format") or stated.get("format") for group in groups} | {stated.get("format")}
    if odd := sorted(str(name) for name in formats if name not in _PACKED):
        raise refused(where, f"format {odd[0]} of {_COMPRESSED}")
    if (sparse := (stated.get("sparsity_config") or {}).get("format")) and sparse != DENSE:
        raise refused(where, f"sparse weights ({sparse})")
    if not groups:
        return SourceGrid(_COMPRESSED, "", "", 0, 0, 0)
    grids = [_of_arguments(group["weights"]) for group in groups]
    first = max(grids, key=lambda grid: grid.bits)
    names = list(dict.fromkeys(grid.format for grid in grids))
    shared = list(dict.fromkeys(grid.shared for grid in grids))
    several = "+".join(names), " and ".join(shared)
    return SourceGrid(_COMPRESSED, *several, first.bits, first.scale, first.group)


def _of_arguments(weights: Mapping[str, Any]) -> SourceGrid:
    bits, kind, group = int(weights["num_bits"]), weights["type"], int(weights.get("group_size") or 0)
    fp4 = kind == "float" and bits == 4
    name = _FP4[group] if fp4 else _FORMATS[kind, bits]
    strategy, symmetric = weights.get("strategy") or "tensor", weights.get("symmetric", True)
    scale = 8 if fp4 else 16 + (0 if symmetric else bits)
    if strategy == "block":
        rows, columns = (int(size) for size in weights["block_structure"])
        return SourceGrid("", name, f"block {rows}x{columns}", bits, scale, rows * columns)
    if strategy in ("group", "tensor_group"):
        return SourceGrid("", name, f"group {group}", bits, scale, group)
    return SourceGrid("", name, strategy, bits, scale, {"channel": 0, "tensor": -1}[strategy])


def _gptq(stated: Mapping[str, Any], where: str) -> SourceGrid:
    bits, group = int(stated["bits"]), int(stated.get("group_size", -1))
    form = stated.get("checkpoint_format", stated.get("format", "gptq"))
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise refused(where, f"gptq of {bits} bits as {form}")
    return _grouped(str(form), bits, group)


def _awq(stated: Mapping[str, Any], where: str) -> SourceGrid:
    bits, group = int(stated.get("bits", stated.get("w_bit", 4))), int(stated.get("group_size", 128))
    version = str(stated.get("version", stated.get("format", "gemm"))).lower()
    if bits != 4 or version != "gemm":
        raise refused(where, f"awq of {bits} bits as {version}")
    return _grouped("awq", bits, group)


def _grouped(method: str, bits: int, group: int) -> SourceGrid:
    shared = f"group {group}" if group > 0 else "channel"
    return SourceGrid(method, f"int{bits}", shared, bits, 16 + bits, max(group, 0))


def _bitsandbytes(stated: Mapping[str, Any], where: str) -> SourceGrid:
    kind = stated.get("bnb_4bit_quant_type") if stated.get("load_in_4bit") else "int8"
    if kind != "nf4" or stated.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise refused(where, f"{kind} of bitsandbytes")
    return SourceGrid(
        "bitsandbytes", "nf4", "group 64", 4, 8.125 if stated.get("bnb_4bit_use_double_quant") else 32, 64
    )


_READERS = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    _COMPRESSED: _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
