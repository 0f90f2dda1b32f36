"""A model in an engine: prompts, steps (`_tensorrt_step`), an encoder's texts, and what latency is measured on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtimes.generate import no_cache, too_long
from quantkit.runtimes.tensorrt.engine import Engine
from quantkit.runtimes.tensorrt.step import CACHE, EngineState, EngineStep, inputs
from quantkit.runtimes.torch import events

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


class EngineModel:
    """A model in an engine, as `runtimes.onnxruntime.session.OnnxModel` has it in a session.

    Args:
        engine: opened.

    Raises:
        InputError: `cache-grown`, a decoder whose cache is not written in place; `engine-of-graph`, one that does not
            take tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        if "input_ids" not in engine.inputs:
            raise InputError(
                "engine-of-graph",
                where=str(engine.file.path),
                value=f"an engine of {', '.join(engine.inputs)}",
                rule="this runtime gives tokens to decoders and encoders",
                remedy="run it with TensorRT's own tools; its network runs here: --runtime onnxruntime",
            )
        if self.decoder and "write_indices" not in engine.inputs:
            raise InputError(
                "cache-grown",
                where=str(engine.file.path),
                value="a cache that each step gives out anew",
                rule="this runtime writes into one in place",
                remedy="export with cache: in_place",
            )

    @property
    def decoder(self) -> bool:
        """Whether it has a cache and gives logits."""
        return any(name.startswith(CACHE) for name in self.engine.inputs)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the cache."""
        return self.engine.inputs["attention_mask"].shape[1]

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.engine.outputs["logits"].shape[-1]

    @property
    def notes(self) -> list[str]:
        """What a user has to know of the engine on this machine."""
        return self.engine.notes

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

    def state(self, batch: int, capacity: int) -> EngineState:
        """Room for `batch` sequences of up to `capacity` tokens; it is always as large as the engine's cache.

        Raises:
            InputError: `not-a-decoder`, `prompt-too-long`, `shape-unsupported`, `out-of-memory`.
        """
        import torch

        if not self.decoder:
            raise no_cache(str(self.engine.file.path))
        self._demand(capacity)
        self.engine.profile(batch, max(1, min(capacity, self._longest())))
        try:
            caches = {
                name: self.engine.tensor(name, (batch, *binding.shape[1:]))
                for name, binding in self.engine.inputs.items()
                if name.startswith(CACHE)
            }
        except torch.OutOfMemoryError as problem:
            raise InputError(
                "out-of-memory",
                where=f"batch {batch}",
                value=str(problem).split(".")[0],
                rule=f"a cache of {self.capacity} tokens a sequence fits",
                remedy="a smaller batch",
            ) from None
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
            raise too_long(str(self.engine.file.path), tokens, f"its cache holds {self.capacity}", remedy)

    def run(self, state: EngineState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state.

        Args:
            state: grows by the tokens.
            ids: [B, S]; rows that are shorter are padded on the left.
            mask: [B, S], 0 where ids are padding; None: nowhere.
            keep: how many positions from the end to give logits for; 0 is all.

        Returns:
            logits [B, S or keep, vocabulary], float32.

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
            raise too_long(str(self.engine.file.path), tokens, f"its profiles take {taken}", remedy)
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
        return lambda: events.seconds(step.replay, self.engine.device)

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
        return lambda: events.seconds(run, self.engine.device)

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
