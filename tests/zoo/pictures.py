"""What a processor hands a tiny vision-language model of the zoo for an image: placeholder ids, and pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo import shrink

# class -> tokens of one image of 32 x 32 pixels in patches of 8
SEEING = {
    "LlavaForConditionalGeneration": 16,
    "Qwen2VLForConditionalGeneration": 4,
    "Qwen2_5_VLForConditionalGeneration": 4,
    "Qwen3VLForConditionalGeneration": 4,
    "Gemma3ForConditionalGeneration": 4,
    "Idefics3ForConditionalGeneration": 4,
    "SmolVLMForConditionalGeneration": 4,
    "InternVLForConditionalGeneration": 4,
    "Mistral3ForConditionalGeneration": 4,
    "Qwen3_5ForConditionalGeneration": 4,
    "Qwen3_5MoeForConditionalGeneration": 4,
    "Llama4ForConditionalGeneration": 4,
}
_AT = 6


def with_image(name: str, row: Tensor, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids [1, tokens] with an image behind the first six, and what else the forward of a class takes for it."""
    tokens, ids = SEEING[name], row.clone().reshape(1, -1)
    place = slice(_AT, _AT + tokens)
    ids[0, place] = shrink.VOCABULARY - 1
    types = torch.zeros_like(ids)
    types[0, place] = 1
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, 32, 32, generator=generator)
    beside: dict[str, Any] = {"pixel_values": pixels}
    if name.startswith("Qwen"):
        patches = torch.randn(16, 3 * 2 * 8 * 8, generator=generator)
        beside = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": types}
    elif name.startswith("Gemma3"):
        beside["token_type_ids"] = types
    elif name.startswith(("Idefics3", "SmolVLM")):
        beside["pixel_values"] = pixels[None]
    elif name.startswith("Mistral3"):
        beside["image_sizes"] = torch.tensor([[32, 32]])
    return ids, beside
