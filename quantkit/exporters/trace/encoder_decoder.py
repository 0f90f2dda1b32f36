"""Export an encoder and a decoder as two ONNX graphs without reading their weights.

Linears and norms are the placeholders of `transformer.py`; attention is in plain operators, as the class writes it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from quantkit.exporters.trace.rewrite import Traced
from quantkit.exporters.trace.transformer import (
    BATCH,
    BSP,
    NEW,
    OPSET,
    PAST,
    PassedOn,
    cleaned,
    hollow,
    stand_ins,
    untraceable,
)
from quantkit.model.streaming.sounds import sounds
from quantkit.model.structure.kinds import hears
from quantkit.model.structure.traced import find_stacks
from quantkit.model.to_onnx import quiet

CROSS = "encoder_key_values"


class _Noting(PassedOn):
    """Cache that keeps what is put in, by block."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.noted: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int = 0, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, S, D] unchanged."""
        self.noted[layer_idx] = key_states, value_states
        return key_states, value_states


def _filled(parts: Sequence[Tensor]) -> DynamicCache:
    """Make a cache with keys and values of every block."""
    cache = DynamicCache()
    for keys, values in zip(parts[::2], parts[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        cache.layers.append(layer)
    return cache


class _Source(nn.Module):
    """Keys and values [B, H, T, D] of cross-attention over what the encoder puts out, for each block of the decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """Return keys and values, block by block."""
        return self.noted(input_ids[:, :1], input_ids=input_ids, attention_mask=attention_mask)

    def noted(self, first: Tensor, **source: Tensor) -> list[Tensor]:
        """Run the model on a source, and any first token [B, 1]: keys and values do not depend on the answer."""
        noting = _Noting(0)
        self.model(
            **source,
            decoder_input_ids=first,
            past_key_values=EncoderDecoderCache(PassedOn(0), noting),
            use_cache=True,
        )
        return [part for index in sorted(noting.noted) for part in noting.noted[index]]


class _Heard(_Source):
    """The same over what an encoder of speech puts out."""

    def forward(self, input_features: Tensor) -> list[Tensor]:  # type: ignore[override]
        """Return keys and values, block by block."""
        first = torch.zeros_like(input_features[:, :1, 0], dtype=torch.int64)
        return self.noted(first, input_features=input_features)


class _Answer(nn.Module):
    """The decoder, with keys and values of its own tokens and of the source's."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.width = model, width

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and keys and values of the answer with the new tokens."""
        return self.answered(input_ids, attention_mask, past, cross, attention_mask=attention_mask)

    def answered(
        self, input_ids: Tensor, positions: Tensor, past: list[Tensor], cross: list[Tensor], **more: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the same; `positions` [B, T] has one value for each position of the source."""
        caches = EncoderDecoderCache(_filled(past), _filled(cross))
        caches.is_updated = dict.fromkeys(range(len(cross) // 2), True)
        # read for its shape alone: keys and values over it are in the cache
        states = positions[:, :, None].expand(-1, -1, self.width).float()
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            **more,
            decoder_input_ids=input_ids,
            past_key_values=caches,
            use_cache=True,
        )
        layers = caches.self_attention_cache.layers
        return output.logits, [part for layer in layers for part in (layer.keys, layer.values)]


class _Written(_Answer):
    """The same without a mask of the source: a recording has no padding."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and keys and values of the answer with the new tokens."""
        return self.answered(input_ids, cross[0][:, 0, :, 0], past, cross)


def trace_both(skeleton: nn.Module) -> tuple[Traced, Traced]:
    """Trace the encoder of a model with the keys and values over what it puts out, and its decoder.

    Raises InputError: `export-untraceable`.
    """
    model: Any = copy.deepcopy(skeleton)
    hollow(model, torch.float32)
    stand_ins(model)
    model.set_attn_implementation("eager")
    dynamic, ones = torch.export.Dim.DYNAMIC, torch.ones(BATCH, PAST, dtype=torch.int64)
    batch, new, past, total = BSP
    source, heard = "source_length", hears(skeleton)
    free, cache = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    if heard:
        (name, features), *_ = sounds(skeleton, ones, {}).items()
        read, axes = [name], {name: [batch, "", ""]}
        whole, program = _program(skeleton, _Heard(model), (features,), ({0: dynamic},))
    else:
        read, axes = ["input_ids", "attention_mask"], {"input_ids": [batch, source], "attention_mask": [batch, source]}
        whole, program = _program(skeleton, _Source(model), (ones, ones.clone()), (free, free))
    shapes = [node.meta["val"].shape for node in next(iter(reversed(whole.graph.nodes))).args[0]]
    empty = [torch.zeros(BATCH, int(shape[1]), PAST, int(shape[3])) for shape in shapes]
    names = [f"{index}.{part}" for index in range(len(shapes) // 2) for part in ("key", "value")]
    crossed = [f"{CROSS}.{name}" for name in names]
    axes |= {name: [batch, "", source, ""] for name in crossed}
    first = (program, (read, crossed, axes))
    width = int(model.config.hidden_size)
    if heard:
        empty = [torch.zeros(BATCH, *map(int, shape[1:])) for shape in shapes]
    held = [torch.zeros(BATCH, value.shape[1], PAST + 2, value.shape[3]) for value in empty]
    masks, dynamics = ((), ()) if heard else ((ones,), (free,))
    crossing = {0: dynamic} if heard else cache
    arguments = (ones[:, :NEW].clone(), *masks, held, empty)
    sizes = (free, *dynamics, [cache] * len(held), [crossing] * len(empty))
    _, program = _program(skeleton, (_Written if heard else _Answer)(model, width), arguments, sizes)
    mask = [] if heard else ["attention_mask"]
    inputs = ["input_ids", *mask, *(f"past_key_values.{name}" for name in names), *crossed]
    outputs = ["logits", *(f"present.{name}" for name in names)]
    axes = axes | {"input_ids": [batch, new], "logits": [batch, new, ""]}
    axes |= {f"past_key_values.{name}": [batch, "", past, ""] for name in names}
    axes |= {f"present.{name}": [batch, "", total, ""] for name in names}
    known = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in skeleton.named_buffers(remove_duplicate=False)}
    path = find_stacks(skeleton)[1]
    second = (program, (inputs, outputs, axes))
    encoder, decoder = (cleaned(graph.model, called, False, 0, path, known) for graph, called in (first, second))
    return encoder, decoder


def _program(skeleton: nn.Module, wrapped: nn.Module, arguments: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    with torch.no_grad(), quiet():
        try:
            exported = torch.export.export(wrapped.eval(), arguments, dynamic_shapes=shapes, strict=False)
            return exported, torch.onnx.export(exported, opset_version=OPSET, optimize=False, verbose=False)
        except Exception as problem:
            raise untraceable(skeleton, problem) from problem
