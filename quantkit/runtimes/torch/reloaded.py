"""A written checkpoint, block by block, with weights expanded by their library's own code.

`from_pretrained` expands a whole model at once; here each linear is expanded when its block is loaded, by the very
call that transformers makes for it, so memory stays one block. transformers builds the classes; only the reading of
tensors is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.model import layouts, run_time
from quantkit.model.device import put
from quantkit.model.layouts import Expansion, Layout
from quantkit.model.source.open import Source, open_written
from quantkit.model.source.weights import TensorEntry, Weights
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import is_linear


def reloaded(folder: Path, *, cache: bool = True) -> StreamedModel:
    """A checkpoint, packed or dense, as a stream of blocks that see inputs and cache as the checkpoint says.

    Args:
        cache: whether the cache is quantized, if the checkpoint says so.
    """
    source = open_written(folder)
    config, stored = source.config.get("quantization_config"), source.weights
    model = StreamedModel(expanded(source))
    linears = [
        f"{block}.{name}"
        for block, module in zip(model.block_names, model.blocks, strict=True)
        for name, inner in module.named_modules()
        if is_linear(inner)
    ]
    how = run_time.read(config, linears, stored.entries, stored.read)
    how = how if cache else replace(how, cache=None)
    # blocks are computed in float32, but fixed scales are what the model's dtype holds of them
    model.transforms += how.transforms(model.block_names, getattr(torch, source.dtype))
    return model


def expanded(source: Source) -> Source:
    """A checkpoint with packed weights seen as dense ones, without the scales of inputs and cache."""
    config, stored = source.config.get("quantization_config"), source.weights
    if config is None:
        return source
    kept = {name: entry for name, entry in stored.entries.items() if not name.endswith(run_time.PARTS)}
    rest = replace(stored, entries=kept)
    dense = run_time.weights_are_dense(config)
    return replace(source, weights=rest if dense else ExpandedWeights.of(rest, config, source.dtype))


@dataclass(frozen=True)
class ExpandedWeights(Weights):
    """Packed weights seen as the dense ones they stand for: `X.weight` instead of what a layout stores of X.

    Args:
        stored: what is in the files.
        layout: how.
        expansion: what makes `X.weight` of it.
        packed: dense name -> linear's name in the files.
    """

    stored: Weights
    layout: Layout
    expansion: Expansion
    packed: Mapping[str, str]

    @classmethod
    def of(cls, stored: Weights, config: Mapping[str, Any], dtype: str) -> ExpandedWeights:
        """The view for a `quantization_config` of config.json, and a model of some dtype."""
        layout = layouts.of(config)
        packed = {f"{prefix}.weight": prefix for prefix in layout.prefixes(stored.entries)}
        parts = {prefix + part for prefix in packed.values() for part in layout.parts}
        entries: dict[str, TensorEntry] = {name: entry for name, entry in stored.entries.items() if name not in parts}
        for dense, prefix in packed.items():
            codes, shape = stored.entries[prefix + layout.codes], layout.shape(prefix, stored.read)
            entries[dense] = replace(codes, name=dense, dtype="F32", shape=shape)
        expansion = layout.expansion(config, getattr(torch, dtype))
        return cls(entries, stored.folder, stored.shards, stored, layout, expansion, packed)

    def read(self, name: str, device: torch.device | None = None) -> Tensor:
        """A tensor as the loaded model has it."""
        if name not in self.packed:
            return self.stored.read(name, device)
        found = self.expansion.weight(self.packed[name], self.stored.read)
        return put(found, device)
