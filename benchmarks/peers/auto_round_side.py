"""auto-round: rounding and clipping learned block by block with signed gradient descent (SignRound)."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, calibration, original, serve

PINNED = ["auto-round==0.15.1", "accelerate"]
SCHEMES = {"int4-g64-symmetric": ["20 iterations"], "int4-g64": ["20 iterations"], "int3-g64": ["20 iterations"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """20 iterations a block, saved in its own format and loaded through transformers."""
    import torch
    import transformers
    from auto_round import AutoRound

    model = original(request["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    ids = calibration(request)
    data = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))} for row in ids]
    clock = Clock()
    rounder = AutoRound(
        model,
        tokenizer,
        bits=scheme.bits,
        group_size=scheme.group,
        sym=scheme.symmetric,
        iters=20,
        nsamples=len(ids),
        seqlen=len(ids[0]),
        batch_size=4,
        dataset=data,
        device_map="cpu",
        amp=False,
        seed=0,
    )
    rounder.quantize()
    spent = clock.cpu
    rounder.save_quantized(request["out"], format="auto_round")
    total, wall = clock.cpu, clock.wall
    return Quantized(lambda: expanded(original(request["out"])), total, spent, wall, ("auto-round",))


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
