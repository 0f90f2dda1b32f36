"""Run an encoder and a decoder in two sessions of ONNX Runtime.

    encoder.onnx   tokens of a source -> keys and values of the decoder's cross-attention, made once
    model.onnx     new tokens of an answer, its keys and values so far, and the source's -> logits, keys and values

The prompt of a sequence is its source. The first answer follows the token that begins every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        first = self.encoder.get_inputs()[0]
        # of an encoder of speech: name and shape of its features
        self.heard = None if first.name == "input_ids" else (str(first.name), tuple(first.shape[1:]))
        self.pictures: Any = None

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

    def read(self, state: BothCaches, ids: Array, mask: Array | None = None, features: Array | None = None) -> None:
        """Run the encoder on the sources, ids [B, S]; `mask` has zeros for padding.

        An encoder of speech takes `features` instead, or those of the recordings of these ids.
        """
        state.mask = np.ones_like(ids) if mask is None else mask
        feeds = {"input_ids": ids, "attention_mask": state.mask}
        if self.heard is not None:
            feeds = {self.heard[0]: self._recorded(ids) if features is None else features}
        with self._reading():
            values = self.encoder.run(None, feeds)
        state.source = {value.name: array for value, array in zip(self.encoder.get_outputs(), values, strict=True)}
        state.length += 0 if self.heard else ids.shape[1]

    def _recorded(self, ids: Array) -> Array:
        import torch

        from quantkit.model.streaming.sounds import heard_with

        assert self.heard is not None
        rows = {} if self.pictures is None else self.pictures.rows
        features: Array = heard_with(*self.heard, torch.from_numpy(ids), rows)[self.heard[0]].float().numpy()
        return features

    def written(self, features: Array, before: Sequence[int], stated: Mapping[str, Any], most: int) -> list[int]:
        """Return the tokens of a transcript, greedily.

        Args:
            features: of one recording, [1, ...].
            before: tokens in front of the transcript.
            stated: contents of generation_config.json: tokens that are never written, and that end a text.
            most: most tokens.
        """
        room = max(0, min(most, self.context // 2 - len(before)))  # half of the context is the source's
        state, tokens = self.state(1, len(before) + room), list[int]()
        self.read(state, np.zeros((1, 0), np.int64), features=features)
        logits = self.write(state, np.array([before]))[0, -1]
        ends = stated.get("eos_token_id")
        never, first = (list(stated.get(key) or ()) for key in ("suppress_tokens", "begin_suppress_tokens"))
        for _ in range(room):
            logits[[*never, *(() if tokens else first)]] = -np.inf
            token = int(logits.argmax())
            if token in (ends if isinstance(ends, list) else [ends]):
                break
            tokens.append(token)
            logits = self.write(state, np.array([[token]]))[0, -1]
        return tokens

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
        mask = {} if self.heard else {"attention_mask": state.mask}
        return {"input_ids": ids, **mask, **state.past, **state.source}

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
        features = None
        if self.heard is not None:
            shape = (batch, *map(int, self.heard[1]))
            features = np.random.default_rng(0).standard_normal(shape, np.float32)
        self.read(state, ids, features=features)
        return state, ids


def opened(folder: Path, **how: Any) -> OnnxModel:
    """Open `onnx/` of a bundle: one graph, or an encoder and a decoder. Raises as `OnnxModel`."""
    return (OnnxPair if (folder / ENCODER).is_file() else OnnxModel)(folder, **how)
