"""GPTQModel: GPTQ as most checkpoints of that layout are made with it."""

from __future__ import annotations

import os
from typing import Any

from side import Clock, Quantized, Scheme, calibration, original, serve

HOW = {"gptq": "`GPTQConfig`: its defaults; `gptq_v2` where asymmetric"}
SCHEMES = {"int4-g64": ["gptq"], "int4-g64-symmetric": ["gptq"], "int3-g64": ["gptq"], "int4-channel": ["gptq"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Its defaults, saved as `gptq`, or as `gptq_v2` where asymmetric."""
    import torch

    notes = []
    if (os.cpu_count() or 1) < 3:
        # its pool of loaders wants two threads of a pool that has half as many as there are cores
        os.cpu_count = lambda: 3
        notes.append("patched: os.cpu_count() is 3; with 2 cores it does not start")
    from gptqmodel import GPTQConfig, GPTQModel

    ids = calibration(request)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    settings: dict[str, Any] = {"bits": scheme.bits, "group_size": scheme.group or -1, "sym": scheme.symmetric}
    if not scheme.symmetric:
        settings["format"] = "gptq_v2"
    config = GPTQConfig(**settings, offload_to_disk=False)
    model = GPTQModel.load(request["model"], config, device="cpu", dtype=torch.float32)
    clock = Clock()
    model.quantize(data, batch_size=1)
    spent = clock.cpu
    model.save(request["out"])
    return Quantized(
        lambda: original(request["out"]),
        "transformers with gptqmodel and optimum",
        clock.cpu,
        spent,
        clock.wall,
        ("gptqmodel", "optimum"),
        settings=settings,
        notes=notes,
    )


if __name__ == "__main__":
    serve(quantize)
