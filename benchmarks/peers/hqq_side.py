"""hqq: half-quadratic quantization, without data. Scales and zero points are float16: 0.5 bits a weight at group 64."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, original, serve

HOW = {"hqq": "`BaseQuantizeConfig`, axis 1; scales and zero points in 16 bits"}
SCHEMES = {"int4-g64": ["hqq"], "int3-g64": ["hqq"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Every linear of the blocks, saved and loaded again by hqq itself (`AutoHQQHFModel`).

    transformers 5.23 refuses `HqqConfig` ("not available yet and will be supported soon"), so its own reader it is.
    """
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = original(request["model"])
    settings = {"nbits": scheme.bits, "group_size": scheme.group, "axis": 1}
    clock = Clock()
    AutoHQQHFModel.quantize_model(
        model, quant_config=BaseQuantizeConfig(**settings), compute_dtype=torch.float32, device="cpu"
    )
    spent = clock.cpu
    AutoHQQHFModel.save_quantized(model, request["out"])
    total, wall = clock.cpu, clock.wall
    layers = [layer for layer in model.modules() if hasattr(layer, "W_q")]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return Quantized(
        lambda: AutoHQQHFModel.from_quantized(request["out"], compute_dtype=torch.float32, device="cpu").eval(),
        "hqq",
        total,
        spent,
        wall,
        ("hqq",),
        settings=settings,
        calibrated=False,
        bits_per_weight=8 * sum(_bytes(layer) for layer in layers) / weights,
    )


def _bytes(layer: Any) -> int:
    """Of codes, scales and zero points, these two in 16 bits, as a model in half precision stores them."""
    codes = layer.W_q.numel() * layer.W_q.element_size()
    return int(codes + 2 * (layer.meta["scale"].numel() + layer.meta["zero"].numel()))


if __name__ == "__main__":
    serve(quantize)
