"""Run an encoder and a decoder in two sessions of ONNX Runtime.

    encoder.onnx   tokens of a source -> keys and values of the decoder's cross-attention, made once
    model.onnx     new tokens of an answer, its keys and values so far, and the source's -> logits, keys and values

The prompt of a sequence is its source. The first answer follows the token that begins every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.runtimes.generate import Scores, too_long
from quantkit.runtimes.onnxruntime.open import open_graph
from quantkit.runtimes.onnxruntime.session import Array, OnnxModel

if TYPE_CHECKING:
    from torch import Tensor

ENCODER, START = "encoder.onnx", "quantkit.start"


@dataclass
class BothCaches:
    """Keys and values of some sequences: of their sources, and of their answers so far."""

    batch: int
    capacity: int
    past: Mapping[str, Array]
    mask: Array | None = None
    source: Mapping[str, Array] = field(default_factory=dict)
    length: int = 0


class OnnxPair(OnnxModel):
    """An encoder and a decoder in two sessions; arguments as for `OnnxModel`."""

    def __init__(self, folder: Path, *, threads: int | None = None, accuracy_level: int | None = None) -> None:
        super().__init__(folder, threads=threads, accuracy_level=accuracy_level)
        self.encoder = open_graph(folder / ENCODER, self.threads, level=accuracy_level)
        self.start = int(self.meta.get(START, 0))

    def state(self, batch: int, capacity: int) -> Any:
        """Make room for `batch` sequences of up to `capacity` tokens of source and answer. Raises as `OnnxModel`."""
        self.demand_positions(capacity)
        self.fits(batch, capacity, 1)
        shapes = {name: self.inputs[name].shape for name in self.caches}
        past = {
            name: np.zeros((batch, int(heads), 0, int(size)), np.float32)
            for name, (_, heads, _, size) in shapes.items()
        }
        return BothCaches(batch, capacity, past)

    def read(self, state: BothCaches, ids: Array, mask: Array | None = None) -> None:
        """Run the encoder on the sources, ids [B, S]; `mask` has zeros for padding."""
        state.mask = np.ones_like(ids) if mask is None else mask
        with self._reading():
            values = self.encoder.run(None, {"input_ids": ids, "attention_mask": state.mask})
        state.source = {value.name: array for value, array in zip(self.encoder.get_outputs(), values, strict=True)}
        state.length += ids.shape[1]

    def run(self, state: Any, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Read the sources, and return the logits behind the first token; then those of answers' tokens, ids [B, S]."""
        if not state.source:
            self.read(state, ids, mask)
            ids = np.full((len(ids), 1), self.start, np.int64)
        return self.write(state, ids)[:, -keep:]

    def write(self, state: BothCaches, ids: Array) -> Array:
        """Return the logits [B, S, vocabulary] of an answer's tokens [B, S], which continue it."""
        if (after := state.length + ids.shape[1]) > state.capacity + 1:  # the first token takes no room of the caller's
            raise too_long("cache", after, f"there is room for {state.capacity}")
        with self._reading():
            logits, *present = self.session.run(None, self._feeds(state, ids))
        state.past, state.length = dict(zip(self.caches, present, strict=True)), after
        return np.asarray(logits)

    def _feeds(self, state: BothCaches, ids: Array) -> dict[str, Array]:
        assert state.mask is not None
        return {"input_ids": ids, "attention_mask": state.mask, **state.past, **state.source}

    def scores(self, ids: Tensor, at_once: int | None = None) -> Scores:
        """Return scores as `runtimes.Scored.scores` does: each text is read, and read out again."""
        import torch

        held: tuple[int, Tensor] | None = None

        def scores(index: int, part: slice) -> Tensor:
            nonlocal held
            if held is None or held[0] != index:
                held = index, torch.from_numpy(self.retold(ids[index : index + 1].numpy())[0])
            return held[1][part]

        return scores

    def retold(self, ids: Array, mask: Array | None = None) -> Array:
        """Return the logits [B, S, vocabulary] of answers that repeat their sources, ids [B, S]."""
        state = self.state(ids.shape[0], 2 * ids.shape[1])
        self.read(state, ids, mask)
        answers = ids.copy()
        answers[:, 0] = self.start
        return self.write(state, answers)

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """Prepare a first step of answers to sources of `context` tokens, for repeated calls. Raises as `OnnxModel`."""
        state, ids = self._read(batch, context)
        return partial(self.session.run, None, self._feeds(state, ids[:, :1]))

    def prefill(self, batch: int, tokens: int) -> Callable[[], None]:
        """Prepare a run of sources of `tokens` and the first step, for repeated calls. Raises as `OnnxModel`."""
        _, ids = self._read(batch, tokens)

        def step() -> None:
            self.run(self.state(batch, tokens + 1), ids, keep=1)

        return step

    def _read(self, batch: int, tokens: int) -> tuple[BothCaches, Array]:
        state, ids = (
            self.state(batch, tokens + 1),
            np.random.default_rng(0).integers(0, self.vocabulary, (batch, tokens)),
        )
        self.read(state, ids)
        return state, ids


def opened(folder: Path, **how: Any) -> OnnxModel:
    """Open `onnx/` of a bundle: one graph, or an encoder and a decoder. Raises as `OnnxModel`."""
    return (OnnxPair if (folder / ENCODER).is_file() else OnnxModel)(folder, **how)
