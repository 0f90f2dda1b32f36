"""What the shrinking cannot know: sizes that must agree, and kinds of layers that a default hides. Data alone."""

from typing import Any

_BOTH = ["sliding_attention", "full_attention"]
_SHARED_KEYS = {"layer_types": _BOTH * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
_ASSISTANT = {
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "layer_types": _BOTH},
    **{"num_hidden_layers": 2, "num_kv_shared_layers": 2, "global_head_dim": 32},
}
_HALF_WINDOW = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}
_SWA = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16},
}
_SPARSE = ["dense", "sparse", "sparse", "sparse"]


def _rope(*sections: int, **more: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, **more, "mrope_section": [*sections]}


_GRID = {"out_hidden_size": 64, "num_position_embeddings": 16}
_AXIAL = {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16), "attn_layers": ["local", "lsh", "local", "lsh"]}

# by model type of the config, or by class
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 160},
    "blt_global_transformer": {"hidden_size": 128},
    "blt_local_decoder": {"hidden_size_global": 128, "vocab_size": 260},
    "blt_local_encoder": {"hidden_size_global": 128, "vocab_size": 260},
    "cohere_compass_text": {"rope_parameters": {kind: _rope(3, 3, 2) for kind in _BOTH}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **_HALF_WINDOW},
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": _SPARSE,
        "per_layer_config": {"1": _SWA, "2": _SWA},
    },
    "esm": {"vocab_size": 160},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": 96, "activation_sparsity_pattern": [0.9] + [0.0] * 5},
    "gemma4_text": {**_SHARED_KEYS, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32, "num_hidden_layers": 4},
    "granitemoe_swa": {"shared_intermediate_size": 32},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "granitemoeshared": {"shared_intermediate_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longformer": {"attention_window": 8},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "zero_expert_num": 2},
    "mellum": {"mlp_layer_types": _SPARSE, "num_hidden_layers": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        **{"mlp_layer_types": _SPARSE, "num_hidden_layers": 4, "index_block_size": 8, "index_topk_blocks": 2},
    },
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 2},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 8},
    "qwen2": _HALF_WINDOW,
    "qwen2_moe": {**_HALF_WINDOW, "mlp_only_layers": [1]},
    "qwen3": _HALF_WINDOW,
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "ple_layer_ids": [2], "heads_per_ngram": 4, "ngram_vocab_size_base": 160},
        **{"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4},
    },
    "reformer": _AXIAL,
    "squeezebert": {"embedding_size": 64},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    **{
        name: {"rope_parameters": _rope(2, 3, 3)}
        for name in (
            *("cosmos3_edge_text", "glm4v_text", "glm_image_text", "glm_ocr_text"),
            *("qwen2_5_vl_text", "qwen2_vl_text"),
        )
    },
    "glm4v_moe_text": {"rope_parameters": _rope(1, 1, 2, partial_rotary_factor=0.5)},
    "glm5_next_text": {"index_topk": 8, "index_kpool": 4},
    "hunyuan_vl_text": {"rope_parameters": _rope(2, 2, 2, 2)},
    "qwen3_vl_text": {"rope_parameters": _rope(3, 3, 2)},
    # towers of images, and ids that mark them
    "gemma3": {"mm_tokens_per_image": 4, "boi_token_index": 158, "eoi_token_index": 157},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "llama4_vision_model": {
        **{"intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
    "pixtral": {"head_dim": 16},
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 64},
    "qwen2_5_vl_vision": {"depth": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16},
    "qwen3_vl_vision": {"depth": 3, "deepstack_visual_indexes": [0, 2], **_GRID},
    **{f"{name}_vision": {"depth": 2, **_GRID} for name in ("qwen3_5", "qwen3_5_moe")},
    **{
        name: {"video_token_id": 158, "vision_start_token_id": 157, "vision_end_token_id": 156}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
    },
    "Gemma4AssistantForCausalLM": {"text_config": _ASSISTANT},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": _ASSISTANT},
}

# of a class whose settings make another model of it: (class, what) -> settings
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("DogeForCausalLM", "experts"): {"is_moe": True},
    ("FalconForCausalLM", "alibi"): {"alibi": True},
    ("FalconForCausalLM", "new decoder"): {"new_decoder_architecture": True},
    ("Gemma4ForCausalLM", "experts"): {
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    },
    ("LlamaForCausalLM", "tied"): {"tie_word_embeddings": True},
    ("LlamaForCausalLM", "biases"): {"attention_bias": True, "mlp_bias": True},
    ("MptForCausalLM", "no alibi"): {"attn_config": {"alibi": False, "qk_ln": True, "clip_qkv": 2.0}},
    ("Qwen2MoeForCausalLM", "no window"): {"use_sliding_window": False},
    ("StableLmForCausalLM", "parallel"): {"use_parallel_residual": True, "qk_layernorm": True},
    ("T5EncoderModel", "gated"): {"feed_forward_proj": "gated-gelu"},
    ("Zamba2ForCausalLM", "rope"): {"use_mem_rope": True},
}

# decoders without their head that are used as encoders
BASES = {"GemmaModel", "Gemma2Model", "Gemma3TextModel", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}

_STEMS = {
    "SequenceClassification": {
        **{"llama": "Llama", "bert": "Bert", "roberta": "Roberta", "gpt2": "GPT2", "deberta-v2": "DebertaV2"},
        **{"t5": "T5", "bart": "Bart", "modernbert": "ModernBert"},
    },
    "TokenClassification": {"bert": "Bert", "llama": "Llama", "distilbert": "DistilBert"},
    "QuestionAnswering": {"bert": "Bert", "llama": "Llama"},
    "ImageClassification": {
        **{"vit": "ViT", "deit": "DeiT", "beit": "Beit", "dinov2": "Dinov2", "swin": "Swin", "convnext": "ConvNext"},
        **{"resnet": "ResNet", "clip": "CLIP"},
    },
}
# vision-language models
_SEEING = {
    **{"llava": "Llava", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "gemma3": "Gemma3"},
    **{"idefics3": "Idefics3", "smolvlm": "SmolVLM", "internvl": "InternVL", "mistral3": "Mistral3"},
    **{"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "llama4": "Llama4"},
}
# heads besides the auto classes of language models: (table, model type -> class)
HEADS: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"AutoModelFor{task}", {kind: f"{stem}For{task}" for kind, stem in stems.items()})
        for task, stems in _STEMS.items()
    ),
    ("AutoModelForImageTextToText", {kind: f"{stem}ForConditionalGeneration" for kind, stem in _SEEING.items()}),
]

# why a class is refused, where its line does not say so
BECAUSE: dict[str, str] = {
    "DogeForCausalLM (experts)": "its router mixes the tokens of a batch, so its forward depends on what runs beside",
}

# what cannot be built or run here, or is no model of token ids, with the reason
LEFT_OUT: dict[str, str] = {
    "EvollaModel": "reads proteins beside the text",
    "Gemma3nForConditionalGeneration": "its vision tower wants timm, which is not installed",
    "Gemma4AssistantForCausalLM": "drafts for another model, whose keys and values it reads",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model, whose keys and values it reads",
    "MusicgenForCausalLM": "reads rows of codes of several codebooks, not token ids",
    "MusicgenMelodyForCausalLM": "reads rows of codes of several codebooks, not token ids",
    "PeAudioModel": "reads sound beside the text",
    "PeAudioVideoModel": "its video tower wants timm, which is not installed",
    "PeVideoModel": "its video tower wants timm, which is not installed",
    "T5GemmaEncoderModel": "transformers makes it of a T5Gemma alone that says it is no encoder-decoder",
}
