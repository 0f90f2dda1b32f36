"""Quantized sources: weights that are stored as codes, opened to floats tensor by tensor as they are read.

An opened weight is what transformers makes of it where it dequantizes: code times scale, in the model's dtype.

    fp8                 F8_E4M3 [N, K], weight_scale_inv [⌈N/128⌉, ⌈K/128⌉]: product in float32, rounded once
    mxfp4               blocks U8 [E, N, K/32, 16], scales U8 [E, N, K/32]: value · 2^(scale - 127), as [E, K, N]
    awq                 qweight I32 [K, N/8], qzeros I32 [G, N/8], scales F16 [G, N]: (code - zero) · scale, as [N, K]
    compressed-tensors, gptq, bitsandbytes: by `model/layouts`, which write them too

DeepSeek's `kv_a_proj_with_mqa` is [576, 7168] in blocks of 128: its last blocks are cut off, as in the kernels.
transformers' `Fp8Dequantize` divides N by the number of blocks instead, and fails on 576; where N is a multiple of the
block both agree. Sources: `transformers/integrations/finegrained_fp8.py`, `mxfp4.py`; AutoAWQ `utils/packing_utils.py`.

What quantizes inputs and the cache as the model runs is `Quantization.run_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.lazy import torch
from quantkit.model import layouts, run_time
from quantkit.model.device import put
from quantkit.model.layouts import stored_with
from quantkit.model.sizes.quantized import KEY, SourceGrid, grid_of, refused
from quantkit.model.source.weights import MadeTensor, TensorEntry, Weights, dtype_name, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.run_time import RunTime

_SCALE_INV, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_QWEIGHT, _QZEROS, _AWQ_SCALES = ".qweight", ".qzeros", ".scales"
_STATIC = (".activation_scale", ".input_scale")
# sign bit, then the index of the magnitude
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# place in a 32-bit word of AWQ -> column among eight
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = ("F32", "F16", "BF16")
_SMALL = 4096
# suffixes of tensors that belong to codes
_CODES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv"),
    *(".weight_zero_point", ".SCB", ".absmax", ".quant_map"),
)
# tensor with the codes, opened tensor, all tensors that it is made of
Opened = tuple[str, MadeTensor, Iterable[str]]


@dataclass(frozen=True)
class Quantization:
    """Quantization of a source.

    Args:
        config: its `quantization_config`.
        grid: grid of its weights.
        weights: tensors of its files, unopened.
        dtype: dtype of the opened weights.
        opened: tensor that was opened -> its columns.
        floats: tensors of its files with the codes opened, under the names of the files.
    """

    config: Mapping[str, Any]
    grid: SourceGrid
    weights: Weights
    dtype: str
    opened: Mapping[str, int]
    floats: Weights

    def run_time(self, linears: Iterable[str], files: Mapping[str, str]) -> RunTime:
        """Return how inputs and cache of these linears are quantized as the source runs.

        Args:
            files: parameter -> tensor of the files.
        """
        stored = [linear for linear in linears if files.get(f"{linear}.weight") in self.opened]
        how = run_time.read(self.config, stored, self.weights.entries, self.weights.read)
        # an input that its groups do not divide stays in floats
        columns = {linear: self.opened[files[f"{linear}.weight"]] for linear in stored}
        kept = {name: one for name, one in how.activations.items() if columns[name] % (one.group or 1) == 0}
        return replace(how, activations=kept)

    @property
    def scales(self) -> str:
        """Dtype of the fixed scales of inputs as it runs: `fp8` has them in float32, others in the model's."""
        return "float32" if self.grid.method == "fp8" else self.dtype

    @property
    def runs(self) -> str:
        """Words for the quantization of inputs and cache as it runs; "" for floats."""
        return run_time.words(self.config)

    def note(self, name: str) -> str:
        """Return a sentence for readers of its figures."""
        runs = f", {self.runs}" if self.runs else ""
        if not self.grid.format:
            return f"{name} is a quantized source{runs}: losses are against it as it runs, not against its original"
        return (
            f"{name} is a quantized source: {self.grid.words}, opened to {self.dtype} as it is read. Its weights lie "
            f"on that grid, and quantizing them again adds to its loss; losses are against it as it runs{runs}, not "
            "against its original"
        )


def opened(weights: Weights, config: Mapping[str, Any], where: str) -> tuple[Weights, Quantization | None]:
    """Return the tensors with codes opened, and what they were; `weights` itself for a source of floats.

    Args:
        config: content of `config.json`.

    Raises:
        InputError: `already-quantized` for a method that cannot be opened, or codes that it does not explain.
        MissingDependency: without the method's library.
    """
    grid = grid_of(config, where)
    stated = config.get(KEY) or {}
    dtype = _dtype(config, weights)
    by_codes: dict[str, MadeTensor] = {}
    parts: set[str] = set()
    if grid is not None and grid.format:
        for codes, tensor, more in _METHODS[grid.method](weights, stated, dtype):
            by_codes[codes] = tensor
            parts.update(more)
        if not by_codes:
            raise refused(where, f"{KEY} of {grid.method}, but no codes in the files")
    if grid is not None:
        parts.update(name for name in weights.entries if name.endswith(run_time.PARTS))
    entries: dict[str, TensorEntry] = {}
    for name, entry in weights.entries.items():
        if name in by_codes:
            entries[by_codes[name].name] = by_codes[name]
        elif name not in parts:
            if odd := _odd(name, entry.dtype, coded=grid is not None):
                raise refused(where, f"a tensor {name} {odd}")
            entries[name] = entry
    if grid is None:
        return weights, None
    columns = {tensor.name: tensor.shape[-1] for tensor in by_codes.values()}
    floats = replace(weights, entries=entries)
    return floats, Quantization(stated, grid, weights, dtype, columns, floats)


def _dtype(config: Mapping[str, Any], weights: Weights) -> str:
    """Return the dtype of opened weights: the config's, else that of most floats in the files."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stated in ("float32", "float16", "bfloat16"):
        return stated
    sizes = {"BF16": 0, "F16": 0, "F32": 0}
    for entry in weights.entries.values():
        if entry.dtype in sizes and not entry.name.endswith(("_scale", "_scale_inv", ".scales", ".absmax")):
            sizes[entry.dtype] += entry.bytes
    return str(torch_dtype(max(sizes, key=lambda name: sizes[name]))).removeprefix("torch.")


def _odd(name: str, dtype: str, *, coded: bool) -> str:
    """Name the reason to take a tensor for codes, in a file with any; "" for floats."""
    if name.endswith(_CODES):
        return "beside its weights"
    is_code = coded and dtype not in (*_FLOATS, "F64") and name.endswith((".weight", _BLOCKS, "_proj"))
    return f"in {dtype}" if is_code else ""


def _entry(
    weights: Weights, codes: str, name: str, shape: Sequence[int], dtype: str, make: Callable[[Any], Tensor]
) -> MadeTensor:
    kind = dtype_name(getattr(torch, dtype))

    def placed(device: torch.device | None) -> Tensor:
        return put(make(device).contiguous(), device)

    return MadeTensor.of(name, kind, tuple(shape), weights.entries[codes].shard, placed)


# --- layouts of ours ------------------------------------------------------------------------------------------------


def _in_layout(weights: Weights, config: Mapping[str, Any], dtype: str) -> Iterable[Opened]:
    """Open linears in a layout of `model/layouts`."""
    layout = layouts.of(config)
    expansion = layout.expansion(config, getattr(torch, dtype))
    for prefix in layout.prefixes(weights.entries):
        name, codes = f"{prefix}.weight", prefix + layout.codes
        if lacking := [part for part in layout.needed if prefix + part not in weights.entries]:
            raise refused(weights.entries[codes].shard, f"{codes} without {prefix}{lacking[0]}")
        make = partial(_expanded, weights, expansion, prefix)
        shape = layout.shape(prefix, partial(_shaped, weights))
        yield codes, _entry(weights, codes, name, shape, dtype, make), (prefix + part for part in layout.parts)


def _shaped(weights: Weights, name: str) -> Tensor:
    """Read a small tensor: some state a shape. Of a larger one return the shape alone, on the meta device."""
    entry = weights.entries[name]
    return weights.read(name) if entry.bytes < _SMALL else torch.empty(entry.shape, device="meta")


def _expanded(weights: Weights, expansion: Any, prefix: str, device: torch.device | None) -> Tensor:
    values: Tensor = expansion.weight(prefix, weights.packed_on(device if expansion.anywhere else None))
    return values


def _compressed(weights: Weights, config: Mapping[str, Any], dtype: str) -> Iterable[Opened]:
    """Open a checkpoint of compressed-tensors; its linears may be in several layouts."""
    from quantkit.model.layouts._compressed_tensors import GLOBAL, PACKED, SCALE, WEIGHT, ZERO, expansion_of

    expansion = expansion_of(config, getattr(torch, dtype))
    for prefix in stored_with(SCALE, weights.entries):
        packed = prefix + PACKED in weights.entries
        codes = prefix + (PACKED if packed else WEIGHT)
        if codes not in weights.entries:
            raise refused(weights.entries[prefix + SCALE].shard, f"{prefix}{SCALE} without {codes}")
        if f"{prefix}.weight_g_idx" in weights.entries:  # which the library leaves out
            raise refused(weights.entries[codes].shard, f"{prefix}.weight_g_idx, an order of inputs")
        shape = weights.entries[codes].shape
        if f"{prefix}.weight_shape" in weights.entries:
            shape = tuple(weights.read(f"{prefix}.weight_shape").tolist())
        elif packed:
            shape = (shape[0], 2 * shape[1])
        make = partial(_expanded, weights, expansion, prefix)
        parts = (PACKED, SCALE, ZERO, GLOBAL, ".weight_shape", ".input_global_scale")
        yield codes, _entry(weights, codes, prefix + WEIGHT, shape, dtype, make), (prefix + part for part in parts)


# --- layouts of others ----------------------------------------------------------------------------------------------


def _fp8(weights: Weights, config: Mapping[str, Any], dtype: str) -> Iterable[Opened]:
    block = config.get("weight_block_size")
    for scale in stored_with(_SCALE_INV, weights.entries):
        entry = weights.entries.get(scale)
        if entry is None or not entry.dtype.startswith("F8"):
            raise refused("config.json", f"{scale} in {entry.dtype if entry else 'no file'}, with a scale")
        make = partial(_of_blocks, weights, scale, block, getattr(torch, dtype))
        prefix = scale.removesuffix(".weight")
        parts = [scale + _SCALE_INV, *(prefix + part for part in _STATIC)]
        yield scale, _entry(weights, scale, scale, entry.shape, dtype, make), parts


def _of_blocks(
    weights: Weights, name: str, block: Sequence[int] | None, dtype: torch.dtype, device: torch.device | None
) -> Tensor:
    """Multiply codes [.., N, K] by the scale of their block, band of rows by band of rows."""
    values, stored = weights.read(name, device), weights.read(name + _SCALE_INV, device)
    scale = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
    rows, columns = values.shape[-2:]
    if scale.numel() == 1:
        return (values.float() * scale.reshape(())).to(dtype)
    bands, across = scale.shape[-2:]
    height, width = block if block is not None else (-(-rows // bands), -(-columns // across))
    if (bands, across) != (-(-rows // height), -(-columns // width)):  # experts may have blocks of their own
        height, width = -(-rows // bands), -(-columns // across)
    opened = torch.empty(values.shape, dtype=dtype, device=values.device)
    for band in range(bands):
        part = slice(band * height, min((band + 1) * height, rows))
        factor = scale[..., band, :].repeat_interleave(width, dim=-1)[..., None, :columns]
        opened[..., part, :] = values[..., part, :].float() * factor
    return opened


def _mxfp4(weights: Weights, config: Mapping[str, Any], dtype: str) -> Iterable[Opened]:
    for name in stored_with(_BLOCKS, weights.entries):
        codes = name + _BLOCKS
        if name + _SCALES not in weights.entries:
            raise refused(weights.entries[codes].shard, f"{codes} without {name}{_SCALES}")
        *before, rows, groups, half = weights.entries[codes].shape
        make = partial(_of_pairs, weights, name, getattr(torch, dtype))
        yield codes, _entry(weights, codes, name, (*before, groups * half * 2, rows), dtype, make), [name + _SCALES]


def _of_pairs(weights: Weights, name: str, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Multiply pairs of 4-bit floats [.., N, K/32, 16] by their power of two, expert by expert: [.., K, N]."""
    blocks, scales = weights.read(name + _BLOCKS, device), weights.read(name + _SCALES, device)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    *before, rows, groups, half = blocks.shape
    opened = torch.empty((*before, groups * half * 2, rows), dtype=dtype, device=blocks.device)
    flat = opened.view(-1, groups * half * 2, rows)
    every = zip(blocks.view(-1, rows, groups, half), scales.view(-1, rows, groups), strict=True)
    for expert, (pairs, exponents) in enumerate(every):
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        values = table[codes.int()] * (exponents[..., None].float() - 127).exp2()
        flat[expert] = values.reshape(rows, -1).T
    return opened


def _awq(weights: Weights, config: Mapping[str, Any], dtype: str) -> Iterable[Opened]:
    for prefix in stored_with(_QWEIGHT, weights.entries):
        codes, parts = prefix + _QWEIGHT, [prefix + _QZEROS, prefix + _AWQ_SCALES]
        if any(part not in weights.entries for part in parts):
            raise refused(weights.entries[codes].shard, f"{codes} without {' or '.join(parts)}")
        columns, words = weights.entries[codes].shape
        make = partial(_of_words, weights, prefix, getattr(torch, dtype))
        yield codes, _entry(weights, codes, f"{prefix}.weight", (8 * words, columns), dtype, make), parts


def _of_words(weights: Weights, prefix: str, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return (code - zero) · scale of AWQ's words, rounded to the dtype of the scales, then to `dtype`: [N, K]."""
    words, zeros, scales = (weights.read(prefix + part, device) for part in (_QWEIGHT, _QZEROS, _AWQ_SCALES))
    codes, zero = _unpacked(words), _unpacked(zeros)
    group = codes.shape[0] // scales.shape[0]
    # the difference of two codes is exact, and so is its product with a 16-bit scale in float32
    values = (codes - zero.repeat_interleave(group, 0)).float() * scales.float().repeat_interleave(group, 0)
    return values.to(scales.dtype).to(dtype).T


def _unpacked(words: Tensor) -> Tensor:
    """Unpack int32 [R, N / 8] to int8 [R, N], in AWQ's order."""
    shifts = torch.tensor([4 * _AWQ_ORDER.index(column) for column in range(8)], device=words.device)
    codes = (words[..., None] >> shifts.int()) & 15
    return codes.to(torch.int8).reshape(words.shape[0], -1)


_METHODS: dict[str, Callable[[Weights, Mapping[str, Any], str], Iterable[Opened]]] = {
    "awq": _awq,
    "bitsandbytes": _in_layout,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _in_layout,
    "gptq_v2": _in_layout,
    "mxfp4": _mxfp4,
}
