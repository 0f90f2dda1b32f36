"""bitsandbytes through transformers: NF4 (block 64) by rounding, and LLM.int8(), with outlier columns in 16 bit."""

from __future__ import annotations

from typing import Any

from side import Clock, Quantized, Scheme, serve

HOW = {
    "nf4": "`load_in_4bit`, nf4: its defaults",
    "nf4, doubled scales": "`load_in_4bit`, nf4, `bnb_4bit_use_double_quant`",
    "llm.int8": "`load_in_8bit`: its defaults, outlier columns in 16 bits",
}
SCHEMES = {"nf4-b64": ["nf4", "nf4, doubled scales"], "int8-w8a8": ["llm.int8"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """Quantized while it loads, so the clock includes loading; saved and loaded again."""
    import torch
    import transformers

    settings: dict[str, Any] = {"load_in_8bit": True}
    if scheme.format == "nf4":
        doubled = request["method"] != "nf4"
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": doubled}
        config = transformers.BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32)
    else:
        config = transformers.BitsAndBytesConfig(**settings)

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
        lambda: load(request["out"]),
        "transformers with bitsandbytes",
        total,
        spent,
        wall,
        ("bitsandbytes",),
        settings=settings,
        calibrated=False,
        notes=["the clock includes loading"],
    )


if __name__ == "__main__":
    serve(quantize)
