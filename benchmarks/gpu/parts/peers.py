"""Other libraries' kernels for the same formats, on random weights; what cannot be loaded is listed with its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit import machine
from quantkit.measurement.cuda.device import GpuDevice, Implementation, copies
from quantkit.measurement.cuda.sides import FormatVariant

Shape = tuple[int, int]


def side(name: str, variant: FormatVariant, shape: Shape, x: torch.Tensor, device: GpuDevice) -> Implementation:
    """A peer's product of x and a weight [N, K] of random numbers in the variant's format.

    Raises:
        ImportError: it is not installed, or what it needs is not.
        NotImplementedError: it is not compared in this format.
    """
    importlib.import_module(name)
    formats, make = _MADE[name]
    if variant.name not in formats:
        raise NotImplementedError(f"{name} is not compared in {variant.name}")
    count = copies(int(variant.stored_bytes(*shape)), device.cache_bytes)
    made = [make(variant, torch.randn(shape, device=x.device).to(x.dtype), x) for _ in range(count)]
    return Implementation(name, [step for step, _ in made], made[0][1], {})


Made = tuple[Callable[[], object], int]


def _bitsandbytes(variant: FormatVariant, w: torch.Tensor, x: torch.Tensor) -> Made:
    library: Any = importlib.import_module("bitsandbytes")
    words, state = library.functional.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    size = words.numel() + state.absmax.numel() + 4 * state.state2.absmax.numel()
    return (lambda: library.matmul_4bit(x, words.t(), quant_state=state)), size


def _gemlite(variant: FormatVariant, w: torch.Tensor, x: torch.Tensor) -> Made:
    core: Any = importlib.import_module("gemlite.core")
    kind = core.DType.BF16 if x.dtype == torch.bfloat16 else core.DType.FP16
    rows, columns = w.shape
    layer = core.GemLiteLinear(
        4, group_size=variant.group, in_features=columns, out_features=rows, input_dtype=kind, output_dtype=kind
    )
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=w.device)
    scales = torch.full((rows * columns // variant.group, 1), 0.01, dtype=x.dtype, device=w.device)
    layer.pack(codes, scales, torch.full_like(scales, 8.0), None)
    return (lambda: layer(x)), rows * columns // 2 + 4 * scales.numel()


def _torchao(variant: FormatVariant, w: torch.Tensor, x: torch.Tensor) -> Made:
    library: Any = importlib.import_module("torchao.quantization")
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, device=w.device)
    library.quantize_(layer, library.Int4WeightOnlyConfig(group_size=variant.group))
    return (lambda: layer(x)), w.numel() // 2 + w.numel() // variant.group * 4


def _humming(variant: FormatVariant, w: torch.Tensor, x: torch.Tensor) -> Made:
    """By its own default kernels and tile sizes."""
    library: Any = importlib.import_module("humming.layer")
    bits = 8 if variant.format == "int8" else 4
    config = {"dtype": f"int{bits}", "group_size": variant.group, "has_zero_point": variant.zeros}
    rows, columns = w.shape
    layer = library.HummingLayer(shape_n=rows, shape_k=columns, weight_config=config, torch_dtype=x.dtype).to(w.device)
    layer.load_from_unquantized(w)
    layer.transform()
    return (lambda: layer(x)), sum(part.numel() * part.element_size() for part in layer.state_dict().values())


def _vllm(variant: FormatVariant, w: torch.Tensor, x: torch.Tensor) -> Made:
    """vLLM's Marlin kernel, on random words: what they stand for does not matter to time."""
    marlin: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    kinds: Any = importlib.import_module("vllm.scalar_type").scalar_types
    (rows, columns), at = w.shape, w.device
    words = torch.randint(-(2**31), 2**31 - 1, (columns // 16, 2 * rows), dtype=torch.int32, device=at)
    scales = torch.full((columns // variant.group, rows), 0.01, dtype=x.dtype, device=at)
    asked = {
        **{"weight": words, "weight_scale": scales, "weight_zp": marlin.marlin_make_empty_g_idx(at)},
        **{"g_idx": marlin.marlin_make_empty_g_idx(at), "g_idx_sort_indices": marlin.marlin_make_empty_g_idx(at)},
        **{"workspace": marlin.marlin_make_workspace_new(at), "wtype": kinds.uint4b8, "is_k_full": True},
        **{"output_size_per_partition": rows, "input_size_per_partition": columns},
    }
    size = 4 * words.numel() + scales.numel() * scales.element_size()
    return (lambda: marlin.apply_gptq_marlin_linear(input=x, **asked)), size


# module -> variants it is compared in, and how a weight and its step are made
_MADE: dict[str, tuple[Sequence[str], Callable[[FormatVariant, torch.Tensor, torch.Tensor], Made]]] = (
    {"bitsandbytes": (("nf4.g64.double",), _bitsandbytes)}
    | {"gemlite": (("int4.g64.zeros",), _gemlite), "torchao": (("int4.g64.zeros",), _torchao)}
    | {"humming": (("int4.g128", "int4.g64.zeros", "int8"), _humming), "vllm": (("int4.g128",), _vllm)}
)
PEERS = tuple(_MADE)


def installed() -> list[str]:
    """Those that can be found, which is not to say that they run."""
    return [name for name in PEERS if machine.has(name)]


def compared(variant: FormatVariant, names: Sequence[str]) -> bool:
    """Whether one of these peers has the format."""
    return any(variant.name in _MADE[name][0] for name in names)
