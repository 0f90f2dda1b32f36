"""llm-compressor: GPTQ, AWQ and plain rounding; W8A8 by SmoothQuant and GPTQ, FP8 by rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from side import Clock, Quantized, Scheme, calibration, original, serve

HOW = {
    "gptq": "`GPTQModifier`: its defaults",
    "awq": '`AWQModifier(duo_scaling="both")` as documented, then rounded',
    "rtn": "`QuantizationModifier`: rounded",
    "smoothquant+gptq": "`SmoothQuantModifier(smoothing_strength=0.8)`, `GPTQModifier`, as documented",
}
SCHEMES = {
    "int4-g64": ["gptq", "awq", "rtn"],
    "int4-g64-symmetric": ["gptq", "awq"],
    "int3-g64": ["gptq", "awq"],
    "int4-channel": ["gptq"],
    "int8-w8a8": ["smoothquant+gptq"],
    "fp8-w8a8": ["rtn"],
}


def modifiers(method: str, scheme: Scheme) -> tuple[list[Any], list[str]]:
    """What does it, and what had to be patched."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    weights = QuantizationArgs(
        num_bits=scheme.bits,
        type=scheme.format,
        strategy="group" if scheme.group else "channel",
        group_size=scheme.group,
        symmetric=scheme.symmetric,
    )
    inputs = QuantizationArgs(num_bits=scheme.bits, type=scheme.format, strategy="token", symmetric=True, dynamic=True)
    group = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs if scheme.activations else None
    )
    common = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    if method == "gptq":
        return [GPTQModifier(**common)], []
    if method == "rtn":
        return [QuantizationModifier(**common)], []
    if method == "smoothquant+gptq":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**common)], []
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    patched = []
    if not torch.accelerator.is_available():
        # pinned memory needs an accelerator; where there is none it only ends the run
        IntermediatesCache.pin_memory = lambda self, index: None
        patched.append("patched: IntermediatesCache.pin_memory does nothing")
    # `duo_scaling="both"` is what its documentation shows
    return [AWQModifier(duo_scaling="both"), QuantizationModifier(**common)], patched


def expand_at_load(config: Path) -> None:
    """Ask loaders to expand the weights while they load them.

    Kept packed, asymmetric checkpoints of compressed-tensors 0.19 do not load in transformers otherwise (packed zero
    points are taken for mismatched shapes). The numbers are the same.
    """
    content = json.loads(config.read_text())
    content["quantization_config"]["dequantize"] = True
    config.write_text(json.dumps(content, indent=2))


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """`oneshot` from calibration to a saved, packed checkpoint."""
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot

    ids = calibration(request)
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    model = original(request["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    recipe, notes = modifiers(request["method"], scheme)
    clock = Clock()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
    )
    spent = clock.cpu
    model.save_pretrained(request["out"], save_compressed=True)
    total, wall = clock.cpu, clock.wall
    if not scheme.symmetric:
        expand_at_load(Path(request["out"]) / "config.json")
    return Quantized(
        lambda: original(request["out"]),
        "transformers with compressed-tensors",
        total,
        spent,
        wall,
        ("llmcompressor", "compressed-tensors"),
        settings={"recipe": [repr(modifier) for modifier in recipe]},
        calibrated=request["method"] != "rtn",
        notes=notes,
    )


if __name__ == "__main__":
    serve(quantize)
