"""Other libraries' kernels for the same formats, on random weights; what cannot be loaded is listed with its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parts.device import Device
from parts.timing import Side, copies
from parts.weights import Variant

Shape = tuple[int, int]


def side(name: str, variant: Variant, shape: Shape, x: torch.Tensor, device: Device) -> Side:
    """A peer's product of x and a weight [N, K] of random numbers in the variant's format.

    Raises:
        ImportError: it is not installed, or what it needs is not.
        NotImplementedError: it has no such format, or nobody wrote how to call it.
    """
    importlib.import_module(name)
    if name not in _MADE:
        raise NotImplementedError(f"{name} can be imported, but nothing here calls it yet")
    formats, make = _MADE[name]
    if variant.name not in formats:
        raise NotImplementedError(f"{name} is not compared in {variant.name}")
    count = copies(int(variant.stored_bytes(*shape)), device.cache_bytes)
    made = [make(torch.randn(shape, device=x.device).to(x.dtype), x) for _ in range(count)]
    return Side(name, [step for step, _ in made], made[0][1], {})


Made = tuple[Callable[[], object], int]


def _bitsandbytes(w: torch.Tensor, x: torch.Tensor) -> Made:
    library: Any = importlib.import_module("bitsandbytes")
    words, state = library.functional.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    size = words.numel() + state.absmax.numel() + 4 * state.state2.absmax.numel()
    return (lambda: library.matmul_4bit(x, words.t(), quant_state=state)), size


def _gemlite(w: torch.Tensor, x: torch.Tensor) -> Made:
    core: Any = importlib.import_module("gemlite.core")
    kind = core.DType.BF16 if x.dtype == torch.bfloat16 else core.DType.FP16
    rows, columns = w.shape
    layer = core.GemLiteLinear(
        4, group_size=128, in_features=columns, out_features=rows, input_dtype=kind, output_dtype=kind
    )
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=w.device)
    scales = torch.full((rows * columns // 128, 1), 0.01, dtype=x.dtype, device=w.device)
    layer.pack(codes, scales, torch.full_like(scales, 8.0), None)
    return (lambda: layer(x)), rows * columns // 2 + 4 * scales.numel()


def _torchao(w: torch.Tensor, x: torch.Tensor) -> Made:
    library: Any = importlib.import_module("torchao.quantization")
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, device=w.device)
    library.quantize_(layer, library.Int4WeightOnlyConfig(group_size=128))
    return (lambda: layer(x)), w.numel() // 2 + w.numel() // 128 * 4


# module -> variants it is compared in, and how a weight and its step are made
_MADE: dict[str, tuple[Sequence[str], Callable[[torch.Tensor, torch.Tensor], Made]]] = {
    "bitsandbytes": (("nf4 g64 double",), _bitsandbytes),
    "gemlite": (("int4 g128 zeros",), _gemlite),
    "torchao": (("int4 g128 zeros",), _torchao),
}
PEERS = ("bitsandbytes", "gemlite", "torchao", "humming", "vllm")
