"""Run a model in an engine: prompts, decode steps, an encoder's texts, and steps for measuring latency; or a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.runtimes.generate import FileModel, no_cache, too_long
from quantkit.runtimes.tensorrt.engine import Engine
from quantkit.runtimes.torch import decode_graph

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


class EngineModel(FileModel):
    """A model in an engine, with the interface of `runtimes.onnxruntime.session.OnnxModel`.

    Args:
        engine: open engine.

    Raises:
        InputError: `cache-grown`, a decoder whose cache is not written in place; `engine-of-graph`, one without tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.place, self.notes = engine, engine.file.path, engine.notes
        # a decoder has a cache and returns logits
        self.decoder = any(name.startswith(CACHE) for name in engine.inputs)
        if "input_ids" not in engine.inputs:
            value = f"an engine of {', '.join(engine.inputs)}"
            rule = "this runtime gives tokens to decoders and encoders"
            remedy = "run it with TensorRT's own tools; its network runs here: --runtime onnxruntime"
            raise InputError("engine-of-graph", str(self.place), value, rule, remedy)
        if self.decoder and "write_indices" not in engine.inputs:
            value, rule = "a cache that each step returns as a new tensor", "this runtime updates its cache in place"
            remedy = "export with cache: in_place"
            raise InputError("cache-grown", str(self.place), value, rule, remedy)

    @property
    def capacity(self) -> int:
        """Size of the cache in tokens."""
        return self.engine.inputs["attention_mask"].shape[1]

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.engine.outputs["logits"].shape[-1]

    @property
    def settings(self) -> dict[str, str | bool | int | float | None]:
        """Settings of the runtime, for rows of measurements."""
        file, library = self.engine.file, self.engine.library
        kind = self.engine.outputs["logits"].type if self.decoder else next(iter(self.engine.outputs.values())).type
        return {
            "dtype": kind,
            "library": f"{library.name} {library.version}",
            "sm": file.sm,
            "driver": file.driver,
            "built_driver": file.described.driver or None,
            "graphs": self.decoder and self.engine.device.type == "cuda",
        }

    @property
    def where(self) -> dict[str, str]:
        """Name of the GPU, for rows of measurements."""
        return machine.gpu(self.engine.file.gpu)

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Raise InputError `not-an-encoder`: no engine holds an encoder with a head."""
        raise InputError("not-an-encoder", str(self.place), "no head", "it gives states")

    def state(self, batch: int, capacity: int) -> EngineState:
        """Make room for `batch` sequences of up to `capacity` tokens; the cache always has the engine's size.

        Raises:
            InputError: `not-a-decoder`, `prompt-too-long`, `shape-unsupported`, `out-of-memory`.
        """
        import torch

        if not self.decoder:
            raise no_cache(str(self.place))
        self._demand(capacity)
        self.engine.profile(batch, max(1, min(capacity, self._longest())))
        try:
            caches = {
                name: self.engine.tensor(name, (batch, *binding.shape[1:]))
                for name, binding in self.engine.inputs.items()
                if name.startswith(CACHE)
            }
        except torch.OutOfMemoryError as problem:
            value, rule = str(problem).split(".")[0], f"a cache of {self.capacity} tokens a sequence fits"
            remedy = "a smaller batch"
            raise InputError("out-of-memory", f"batch {batch}", value, rule, remedy) from None
        mask = self.engine.tensor("attention_mask", (batch, self.capacity))
        return EngineState(batch, self.capacity, caches, mask, torch.zeros(batch, dtype=torch.long, device=mask.device))

    def longest(self, batch: int, most: int) -> int:
        """Return the tokens in one pass of `batch` sequences, at most `most`."""
        return self.engine.profile(batch, most)[1]

    def _longest(self) -> int:
        engine = self.engine.engine
        return max(self.engine.range(number, "input_ids")[1][1] for number in range(engine.num_optimization_profiles))

    def _demand(self, tokens: int) -> None:
        if tokens > self.capacity:
            remedy = "shorten the prompt, ask for fewer new tokens, or export with a larger `capacity`"
            raise too_long(str(self.place), tokens, f"its cache holds {self.capacity}", remedy)

    def run(self, state: EngineState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state; arguments as in `OnnxModel.run`.

        Raises:
            InputError: `prompt-too-long`, `shape-unsupported`.
        """
        self._demand(state.length + ids.shape[1])
        real = np.ones_like(ids) if mask is None else mask
        parts, done = [], 0
        while done < ids.shape[1]:
            left = ids.shape[1] - done
            taken = 1 if left == 1 else self.engine.profile(state.batch, left)[1]
            place = slice(done, done + taken)
            # a part before the kept positions needs no logits; the engine returns at least one
            wanted = min(taken, max(1, keep - (left - taken))) if keep else 0
            logits = self._feed(state, ids[:, place], real[:, place], wanted)
            if not keep or keep > left - taken:
                parts.append(logits)
            done += taken
        return np.concatenate(parts, axis=1)

    def _feed(self, state: EngineState, ids: Array, mask: Array, keep: int) -> Array:
        import torch

        device = state.mask.device
        tokens, real = (
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device) for array in (ids, mask)
        )
        before, new = state.length, ids.shape[1]
        state.mask[:, before : before + new] = real.to(state.mask.dtype)
        places = real.cumsum(dim=1) + state.real[:, None]
        state.real += real.sum(dim=1)
        state.length += new
        if new == 1:
            if state.step is None:
                state.step = EngineStep(self.engine, state)
            logits = state.step(tokens, (places - 1).clamp(min=0), before)
        else:
            number, _ = self.engine.profile(state.batch, new)
            feed = inputs(self.engine, state, tokens, (places - 1).clamp(min=0), before, keep)
            logits = self.engine.run(number, feed)["logits"]
        # copied: the next step overwrites the buffer
        return np.array(logits.float().cpu().numpy())

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Return an encoder's last hidden states [B, S, width], float32, for ids [B, S]."""
        import torch

        number = self._profile(*ids.shape)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        feed = {}
        for name in self.engine.inputs:
            feed[name] = self.engine.tensor(name, ids.shape)
            if name in values:
                feed[name].copy_(torch.from_numpy(np.ascontiguousarray(values[name])))
        outputs = self.engine.run(number, feed)
        return np.asarray(next(iter(outputs.values())).float().cpu().numpy())

    def _profile(self, batch: int, tokens: int) -> int:
        """Return the profile for so many tokens at once. Raises InputError `prompt-too-long`, `shape-unsupported`."""
        number, taken = self.engine.profile(batch, tokens)
        if taken < tokens:
            remedy = "shorten the text, or longer `profiles` in the target"
            raise too_long(str(self.place), tokens, f"its profiles take {taken}", remedy)
        return number

    def _texts(self, batch: int, tokens: int) -> dict[str, torch.Tensor]:
        """Make inputs of an encoder: texts of zeros without padding."""
        feed = {name: self.engine.tensor(name, (batch, tokens)) for name in self.engine.inputs}
        feed["attention_mask"].fill_(1)
        return feed

    # --- steps for measuring latency ----------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> Callable[[], float | None]:
        """Prepare one decode step with `context` tokens in the cache; a call returns its seconds by the device's clock.

        Raises:
            InputError: `prompt-too-long`, `shape-unsupported`, `out-of-memory`.
        """
        step = self._ready(batch, context)
        return lambda: decode_graph.seconds(step.replay, self.engine.device)

    def launches(self, batch: int, context: int) -> Callable[[], None]:
        """Prepare the launches of such a step, for a caller that captures them as a graph."""
        return self._ready(batch, context).enqueue

    def _ready(self, batch: int, context: int) -> EngineStep:
        import torch

        self._demand(context + 1)
        state = self._filled(batch, context)
        step = EngineStep(self.engine, state)
        tokens = torch.arange(batch, device=state.mask.device)[:, None] % self.vocabulary
        step(tokens, torch.full_like(tokens, context), context)
        self.engine.keep_kernels()
        return step

    def prefill(self, batch: int, tokens: int) -> Callable[[], float | None]:
        """Prepare a prefill of `tokens` for every sequence, up to the first logits or all hidden states.

        Raises:
            InputError: `prompt-too-long`, `shape-unsupported`, `out-of-memory`.
        """
        import torch

        number = self._profile(batch, tokens)
        if self.decoder:
            state = self._filled(batch, tokens)
            ids = torch.arange(tokens, device=state.mask.device).repeat(batch, 1)
            feed = inputs(self.engine, state, ids % self.vocabulary, ids, 0, 1)
        else:
            feed = self._texts(batch, tokens)
        context = self.engine.context(number)

        def run() -> None:
            outputs = self.engine.bind(context, feed)
            self.engine.enqueue(context)
            held.update(outputs)

        held: dict[str, torch.Tensor] = {}
        run()
        self.engine.keep_kernels()
        return lambda: decode_graph.seconds(run, self.engine.device)

    def layer_times(self, batch: int, context: int, runs: int = 20) -> dict[str, list[float]]:
        """Map every layer to its seconds in some decode steps (for an encoder: passes over `context` tokens)."""
        import torch

        if not self.decoder:
            return self.engine.layer_times(self.engine.profile(batch, context)[0], self._texts(batch, context), runs)
        state = self._filled(batch, context)
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=state.mask.device)
        feed = inputs(self.engine, state, tokens, torch.full_like(tokens, context), context, 0)
        return self.engine.layer_times(self.engine.profile(batch, 1)[0], feed, runs)

    def _filled(self, batch: int, tokens: int) -> EngineState:
        """Make a state with this number of tokens in its cache."""
        import torch

        state = self.state(batch, tokens)
        generator = torch.Generator().manual_seed(0)
        for cache in state.caches.values():
            # numbers for one sequence, repeated for all: making more takes time
            cache[:] = torch.randn(cache.shape[1:], generator=generator).to(cache.dtype)
        state.mask[:, : tokens + 1] = 1
        state.real.fill_(tokens)
        state.length = tokens
        return state


CACHE = "past_key_values."


@dataclass
class EngineState:
    """Some sequences.

    Args:
        batch: number of sequences.
        capacity: columns of the cache.
        caches: input -> buffer [B, H, capacity, D].
        mask: [B, capacity], 1 for a token, 0 for padding.
        real: [B], tokens so far without padding.
        length: filled columns.
        step: prepared step of this state, once it exists.
    """

    batch: int
    capacity: int
    caches: dict[str, torch.Tensor]
    mask: torch.Tensor
    real: torch.Tensor
    length: int = 0
    step: EngineStep | None = field(default=None, repr=False)


class EngineStep:
    """One more token of every sequence of a state, [B, 1]; captured as a graph at its first run on a GPU.

    The cache is one buffer a layer, bound as past and as present: the engine writes new keys and values at
    `write_indices`, and nothing is copied or moved. So every step has its tensors at the same addresses, and a graph
    that was captured once is right at every position: ids, positions, mask and place are written into the same tensors.
    """

    def __init__(self, engine: Engine, state: EngineState) -> None:
        import torch

        self.engine = engine
        number, _ = engine.profile(state.batch, 1)
        # a separate context: a graph holds the shapes and addresses of its context at the capture
        self._context = engine.new_context(number)
        empty = torch.zeros(state.batch, 1, dtype=torch.long, device=state.mask.device)
        self._inputs = inputs(engine, state, empty, empty, 0, 0)
        self._outputs: dict[str, torch.Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, before: int) -> torch.Tensor:
        """Run the step and return logits [B, 1, V], which the next step overwrites."""
        self._inputs["input_ids"].copy_(tokens)
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].copy_(positions)
        self._inputs["write_indices"].fill_(before)
        self.replay()
        self.engine.wait()
        return self._outputs["logits"]

    def replay(self) -> None:
        """Run the same step once more."""
        if self.engine.device.type != "cuda":
            self.enqueue()
            return
        if self._graph is None:  # warming up is harmless: the step then writes the same values
            self._graph = decode_graph.captured(self.enqueue)
        self._graph.replay()

    def enqueue(self) -> None:
        """Launch the same step without a graph."""
        if not self._outputs:
            self._outputs = self.engine.bind(self._context, self._inputs)
        self.engine.enqueue(self._context)


def inputs(
    engine: Engine, state: EngineState, tokens: torch.Tensor, positions: torch.Tensor, before: int, keep: int
) -> dict[str, torch.Tensor]:
    """Return all inputs of a run, in the types of the engine.

    Args:
        state: state with the cache and the mask.
        tokens, positions: [B, S].
        before: filled columns of the cache.
        keep: number of last positions whose logits are returned; 0 is all.
    """
    feed = {name: engine.tensor(name, tuple(tokens.shape)) for name in ("input_ids", "position_ids")}
    feed["input_ids"].copy_(tokens)
    feed["position_ids"].copy_(positions)
    feed["write_indices"] = engine.tensor("write_indices", (state.batch,)).fill_(before)
    if "logits_to_keep" in engine.inputs:
        feed["logits_to_keep"] = engine.tensor("logits_to_keep", (1,)).fill_(keep)
    feed |= {"attention_mask": state.mask, **state.caches}
    return {name: tensor for name, tensor in feed.items() if name in engine.inputs}


class LoadedGraph:
    """A network, or any other graph, in an engine.

    Args:
        engine: open engine; its first profile is run.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph and return its outputs in float32. Raises InputError `shape-unsupported`, `engine-failed`."""
        outputs = self.engine.run(0, self._given(feed))
        return {name: np.array(value.float().cpu().numpy()) for name, value in outputs.items()}

    def repeated(self, feed: Mapping[str, Array]) -> Callable[[], float | None]:
        """Prepare the same run for repeated calls: seconds by the device's clock, or None if it has none."""
        context, inputs = self.engine.context(0), self._given(feed)
        held = self.engine.bind(context, inputs)

        def run() -> None:
            assert held and inputs  # bound by address: they must live as long as this function
            self.engine.enqueue(context)

        return lambda: decode_graph.seconds(run, self.engine.device)

    def _given(self, feed: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        import torch

        tensors = {}
        for name in self.engine.inputs:
            tensors[name] = self.engine.tensor(name, feed[name].shape)
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(feed[name])))
        return tensors
