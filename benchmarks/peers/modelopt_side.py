"""NVIDIA's Model Optimizer: AWQ, SmoothQuant and rounding, by simulated quantizers that its export packs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from side import Clock, Quantized, Scheme, bits_per_weight, calibration, original, serve

HOW = {
    "awq": "`INT4_AWQ_CFG`, its groups of 128 set to 64",
    "rtn": "`INT4_BLOCKWISE_WEIGHT_ONLY_CFG`, its groups of 128 set to 64",
    "smoothquant": "`INT8_SMOOTHQUANT_CFG`: one range for all inputs of a linear, from the calibration",
    "dynamic": "`FP8_PER_CHANNEL_PER_TOKEN_CFG`",
}
SCHEMES = {"int4-g64-symmetric": ["awq", "rtn"], "int8-w8a8": ["smoothquant"], "fp8-w8a8": ["dynamic"]}


def configuration(quantization: Any, method: str, scheme: Scheme) -> dict[str, Any]:
    """A configuration as it is shipped, at the group that is asked for."""
    name = {"awq": "INT4_AWQ_CFG", "rtn": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "smoothquant": "INT8_SMOOTHQUANT_CFG"}
    config: dict[str, Any] = copy.deepcopy(getattr(quantization, name.get(method, "FP8_PER_CHANNEL_PER_TOKEN_CFG")))
    for entry in config["quant_cfg"]:
        blocks = (entry.get("cfg") or {}).get("block_sizes") or {}
        if scheme.group and -1 in blocks:
            blocks[-1] = scheme.group
    return config


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Saved as its quantizers with float weights, which it loads again itself; bits are those of its packed export."""
    import modelopt.torch.opt as checkpoints
    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint

    checkpoints.enable_huggingface_checkpointing()
    model = original(request["model"])
    ids = calibration(request)
    config = configuration(quantization, request["method"], scheme)

    def forward(model: Any) -> None:
        for row in ids:
            model(torch.tensor([row]))

    clock = Clock()
    quantization.quantize(model, config, forward)
    spent = clock.cpu
    model.save_pretrained(request["out"])
    packed = Path(request["out"]) / "packed"
    export_hf_checkpoint(model, torch.float32, export_dir=packed)
    return Quantized(
        lambda: original(request["out"]),
        "modelopt, in transformers",
        clock.cpu,
        spent,
        clock.wall,
        ("nvidia-modelopt",),
        settings={"config": repr(config)},
        calibrated=request["method"] in ("awq", "smoothquant"),
        bits_per_weight=bits_per_weight(packed, Path(request["model"])),
        notes=["bits are those of its packed export, which was not what was scored"],
    )


if __name__ == "__main__":
    serve(quantize)
