"""bitsandbytes through transformers: NF4 (block 64) by rounding, and LLM.int8(), with outlier columns in 16 bit."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, serve

PINNED = ["bitsandbytes", "accelerate"]
SCHEMES = {"nf4-b64": ["nf4"], "int8-w8a8": ["llm.int8"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Quantized while it loads, so the clock includes loading; saved and loaded again."""
    import torch
    import transformers

    if scheme.format == "nf4":
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    else:
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)

    def load(folder: str, **options: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map="cpu", local_files_only=True, **options
        ).eval()

    clock = Clock()
    model = load(request["model"], quantization_config=config)
    spent = clock.cpu
    model.save_pretrained(request["out"])
    total, wall = clock.cpu, clock.wall
    return Quantized(
        lambda: load(request["out"]), total, spent, wall, ("bitsandbytes",), notes=["the clock includes loading"]
    )


if __name__ == "__main__":
    serve(quantize)
