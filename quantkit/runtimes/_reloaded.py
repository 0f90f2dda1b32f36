"""A written checkpoint, block by block, with weights expanded by compressed-tensors' own code.

`from_pretrained` expands a whole model at once; here each linear is expanded when its block is loaded, by the very
call that transformers makes for it (`BaseCompressor.decompress`), so memory stays one block. transformers builds the
classes; only the reading of tensors is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.model.open import open_written
from quantkit.model.stream import StreamedModel
from quantkit.model.weights import Entry, Weights

_PACKED = ".weight_packed"


def reloaded(folder: Path) -> StreamedModel:
    """A checkpoint, packed or dense, as a stream of blocks."""
    source = open_written(folder)
    config = source.config.get("quantization_config")
    if config is not None:
        source = replace(source, weights=ExpandedWeights.of(source.weights, config, source.dtype))
    return StreamedModel(source)


@dataclass(frozen=True)
class ExpandedWeights(Weights):
    """Packed weights seen as the dense ones they stand for: `X.weight` instead of `X.weight_packed` and companions.

    Args:
        stored: what is in the files.
        schemes: compressed-tensors' config groups.
        dtype: of the model; expanded weights are cast to it, as transformers does.
        expands_at_load: whether the config tells transformers to expand weights while it loads them.
    """

    stored: Weights
    schemes: tuple[Any, ...]
    dtype: torch.dtype
    expands_at_load: bool

    @classmethod
    def of(cls, stored: Weights, config: Mapping[str, Any], dtype: str) -> ExpandedWeights:
        """The view for a `quantization_config` of config.json."""
        entries: dict[str, Entry] = {}
        prefixes = [name.removesuffix(_PACKED) for name in stored.entries if name.endswith(_PACKED)]
        companions = {f"{prefix}.weight_{part}" for prefix in prefixes for part in ("scale", "zero_point", "shape")}
        for name, entry in stored.entries.items():
            if name.endswith(_PACKED):
                dense = f"{name.removesuffix(_PACKED)}.weight"
                rows, columns = (int(size) for size in stored.read(f"{dense}_shape"))
                entries[dense] = replace(entry, name=dense, dtype="F32", shape=(rows, columns))
            elif name not in companions:
                entries[name] = entry
        expands = bool(config.get("dequantize"))
        return cls(entries, stored.folder, stored.shards, stored, _schemes(config), getattr(torch, dtype), expands)

    def read(self, name: str) -> Tensor:
        """A tensor as the loaded model has it."""
        prefix = name.removesuffix(".weight")
        if prefix + _PACKED not in self.stored.entries:
            return self.stored.read(name)
        from compressed_tensors.compressors import BaseCompressor

        scheme = _scheme_of(prefix, self.schemes)
        parts = {
            part: self.stored.read(f"{prefix}.{part}")
            for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
            if f"{prefix}.{part}" in self.stored.entries
        }
        if not self.expands_at_load:
            # transformers casts scales to the model's dtype when it keeps the packed layout
            parts["weight_scale"] = parts["weight_scale"].to(self.dtype)
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
        weight: Tensor = compressor.decompress(parts, scheme)["weight"]
        return weight.to(self.dtype)


def _schemes(config: Mapping[str, Any]) -> tuple[Any, ...]:
    from compressed_tensors.quantization import QuantizationConfig

    known = QuantizationConfig.model_fields.keys()
    parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key in known})
    groups = list(parsed.config_groups.values())
    for group in groups:
        group.format = group.format or parsed.format
    return tuple(groups)


def _scheme_of(prefix: str, schemes: Sequence[Any]) -> Any:
    """The group that names the layer, else the one for all of its class."""
    for scheme in schemes:
        for target in scheme.targets:
            if prefix == target or prefix.endswith(f".{target}") or target.endswith(f".{prefix}"):
                return scheme
    return schemes[0]
