"""bitsandbytes through transformers: NF4 (block 64) by rounding, and LLM.int8(), with outlier columns in 16 bit."""

from __future__ import annotations

from typing import Any

from side import Quantized, Scheme, serve, while_loading

HOW = {
    "nf4": "`load_in_4bit`, nf4: its defaults",
    "nf4, doubled scales": "`load_in_4bit`, nf4, `bnb_4bit_use_double_quant`",
    "llm.int8": "`load_in_8bit`: its defaults, outlier columns in 16 bits",
}
SCHEMES = {"nf4-b64": ["nf4", "nf4, doubled scales"], "int8-w8a8": ["llm.int8"]}


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """See `while_loading`."""
    import torch
    import transformers

    settings: dict[str, Any] = {"load_in_8bit": True}
    computed = {}
    if scheme.format == "nf4":
        doubled = request["method"] != "nf4"
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": doubled}
        computed = {"bnb_4bit_compute_dtype": torch.float32}
    config = transformers.BitsAndBytesConfig(**settings, **computed)
    return while_loading(request, config, settings, package="bitsandbytes")


if __name__ == "__main__":
    serve(quantize)
