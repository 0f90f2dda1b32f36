"""Sequences of a calibration set that begin with an image, for vision-language models.

Every second sequence gets one image. The model's own processor turns the image into pixels and placeholder ids, inside
of a prompt by its chat template, or bare where it has none; the text of the sequence follows, and is cut at its length:

    ids     <bos> User: <image> <image> ... <image> Describe the image. Assistant: | text of the set
    beside  pixel_values, image_grid_thw, ...; per token 1 for a placeholder and 0 for text (mm_token_type_ids)

The model's forward makes embeddings of both, so its text stack is calibrated on images as it meets them in use.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calibrate.sets.images import demand_bytes, drawn_bytes
from quantkit.calibrate.tokens import pack
from quantkit.calibrate.tokens.processed import ImageProcessor
from quantkit.errors import InputError
from quantkit.lazy import torch

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.source.open import Source

CODE = "calibration-images"
_WHERE = "calibration.images"
_ASKED = "Describe the image."
_WITHOUT = "leave calibration.images out: the text stack is then calibrated on text alone"


def demand_seeing(reference: str, source: Source) -> ImageProcessor:
    """Return the model's processor, and open the images.

    Raises InputError: `calibration-images` for a model of text, or without a processor; those of
    `calibrate.sets.images`.
    """
    if not source.sees:
        rule, remedy = "only a vision-language model is calibrated on images", "leave calibration.images out"
        raise InputError(CODE, _WHERE, f"{reference}, and {source.architecture} takes text", rule, remedy)
    demand_bytes(reference)
    return ImageProcessor.load(source.path, CODE, _WITHOUT, where=source.ref, trust=source.trust_remote_code)


def with_images(tokens: TokenSet, reference: str, source: Source, seed: int) -> TokenSet:
    """Put an image at the beginning of every second sequence, but of none that the model wrote itself.

    Args:
        reference: name or path of a set of images.
        seed: seed of the recipe, for drawing them.

    Raises InputError: `calibration-images`; those of `calibrate.sets.images`.
    """
    from quantkit.model.streaming.calls import Pictures

    processor = demand_seeing(reference, source)
    places = range(0, len(tokens.ids) - tokens.generated, 2)
    name, images = drawn_bytes(reference, len(places), seed)
    tokenizer, turn = processor.processor.tokenizer, processor.turn(_ASKED, source.ref)
    before, ids, rows = pack.frame(tokenizer)[0], tokens.ids.clone(), {}
    takes = inspect.signature(source.model_class().forward).parameters
    digest = hashlib.sha256(tokens.sha256.encode())
    for number, place in enumerate(places):
        image, where = images[number % len(images)], f"{reference}, image {number % len(images) + 1}"
        prompt, beside = _prepared(processor, turn, image, before, where)
        _demand_room(len(prompt), ids.shape[1], where)
        text = ids[place][len(before) if ids[place, : len(before)].tolist() == before else 0 :]
        ids[place] = torch.cat([prompt, text])[: ids.shape[1]]
        beside = {key: _stretched(value, len(prompt), ids.shape[1]) for key, value in beside.items() if key in takes}
        rows[Pictures.key(ids[place])] = beside
        for key, value in sorted(beside.items()):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode() + value.numpy().tobytes())
    digest.update(ids.numpy().tobytes())
    note = f"{len(places)} of {len(ids)} sequences begin with an image of {name}, by the model's own processor"
    note += "" if turn else ", without words: it has no chat template that takes an image"
    begins = pack.begins(ids.numpy(), tokenizer)
    changed: dict[str, Any] = {
        "ids": ids,
        "sha256": digest.hexdigest(),
        "pictures": Pictures(rows),
        "images": name,
        "begins": begins,
    }
    return replace(tokens, notes=(*tokens.notes, note), **changed)


def _prepared(
    processor: ImageProcessor, turn: str | None, image: NDArray[np.uint8], before: list[int], where: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the ids of a prompt with an image, [tokens], and the other arguments of the forward.

    `turn` is a user's turn around the image; None for the image alone, behind the ids `before` a text.
    """
    tensors = processor(turn or processor.image_token, [image], where)
    ids, more = tensors.pop("input_ids"), 0 if turn else len(before)
    tensors.pop("attention_mask", None)
    if more:
        per_token = {key for key, value in tensors.items() if value.shape == ids.shape}
        tensors = {
            key: torch.nn.functional.pad(value, (more, 0)) if key in per_token else value
            for key, value in tensors.items()
        }
        ids = torch.cat([torch.tensor([before]), ids], dim=1)
    return ids[0], tensors


def _demand_room(prompt: int, tokens: int, where: str) -> None:
    if prompt < tokens:
        return
    remedy = f"--set calibration.tokens={prompt + 64}, or smaller images"
    raise InputError(
        CODE, where, f"{prompt} tokens with its prompt", f"it fits into calibration.tokens, {tokens}", remedy
    )


def _stretched(value: torch.Tensor, prompt: int, tokens: int) -> torch.Tensor:
    """Mark the text behind a prompt in a tensor with one value a token; others stay as they are."""
    of_tokens = value.shape == (1, prompt)
    return torch.nn.functional.pad(value, (0, tokens - prompt)) if of_tokens else value.contiguous()
