"""Inputs of an encoder of speech for sequences of ids: features of the recordings, or noise.

Everything that runs a model is keyed by token ids: calibration, scores, checks, the trace of a graph. A decoder beside
an encoder of speech has the ids of its transcript, and the encoder hears

    a sequence of a set of recordings, or its beginning    the features of that recording
    any other ids                                          noise, the same for the same first ids

Checks hold on any input, so noise is enough for them. Scores on noise would say nothing, and are left out. Noise has
the shape of the recordings that are there, or else of what the class takes:

    input_values      [samples], any number of them
    input_features    [bins, frames] where the encoder begins with a convolution over the bins, as many frames as it has
                      positions times the strides of its convolutions (Whisper: 80 x 3000); else [frames, bins]
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.structure.kinds import sound_of

# ids of a sequence that choose its noise
_FIRST = 4
# samples of noise for an encoder of samples, frames for one of features of any length
_SAMPLES, _FRAMES = 8000, 64
# names in configs for the features of a frame
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
_LOUD = 0.5


def sounds(model: nn.Module, ids: Tensor, rows: Mapping[bytes, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the arguments of a model for what the encoder hears with ids [samples, tokens].

    Args:
        rows: ids of a sequence, as bytes -> arguments for its recording [1, ...], all of one shape.
    """
    name = str(sound_of(inspect.signature(model.forward).parameters))
    encoder: Any = model.get_encoder()  # type: ignore[operator]
    dtype = next(value.dtype for value in encoder.parameters() if value.is_floating_point())
    joined = heard_with(name, _shape(model, name), ids, rows)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in joined.items()}


def heard_with(
    name: str, shape: tuple[int, ...], ids: Tensor, rows: Mapping[bytes, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the same for an input of that name; `shape` is that of noise where there are no recordings."""
    like = next(iter(rows.values()), None)
    shape = shape if like is None else tuple(like[name].shape[1:])
    parts = [_known(row, rows) or _noise(name, shape, row, like) for row in ids]
    return {key: torch.cat([part[key] for part in parts]).to(ids.device) for key in parts[0]}


def hears_windows(model: nn.Module) -> bool:
    """Tell whether every recording has the same number of frames: an encoder with a table of positions."""
    name = str(sound_of(inspect.signature(model.forward).parameters))
    return name == "input_features" and _shape(model, name)[0] != _FRAMES


def _known(row: Tensor, rows: Mapping[bytes, Mapping[str, Tensor]]) -> Mapping[str, Tensor] | None:
    """Return the arguments for a sequence [tokens] that begins one of `rows`."""
    begins = row.cpu().numpy().tobytes()
    exact = rows.get(begins)
    return exact or next((heard for key, heard in rows.items() if key.startswith(begins)), None)


def _noise(name: str, shape: tuple[int, ...], row: Tensor, like: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    digest = hashlib.sha256(row[:_FIRST].cpu().numpy().tobytes()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    others = {key: torch.ones_like(value) for key, value in (like or {}).items() if key != name}
    return {name: _LOUD * torch.randn((1, *shape), generator=generator), **others}


def _shape(model: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one recording: samples, or features as the encoder orders them."""
    if name == "input_values":
        return (_SAMPLES,)
    configs = (model.config, getattr(model.config, "encoder_config", None))
    stated = (getattr(config, key, None) for config in configs for key in _BINS)
    bins = next((size for size in stated if isinstance(size, int)), 0)
    convolutions = [part for part in model.get_encoder().children() if isinstance(part, nn.Conv1d)]
    if not convolutions or convolutions[0].in_channels != bins:
        return (_FRAMES, bins)
    positions = getattr(model.config, "max_source_positions", _FRAMES)
    return bins, positions * math.prod(part.stride[0] for part in convolutions)
