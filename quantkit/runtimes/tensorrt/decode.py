"""A model in an engine: prompts, steps, an encoder's texts, and what latency is measured on; and a graph in one."""

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
    """A model in an engine, as `runtimes.onnxruntime.session.OnnxModel` has it in a session.

    Args:
        engine: opened.

    Raises:
        InputError: `cache-grown`, a decoder whose cache is not written in place; `engine-of-graph`, one that does not
            take tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.place, self.notes = engine, engine.file.path, engine.notes
        # it has a cache and gives logits
        self.decoder = any(name.startswith(CACHE) for name in engine.inputs)
        if "input_ids" not in engine.inputs:
            value = f"an engine of {', '.join(engine.inputs)}"
            rule = "this runtime gives tokens to decoders and encoders"
            remedy = "run it with TensorRT's own tools; its network runs here: --runtime onnxruntime"
            raise InputError("engine-of-graph", str(self.place), value, rule, remedy)
        if self.decoder and "write_indices" not in engine.inputs:
            value, rule = "a cache that each step gives out anew", "this runtime writes into one in place"
            remedy = "export with cache: in_place"
            raise InputError("cache-grown", str(self.place), value, rule, remedy)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the cache."""
        return self.engine.inputs["attention_mask"].shape[1]

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.engine.outputs["logits"].shape[-1]

    @property
    def settings(self) -> dict[str, str | bool | int | float | None]:
        """For rows."""
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
        """The GPU, for rows."""
        return machine.gpu(self.engine.file.gpu)

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Of an encoder with a head alone, which no engine has. Raises InputError `not-an-encoder`."""
        raise InputError("not-an-encoder", str(self.place), "no head", "it gives states")

    def state(self, batch: int, capacity: int) -> EngineState:
        """Room for `batch` sequences of up to `capacity` tokens; it is always as large as the engine's cache.

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
        """Tokens that a pass of `batch` sequences takes, `most` at most."""
        return self.engine.profile(batch, most)[1]

    def _longest(self) -> int:
        engine = self.engine.engine
        return max(self.engine.range(number, "input_ids")[1][1] for number in range(engine.num_optimization_profiles))

    def _demand(self, tokens: int) -> None:
        if tokens > self.capacity:
            remedy = "shorten the prompt, ask for fewer new tokens, or export with a larger `capacity`"
            raise too_long(str(self.place), tokens, f"its cache holds {self.capacity}", remedy)

    def run(self, state: EngineState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state; see `OnnxModel.run`.

        Raises:
            InputError: `prompt-too-long`, `shape-unsupported`.
        """
        self._demand(state.length + ids.shape[1])
        given = np.ones_like(ids) if mask is None else mask
        parts, done = [], 0
        while done < ids.shape[1]:
            left = ids.shape[1] - done
            taken = 1 if left == 1 else self.engine.profile(state.batch, left)[1]
            place = slice(done, done + taken)
            # logits of a part that lies before all that are kept are not wanted; the least is one
            wanted = min(taken, max(1, keep - (left - taken))) if keep else 0
            logits = self._feed(state, ids[:, place], given[:, place], wanted)
            if not keep or keep > left - taken:
                parts.append(logits)
            done += taken
        return np.concatenate(parts, axis=1)

    def _feed(self, state: EngineState, ids: Array, mask: Array, keep: int) -> Array:
        import torch

        device = state.mask.device
        tokens, given = (
            torch.from_numpy(np.ascontiguousarray(each, dtype=np.int64)).to(device) for each in (ids, mask)
        )
        before, new = state.length, ids.shape[1]
        state.mask[:, before : before + new] = given.to(state.mask.dtype)
        places = given.cumsum(dim=1) + state.real[:, None]
        state.real += given.sum(dim=1)
        state.length += new
        if new == 1:
            if state.step is None:
                state.step = EngineStep(self.engine, state)
            logits = state.step(tokens, (places - 1).clamp(min=0), before)
        else:
            number, _ = self.engine.profile(state.batch, new)
            feed = inputs(self.engine, state, tokens, (places - 1).clamp(min=0), before, keep)
            logits = self.engine.run(number, feed)["logits"]
        # a copy: the next step writes to the same place
        return np.array(logits.float().cpu().numpy())

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """An encoder's last hidden states [B, S, width], float32, for ids [B, S]."""
        import torch

        number = self._profile(*ids.shape)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        feed = {}
        for name in self.engine.inputs:
            feed[name] = self.engine.tensor(name, ids.shape)
            if name in values:
                feed[name].copy_(torch.from_numpy(np.ascontiguousarray(values[name])))
        found = self.engine.run(number, feed)
        return np.asarray(next(iter(found.values())).float().cpu().numpy())

    def _profile(self, batch: int, tokens: int) -> int:
        """The profile that takes so many tokens at once. Raises InputError `prompt-too-long`, `shape-unsupported`."""
        number, taken = self.engine.profile(batch, tokens)
        if taken < tokens:
            remedy = "shorten the text, or longer `profiles` in the target"
            raise too_long(str(self.place), tokens, f"its profiles take {taken}", remedy)
        return number

    def _texts(self, batch: int, tokens: int) -> dict[str, torch.Tensor]:
        """Inputs of an encoder: texts of zeros, all of them real."""
        feed = {name: self.engine.tensor(name, (batch, tokens)) for name in self.engine.inputs}
        feed["attention_mask"].fill_(1)
        return feed

    # --- what latency is measured on ----------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> Callable[[], float | None]:
        """One decode step with `context` tokens in the cache, ready to be repeated: seconds by the device's clock.

        Raises:
            InputError: `prompt-too-long`, `shape-unsupported`, `out-of-memory`.
        """
        step = self._ready(batch, context)
        return lambda: decode_graph.seconds(step.replay, self.engine.device)

    def launches(self, batch: int, context: int) -> Callable[[], None]:
        """What such a step enqueues, for a graph that somebody else captures."""
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
        """A prompt of `tokens` for each sequence up to the first logits, or all hidden states.

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
            found = self.engine.bind(context, feed)
            self.engine.enqueue(context)
            held.update(found)

        held: dict[str, torch.Tensor] = {}
        run()
        self.engine.keep_kernels()
        return lambda: decode_graph.seconds(run, self.engine.device)

    def layer_times(self, batch: int, context: int, runs: int = 20) -> dict[str, list[float]]:
        """Layer -> seconds in each of some decode steps (of an encoder: passes over `context` tokens)."""
        import torch

        if not self.decoder:
            return self.engine.layer_times(self.engine.profile(batch, context)[0], self._texts(batch, context), runs)
        state = self._filled(batch, context)
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=state.mask.device)
        feed = inputs(self.engine, state, tokens, torch.full_like(tokens, context), context, 0)
        return self.engine.layer_times(self.engine.profile(batch, 1)[0], feed, runs)

    def _filled(self, batch: int, tokens: int) -> EngineState:
        """A state with so many tokens in its cache, as if they were real."""
        import torch

        state = self.state(batch, tokens)
        generator = torch.Generator().manual_seed(0)
        for cache in state.caches.values():
            # one sequence's worth: making it is not what is timed
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
        batch: how many.
        capacity: columns of the cache.
        caches: input -> buffer [B, H, capacity, D].
        mask: [B, capacity], 1 where a token is.
        real: [B], tokens so far, padding left out.
        length: columns that are filled.
        step: a step of this state, once there was one.
    """

    batch: int
    capacity: int
    caches: dict[str, torch.Tensor]
    mask: torch.Tensor
    real: torch.Tensor
    length: int = 0
    step: EngineStep | None = field(default=None, repr=False)


class EngineStep:
    """One token more of each sequence of a state, [B, 1]: captured when it first runs, on a GPU.

    The cache is one buffer a layer, bound as past and as present: the engine writes new keys and values at
    `write_indices`, and nothing is copied or moved. So every step finds its tensors where the last one did, and what
    was captured once is right at every position: ids, positions, mask and place are written into the same tensors.
    """

    def __init__(self, engine: Engine, state: EngineState) -> None:
        import torch

        self.engine = engine
        number, _ = engine.profile(state.batch, 1)
        # of its own: a graph is of the shapes and addresses that its context had when it was captured
        self._context = engine.new_context(number)
        empty = torch.zeros(state.batch, 1, dtype=torch.long, device=state.mask.device)
        self._inputs = inputs(engine, state, empty, empty, 0, 0)
        self._outputs: dict[str, torch.Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, before: int) -> torch.Tensor:
        """Logits [B, 1, V]; the next step overwrites them."""
        self._inputs["input_ids"].copy_(tokens)
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].copy_(positions)
        self._inputs["write_indices"].fill_(before)
        self.replay()
        self.engine.wait()
        return self._outputs["logits"]

    def replay(self) -> None:
        """The same step once more."""
        if self.engine.device.type != "cuda":
            self.enqueue()
            return
        if self._graph is None:  # what warms up writes what the step that follows writes to the same place
            self._graph = decode_graph.captured(self.enqueue)
        self._graph.replay()

    def enqueue(self) -> None:
        """The same step, launched one by one."""
        if not self._outputs:
            self._outputs = self.engine.bind(self._context, self._inputs)
        self.engine.enqueue(self._context)


def inputs(
    engine: Engine, state: EngineState, tokens: torch.Tensor, positions: torch.Tensor, before: int, keep: int
) -> dict[str, torch.Tensor]:
    """Everything that goes in, each in the type that the engine has it in.

    Args:
        state: whose cache and mask they are.
        tokens, positions: [B, S].
        before: columns of the cache that are filled.
        keep: how many positions from the end to give logits for; 0 is all.
    """
    made = {name: engine.tensor(name, tuple(tokens.shape)) for name in ("input_ids", "position_ids")}
    made["input_ids"].copy_(tokens)
    made["position_ids"].copy_(positions)
    made["write_indices"] = engine.tensor("write_indices", (state.batch,)).fill_(before)
    if "logits_to_keep" in engine.inputs:
        made["logits_to_keep"] = engine.tensor("logits_to_keep", (1,)).fill_(keep)
    made |= {"attention_mask": state.mask, **state.caches}
    return {name: tensor for name, tensor in made.items() if name in engine.inputs}


class LoadedGraph:
    """A network of images, or any other graph, in an engine.

    Args:
        engine: opened; of its profiles the first is run.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Output -> values, float32. Raises InputError `shape-unsupported`, `engine-failed`."""
        found = self.engine.run(0, self._given(feed))
        return {name: np.array(value.float().cpu().numpy()) for name, value in found.items()}

    def repeated(self, feed: Mapping[str, Array]) -> Callable[[], float | None]:
        """The same run, ready to be repeated: seconds by the device's clock; None where it has none."""
        context, given = self.engine.context(0), self._given(feed)
        held = self.engine.bind(context, given)

        def run() -> None:
            assert held and given  # bound by address alone: they have to live as long as this
            self.engine.enqueue(context)

        return lambda: decode_graph.seconds(run, self.engine.device)

    def _given(self, feed: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        import torch

        found = {}
        for name in self.engine.inputs:
            found[name] = self.engine.tensor(name, feed[name].shape)
            found[name].copy_(torch.from_numpy(np.ascontiguousarray(feed[name])))
        return found
