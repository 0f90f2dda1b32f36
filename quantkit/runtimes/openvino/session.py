"""Run a bundle's `openvino/` in OpenVINO: decoders whose cache is a state of the model, encoders, graphs.

A state is an infer request: it holds the keys and values of its sequences, and every run adds to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.runtimes.generate import FileModel, no_cache, too_long
from quantkit.runtimes.openvino.open import MODEL, WEIGHTS, compiled, first_line, library, noted, read

Array = NDArray[Any]


@dataclass
class OpenvinoState:
    """Some sequences.

    Args:
        request: infer request with their keys and values.
        mask: [B, capacity], 1 for a token, 0 for padding.
        length: filled columns, padding included.
    """

    request: Any
    mask: Array
    length: int = 0


class OpenvinoModel(FileModel):
    """A transformer in OpenVINO.

    Args:
        folder: folder with `model.xml`.
        threads: threads of a CPU; None: the machine's cores.
        accuracy_level: level of compressed products instead of the file's; with 0 none of their inputs is rounded.
        device: `CPU`, `GPU`, `NPU` or `AUTO`; None: the device that the file was written for.
        change: function that changes the model before it is compiled.

    Raises:
        MissingDependency: openvino. InputError: `openvino-unreadable`, `runtime-not-here`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        accuracy_level: int | None = None,
        device: str | None = None,
        change: Callable[[Any], None] = lambda model: None,
    ) -> None:
        self.folder = self.place = folder
        self.threads = threads or machine.cores()
        model = read(folder / MODEL)
        self.meta = noted(model)
        self.device = device or self.meta.get("quantkit.device", "CPU")
        level = int(self.meta.get("quantkit.accuracy_level", 0)) if accuracy_level is None else accuracy_level
        self.accuracy_level = level
        change(model)
        self._model = compiled(model, folder / MODEL, self.threads, self.device, level)
        self.inputs = {name: value for value in self._model.inputs for name in value.names}
        # a decoder has a cache and returns logits; an encoder with a head returns them besides its last hidden states
        self.decoder = "beam_idx" in self.inputs
        self.headed = not self.decoder and len(self._model.outputs) > 1
        self.context = int(self.meta.get("quantkit.context", 0)) or (1 << 31)
        self.cache_bytes = int(self.meta.get("quantkit.cache_bytes", 0))
        self.weight_bytes = sum((folder / name).stat().st_size for name in (MODEL, WEIGHTS))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the runtime, for rows of measurements."""
        return {"accuracy_level": self.accuracy_level, "threads": self.threads, "device": self.device}

    @cached_property
    def features(self) -> int:  # type: ignore[override]
        """Size of the output at a position: logits, or an encoder's last hidden state."""
        return int(self._model.outputs[0].partial_shape[-1].get_length())

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.features

    def state(self, batch: int, capacity: int) -> OpenvinoState:
        """Make room for `batch` sequences of up to `capacity` tokens.

        Raises:
            InputError: `not-a-decoder`, `prompt-too-long` beyond the context, `out-of-memory` beyond the free memory.
        """
        if not self.decoder:
            raise no_cache(str(self.folder))
        self.demand_positions(capacity)
        # the plug-in doubles a full cache, and copies it then
        self.demand_room(batch, capacity, 3 * batch * capacity * self.cache_bytes)
        return OpenvinoState(self._model.create_infer_request(), np.zeros((batch, capacity), np.int64))

    def run(self, state: OpenvinoState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state; arguments as in `OnnxModel.run`.

        Returns:
            logits [B, S or keep, vocabulary], float32.

        Raises:
            InputError: `prompt-too-long`.
        """
        state.request.infer(self._feed(state, ids, mask, keep))
        state.length += ids.shape[1]
        return np.array(state.request.get_output_tensor(0).data)

    def _feed(self, state: OpenvinoState, ids: Array, mask: Array | None = None, keep: int = 0) -> dict[str, Array]:
        before, after = state.length, state.length + ids.shape[1]
        if after > state.mask.shape[1]:
            raise too_long("cache", after, f"there is room for {state.mask.shape[1]}")
        state.mask[:, before:after] = 1 if mask is None else mask
        # the position of a token is the number of real tokens before it, without the padding on the left
        places = np.maximum(np.cumsum(state.mask[:, :after], axis=1) - 1, 0)[:, before:]
        feed = {
            "input_ids": np.ascontiguousarray(ids, np.int64),
            "attention_mask": np.ascontiguousarray(state.mask[:, :after]),
            "position_ids": np.ascontiguousarray(places),
            "beam_idx": np.arange(len(ids), dtype=np.int32),
            "logits_to_keep": np.array([keep], np.int64),
        }
        return {name: values for name, values in feed.items() if name in self.inputs}

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Return an encoder's last hidden states [B, S, width] for ids [B, S].

        Raises:
            InputError: `shape-unsupported`, the file holds only other shapes.
        """
        return np.array(self._encoded(ids, mask)(self._model.create_infer_request())[0])

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Return the logits of an encoder's head for ids [B, S]: of texts [B, N], tokens [B, S, N], spans [B, S, 2].

        Raises:
            InputError: `shape-unsupported`, as `encode`.
        """
        _, *logits = self._encoded(ids, mask)(self._model.create_infer_request())
        return np.array(logits[0]) if len(logits) == 1 else np.stack(logits, axis=-1)

    def _encoded(self, ids: Array, mask: Array | None) -> Callable[[Any], list[Array]]:
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        feed |= {name: np.zeros_like(ids) for name in self.inputs if name not in feed}
        shape = self.inputs["input_ids"].partial_shape
        if shape.is_static and list(shape.to_shape()) != list(ids.shape):
            batch, tokens = shape.to_shape()
            value, rule = f"{len(ids)} sequences of {ids.shape[1]} tokens", f"it was written for {batch} of {tokens}"
            remedy = "export it with another `openvino: {shape: …}`, or for a device that takes any shape"
            where = str(self.folder / MODEL)
            raise InputError("shape-unsupported", where, value, rule, remedy)

        def run(request: Any) -> list[Array]:
            request.infer(feed)
            return [request.get_output_tensor(at).data for at in range(len(self._model.outputs))]

        return run

    # --- steps for measuring latency ----------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """Prepare one decode step with `context` tokens in the cache, for repeated calls; a call returns its seconds.

        A step makes the cache longer, so the cache is restored before the next one, outside the measured time.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`.
        """
        state = self.state(batch, context + 1)
        generator = np.random.default_rng(0)
        if context:
            self.run(state, generator.integers(0, self.vocabulary, (batch, context)), keep=1)
        kept = [library().Tensor(np.array(variable.state.data)) for variable in state.request.query_state()]
        feed = self._feed(state, generator.integers(0, self.vocabulary, (batch, 1)))

        def step() -> float:
            for variable, values in zip(state.request.query_state(), kept, strict=True):
                variable.state = values
            began = time.perf_counter()
            state.request.infer(feed)
            return time.perf_counter() - began

        return step

    def prefill(self, batch: int, tokens: int) -> Callable[[], None]:
        """Prepare a prefill of `tokens` a sequence, up to the first logits or all hidden states, for repeated calls.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`, `shape-unsupported`.
        """
        generator = np.random.default_rng(0)
        if not self.decoder:
            self.demand_positions(tokens)
            words = int(self.meta.get("quantkit.vocabulary", 2))
            run = self._encoded(generator.integers(0, words, (batch, tokens)), None)
            request = self._model.create_infer_request()
            return lambda: (run(request), None)[1]
        state = self.state(batch, tokens)
        feed = self._feed(state, generator.integers(0, self.vocabulary, (batch, tokens)), keep=1)

        def step() -> None:
            state.request.reset_state()
            state.request.infer(feed)

        return step


class OpenvinoGraph:
    """A graph that is no transformer.

    Args:
        path: path of its `.xml`.
        threads: threads of a CPU; None: the machine's cores.
        device: device, as for `OpenvinoModel`.

    Raises:
        MissingDependency: openvino. InputError: `openvino-unreadable`, `runtime-not-here`.
    """

    def __init__(self, path: Path, threads: int | None = None, device: str | None = None) -> None:
        model = read(path)
        self.meta = noted(model)
        device = device or self.meta.get("quantkit.device", "CPU")
        self._request = compiled(model, path, threads or machine.cores(), device, 0).create_infer_request()
        self.names = [value.any_name for value in self._request.model_outputs]
        shapes = [value.partial_shape for value in model.inputs]
        sizes = [shape[0] for shape in shapes if shape.rank.is_static and shape.rank.get_length()]
        # samples in a run, if the graph has a fixed batch
        self.batch = next((int(size.get_length()) for size in sizes if size.is_static), None)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph and return its outputs by name. Raises InputError `shape-unsupported`."""
        try:
            self._request.infer(dict(feed))
        except RuntimeError as problem:
            rule = "the shapes that the file was written for"
            where, value = ", ".join(feed), first_line(problem)
            raise InputError("shape-unsupported", where, value, rule) from None
        return {name: np.array(self._request.get_output_tensor(n).data) for n, name in enumerate(self.names)}
