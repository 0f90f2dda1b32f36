"""`genai_config.json`: what onnxruntime-genai wants to know of a model besides its graph.

Format: onnxruntime-genai's docs (`genai_config.json`); its own builder writes the same keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.runtimes.text import json_or_empty

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.model.source.open import Source


def genai_config(source: Source, model: ir.Model, context: int) -> dict[str, Any]:
    """The file's content."""
    config = source.config
    generation = json_or_empty(source.path / "generation_config.json")
    caches = [value for value in model.graph.inputs if (value.name or "").startswith("past_key_values.")]
    shape = caches[0].shape
    assert shape is not None
    layers = len(caches) // 2
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    first = ends[0] if isinstance(ends, list) else ends
    pad = config.get("pad_token_id")
    return {
        "model": {
            "bos_token_id": config.get("bos_token_id") or 0,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": int(shape[3]),  # type: ignore[arg-type]
                "hidden_size": int(config.get("hidden_size") or config.get("n_embd") or 0),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": int(shape[1]),  # type: ignore[arg-type]
            },
            "eos_token_id": ends if ends is not None else 0,
            "pad_token_id": pad if pad is not None else (first or 0),
            # any decoder with these inputs and outputs; the name chooses nothing else
            "type": "llama",
            "vocab_size": int(config["vocab_size"]),
        },
        "search": {
            "diversity_penalty": 0.0,
            "do_sample": bool(generation.get("do_sample", False)),
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": context,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": float(generation.get("repetition_penalty", 1.0)),
            "temperature": float(generation.get("temperature", 1.0)),
            "top_k": int(generation.get("top_k", 50)),
            "top_p": float(generation.get("top_p", 1.0)),
        },
    }
