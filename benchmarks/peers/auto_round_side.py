"""auto-round: rounding and clipping learned block by block with signed gradient descent (SignRound)."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, calibration, original, serve

METHODS = {
    # its defaults, but for the ids: learning rate 1 / iterations, 8 sequences an iteration
    "200 iterations": {"iters": 200, "batch_size": 8},
    # `auto-round-light`, its documented faster recipe
    "light": {"iters": 50, "lr": 5e-3, "batch_size": 8},
    # `auto-round-opt-rtn`: no iterations, no text
    "opt-rtn": {"iters": 0},
}
HOW = {
    "200 iterations": "its defaults: 200 iterations of 8 sequences",
    "light": "`auto-round-light`: 50 iterations of 8 sequences, learning rate 5e-3",
    "opt-rtn": "`auto-round-opt-rtn`: rounded, ranges searched",
}
SCHEMES = {
    "int4-g64": ["200 iterations", "light", "opt-rtn"],
    "int4-g64-symmetric": ["200 iterations", "light"],
    "int3-g64": ["200 iterations", "light", "opt-rtn"],
    "int4-channel": ["200 iterations", "light"],
    "int8-w8a8": ["200 iterations"],
}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Saved in its own format (W8A8 in that of compressed-tensors) and loaded through transformers."""
    import torch
    import transformers
    from auto_round import AutoRound

    model = original(request["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    ids = calibration(request)
    data = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))} for row in ids]
    settings: dict[str, Any] = {**METHODS[request["method"]], "nsamples": len(ids), "seqlen": len(ids[0])}
    if scheme.activations:
        settings |= {"scheme": "INT8"}
    else:
        settings |= {"bits": scheme.bits, "group_size": scheme.group or -1, "sym": scheme.symmetric}
    # amp: half precision, which processors without it emulate; torch.compile takes a compiler and saves them little
    settings |= {"amp": False, "enable_torch_compile": False, "seed": 0}
    clock = Clock()
    rounder = AutoRound(model, tokenizer, dataset=data, device_map="cpu", **settings)
    rounder.quantize()
    spent = clock.cpu
    rounder.save_quantized(request["out"], format="llm_compressor" if scheme.activations else "auto_round")
    total, wall = clock.cpu, clock.wall
    return Quantized(
        lambda: expanded(original(request["out"])),
        "transformers with auto-round",
        total,
        spent,
        wall,
        ("auto-round",),
        settings=settings,
        calibrated=settings["iters"] > 0,
    )


def expanded(model: Any) -> Any:
    """The loaded model with dense weights: its own layers unpack theirs in every forward, for minutes a sequence.

    A weight is what its layer, of auto-round's own code, makes of the unit matrix.
    """
    import torch

    packed = {name: layer for name, layer in model.named_modules() if hasattr(layer, "qweight")}
    for name, layer in packed.items():
        unit = torch.eye(layer.infeatures)
        bias = layer.bias
        with torch.no_grad():
            weight = layer(unit) - (0 if bias is None else bias)
        dense = torch.nn.Linear(layer.infeatures, layer.outfeatures, bias=bias is not None)
        dense.weight.data = weight.T.contiguous()
        if bias is not None:
            dense.bias.data = bias
        model.set_submodule(name, dense)
    # what is not quantized it loads in half precision; transformers lets nobody ask a quantized model for more
    return torch.nn.Module.float(model)


if __name__ == "__main__":
    serve(quantize)
