"""Run a bundle's `onnx/` in a session of ONNX Runtime: prompts, and decode steps with the cache in place.

The cache of a sequence is one buffer per layer, bound as past and as present: attention writes the new keys and values
to their final place, and nothing is copied.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import limits, machine
from quantkit.errors import InputError, reading
from quantkit.runtimes.generate import FileModel, no_cache, too_long
from quantkit.runtimes.onnxruntime.float_products import PROMPT_BYTES, ROWS, STEP_BYTES, WAYS, Way
from quantkit.runtimes.onnxruntime.open import open_graph, unreadable

if TYPE_CHECKING:
    import onnxruntime

Array = NDArray[Any]
FOLDER, MODEL = "onnx", "model.onnx"


@dataclass
class OnnxState:
    """Cache of some sequences.

    Args:
        batch: number of sequences.
        capacity: tokens that fit into a sequence.
        caches: input name -> buffer [B, H, capacity, D].
        mask: [B, capacity], 1 for a token, 0 for padding.
        length: filled columns, padding included.
        binding: binding with the caches; making it for every token would take a tenth of a small model's step.
        logits: buffer with the logits of the last run.
        keep: input that limits the logits; kept alive here, because a binding does not do so in every version.
    """

    batch: int
    capacity: int
    caches: Mapping[str, onnxruntime.OrtValue]
    mask: Array
    length: int = 0
    binding: onnxruntime.IOBinding | None = None
    logits: onnxruntime.OrtValue | None = None
    keep: onnxruntime.OrtValue | None = None


@dataclass(frozen=True)
class Used:
    """Profile of one run.

    Args:
        providers: execution provider -> number of nodes.
        seconds: operator -> (number of nodes, seconds).
        total: seconds of the whole run, by the profiler.
    """

    providers: Mapping[str, int]
    seconds: Mapping[str, tuple[int, float]]
    total: float

    @property
    def share(self) -> float:
        """Share of the run's time that operators take."""
        return sum(seconds for _, seconds in self.seconds.values()) / self.total if self.total else 0.0


class OnnxModel(FileModel):
    """A model in a session.

    Args:
        folder: folder with `model.onnx`.
        threads: threads of one operator; None: the machine's cores.
        profile: whether to write a profile; see `used`.
        accuracy_level: level of MatMulNBits instead of the file's; with 0 no input of a product is rounded.
        shown: values inside the graph that the session returns too.
        way: one way of a graph that multiplies in two; None with level 0 or `shown`: that of steps.
        own: whether to use quantkit's products; see `own_products`.

    Attributes:
        caches: names of the cache inputs, in order.
        decoder: whether it has a cache and returns logits.
        headed: whether it is an encoder with logits besides its last hidden states.
        ways: way -> bytes of weights that it reads, for a graph that multiplies in two ways; else empty.
        prompt_rows: rows from which on such a graph takes the way of prompts; else 0.
        vocabulary: logits of a position; 0 for an encoder.

    Raises:
        MissingDependency: onnxruntime.
        InputError: those of `open_graph`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        profile: bool = False,
        accuracy_level: int | None = None,
        shown: Sequence[str] = (),
        way: Way | None = None,
        own: bool = False,
    ) -> None:
        self.folder = self.place = folder
        self.threads = threads or machine.cores()
        # deleted with this object at the latest
        self._profile = (
            tempfile.TemporaryDirectory(prefix="quantkit-profile-", ignore_cleanup_errors=True) if profile else None
        )
        place = self._profile.name if self._profile else None
        self.session = open_graph(
            folder / MODEL, self.threads, profile=place, level=accuracy_level, shown=shown, way=way, own=own
        )
        # inputs with a default value, such as `logits_to_keep`, are listed separately
        values = (*self.session.get_inputs(), *self.session.get_overridable_initializers())
        self.inputs = {value.name: value for value in values}
        shapes = {value.name: value.shape for value in self.session.get_outputs()}
        self.outputs = list(shapes)
        self.meta = dict(self.session.get_modelmeta().custom_metadata_map)
        if own:  # only one way is left
            self.meta = {name: value for name, value in self.meta.items() if name not in (PROMPT_BYTES, ROWS)}
        self.caches = [name for name in self.inputs if name.startswith("past_key_values.")]
        self.decoder = bool(self.caches)
        self.headed = not self.decoder and len(self.outputs) > 1
        with self._reading():  # metadata may come from a stranger
            self.context = int(self.meta.get("quantkit.context", 0)) or (1 << 31)
            self.accuracy_level = int(self.meta.get("quantkit.accuracy_level", 0))
            self.prompt_rows = int(self.meta.get(ROWS, 0))
            read: dict[Way, str] = {"prompts": PROMPT_BYTES, "steps": STEP_BYTES}
            self.ways = {way: float(self.meta[read[way]]) for way in WAYS} if PROMPT_BYTES in self.meta else {}
            sizes = [self.inputs[name].shape for name in self.caches]
            self.cache_bytes = sum(4 * int(heads) * int(width) for _, heads, _, width in sizes)
            self.vocabulary = int(shapes["logits"][-1]) if self.decoder else 0

    def _reading(self) -> AbstractContextManager[None]:
        """Turn every exception of the library about the file into `onnx-unreadable`."""
        return reading(partial(unreadable, self.folder / MODEL))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the runtime, for rows of measurements."""
        return {"accuracy_level": self.accuracy_level, "threads": self.threads}

    @cached_property
    def features(self) -> int:  # type: ignore[override]
        """Size of the output at a position: logits, or an encoder's last hidden state."""
        return self.vocabulary or int(self.session.get_outputs()[0].shape[-1])

    @cached_property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """Size of the model's files in bytes."""
        return sum(path.stat().st_size for path in self.folder.glob(f"{MODEL}*"))

    def state(self, batch: int, capacity: int) -> OnnxState:
        """Make room for `batch` sequences of up to `capacity` tokens.

        Raises:
            InputError: `not-a-decoder`, `prompt-too-long` beyond the context, `out-of-memory` beyond the free memory.
        """
        import onnxruntime

        if not self.decoder:
            raise no_cache(str(self.folder))
        self.demand_positions(capacity)
        self.fits(batch, capacity, 1)
        caches = {}
        for name in self.caches:
            _, heads, _, size = self.inputs[name].shape
            empty = np.zeros((batch, int(heads), capacity, int(size)), np.float32)
            caches[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
        return OnnxState(batch, capacity, caches, np.zeros((batch, capacity), np.int64))

    def fits(self, batch: int, capacity: int, new: int) -> None:
        """Refuse a cache, logits and mask larger than the free memory. Raises InputError `out-of-memory`."""
        need = batch * capacity * self.cache_bytes + batch * new * (4 * self.vocabulary + 4 * capacity)
        self.demand_room(batch, capacity, need)

    def run(self, state: OnnxState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state.

        Args:
            state: state that the tokens are added to.
            ids: [B, S]; shorter rows are padded on the left.
            mask: [B, S], 0 for padding; None: no padding.
            keep: number of last positions whose logits are returned; 0 is all.

        Returns:
            logits [B, S or keep, vocabulary], float32.

        Raises:
            InputError: `prompt-too-long`.
        """
        before = state.length
        after = before + ids.shape[1]
        if after > state.capacity:
            raise too_long("cache", after, f"there is room for {state.capacity}")
        if before and ids.shape[1] > 1 and state.batch > 1:
            # attention takes several tokens at once only at the beginning, or for a single sequence
            columns = range(ids.shape[1])
            parts = [self.run(state, ids[:, [at]], None if mask is None else mask[:, [at]]) for at in columns]
            return np.concatenate(parts[-keep:], axis=1)
        state.mask[:, before:after] = 1 if mask is None else mask
        with self._reading():
            self.session.run_with_iobinding(self.bind(state, ids, after, keep))
        state.length = after
        assert state.logits is not None
        # copied: the next step overwrites the buffer
        return np.array(state.logits.numpy())

    def bind(self, state: OnnxState, ids: Array, after: int, keep: int = 0) -> onnxruntime.IOBinding:
        """Bind all inputs and outputs of one run; with the binding, the same step can be repeated."""
        import onnxruntime

        if state.binding is None:
            state.binding = self.session.io_binding()
            for name, cache in state.caches.items():
                state.binding.bind_ortvalue_input(name, cache)
                state.binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        binding = state.binding
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids, dtype=np.int64))
        binding.bind_cpu_input("attention_mask", np.ascontiguousarray(state.mask[:, :after]))
        kept = ids.shape[1]
        if "logits_to_keep" in self.inputs:
            # `bind_cpu_input` does not accept inputs with a default value
            state.keep = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([keep], np.int64))
            binding.bind_ortvalue_input("logits_to_keep", state.keep)
            kept = min(keep or kept, kept)
        shape = [state.batch, kept, self.vocabulary]
        if state.logits is None or state.logits.shape() != shape:
            state.logits = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cpu")
            binding.bind_ortvalue_output("logits", state.logits)
        return binding

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Return an encoder's last hidden states [B, S, width] for ids [B, S]."""
        with self._reading():
            return np.asarray(self.session.run(None, self.prompt(ids, mask))[0])

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Return the logits of an encoder's head for ids [B, S]: of texts [B, N], tokens [B, S, N], spans [B, S, 2]."""
        with self._reading():
            logits = self.session.run(self.outputs[1:], self.prompt(ids, mask))
            return np.asarray(logits[0] if len(logits) == 1 else np.stack(logits, axis=-1))

    def prompt(self, ids: Array, mask: Array | None = None) -> dict[str, Array]:
        """Return all inputs for ids [B, S]: the cache is empty, the token types are 0."""
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        for name in self.caches:
            _, heads, _, size = self.inputs[name].shape
            feeds[name] = np.zeros((ids.shape[0], int(heads), 0, int(size)), np.float32)
        if "logits_to_keep" in self.inputs:
            feeds["logits_to_keep"] = np.zeros(1, np.int64)
        feeds.update({name: np.zeros_like(ids) for name in self.inputs if name not in feeds})
        return feeds

    # --- steps for measuring latency ----------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """Prepare one decode step with `context` tokens in the cache, for repeated calls.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`.
        """
        state = self.state(batch, context + 1)
        generator = np.random.default_rng(0)
        for cache in state.caches.values():
            # random numbers for one sequence, repeated for all: making more takes time
            few = generator.standard_normal(cache.shape()[1:], np.float32)
            cache.update_inplace(np.ascontiguousarray(np.broadcast_to(few, cache.shape())))
        state.mask[:] = 1
        state.length = context
        ids = generator.integers(0, self.vocabulary, (batch, 1))
        return partial(self.session.run_with_iobinding, self.bind(state, ids, context + 1))

    def prefill(self, batch: int, tokens: int) -> Callable[[], None]:
        """Prepare a prefill of `tokens` a sequence, up to the first logits or all hidden states, for repeated calls.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`.
        """
        if not self.decoder:
            return self._whole(batch, tokens)
        state = self.state(batch, tokens)
        ids = np.random.default_rng(0).integers(0, self.vocabulary, (batch, tokens))
        state.mask[:] = 1
        return partial(self.session.run_with_iobinding, self.bind(state, ids, tokens, keep=1))

    def _whole(self, batch: int, tokens: int) -> Callable[[], None]:
        import onnxruntime

        self.demand_positions(tokens)
        config = json.loads(limits.read(self.folder / "config.json"))
        ids = np.random.default_rng(0).integers(0, int(config.get("vocab_size", 2)), (batch, tokens))
        binding = self.session.io_binding()
        for name, values in self.prompt(ids).items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        shape = [batch, tokens, self.features]
        hidden = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cpu")
        binding.bind_ortvalue_output(self.outputs[0], hidden)
        return partial(self.session.run_with_iobinding, binding)

    def used(self) -> Used:
        """Return the profile of the last run; this ends profiling.

        Raises:
            InputError: `not-profiled`.
        """
        if self._profile is None:
            raise InputError("not-profiled", str(self.folder), "loaded without `profile`")
        events = json.loads(Path(self.session.end_profiling()).read_text(encoding="utf-8"))
        self._profile.cleanup()
        self._profile = None
        runs = [event for event in events if event.get("name") == "model_run"]
        if not runs:
            raise InputError("not-profiled", str(self.folder), "no run since it was loaded")
        last = runs[-1]
        inside = [
            event
            for event in events
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= last["ts"]
        ]
        providers: dict[str, int] = {}
        seconds: dict[str, tuple[int, float]] = {}
        for event in inside:
            kind, provider = event["args"]["op_name"], event["args"].get("provider", "")
            providers[provider] = providers.get(provider, 0) + 1
            count, spent = seconds.get(kind, (0, 0.0))
            seconds[kind] = count + 1, spent + event["dur"] * 1e-6
        return Used(providers, seconds, last["dur"] * 1e-6)


class OnnxGraph:
    """A graph that is no transformer; raises as `open_graph`."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self._session = open_graph(path, threads or machine.cores())
        self._names = [value.name for value in self._session.get_outputs()]
        sizes = [value.shape[0] for value in self._session.get_inputs() if value.shape]
        # samples in a run, if the graph has a fixed batch
        self.batch = next((size for size in sizes if isinstance(size, int)), None)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph and return its outputs by name."""
        return dict(zip(self._names, self._session.run(None, feed), strict=True))
