"""hqq: half-quadratic quantization, without data. Scales and zero points are float16: 0.5 bits a weight at group 64."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, original, serve

PINNED = ["hqq", "accelerate"]
SCHEMES = {"int4-g64": ["data-free"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Every linear of the blocks, in memory; its own save format is not one that plain transformers loads."""
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from torch import nn

    model = original(request["model"])
    config = BaseQuantizeConfig(nbits=scheme.bits, group_size=scheme.group, axis=1)
    clock = Clock()
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            made = HQQLinear(module, config, compute_dtype=torch.float32, device="cpu", initialize=True)
            setattr(model.model.layers.get_submodule(parent), leaf, made)
    spent, wall = clock.cpu, clock.wall
    return Quantized(lambda: model, spent, spent, wall, ("hqq",), reloaded=False)


if __name__ == "__main__":
    serve(quantize)
