"""Run a GGUF file in llama.cpp: prompts, and decode steps with the cache.

A state is a context of llama.cpp with a cache for every sequence. Its products round activations to 8 bits in blocks of
32 (256 for K types), unless a weight is in floats. The cache is float16, the default of llama.cpp's programs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes.generate import FileModel, too_long
from quantkit.runtimes.llama_cpp.library import Loaded

Array = NDArray[Any]
FOLDER, MODEL = "gguf", "model.gguf"
# tokens in one pass through the layers, llama.cpp's default
_UBATCH = 512
# names of the embedding table and the head; types in floats; bytes of one number of the cache
_TABLE, _HEAD, _FLOATS = "token_embd.weight", "output.weight", {"F32", "F16", "BF16"}
_CACHE_BYTES = 2.0


@dataclass
class LlamaState:
    """Caches of some sequences.

    Args:
        context: context of llama.cpp.
        capacity: tokens that fit into a sequence.
        lengths: tokens in every sequence.
    """

    model: LlamaModel
    context: Any
    capacity: int
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Free the context with this object."""
        weakref.finalize(self, self.model.loaded.api.llama_free, self.context)


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of attention, its cache and the output.

    Args:
        layers, heads, kv_heads, head_dim: numbers of layers, of query heads, of key-value heads, of features of a head.
        vocabulary: logits of a position.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


class LlamaModel(FileModel):
    """A model in llama.cpp.

    Args:
        folder: folder with `model.gguf`, or a file.
        threads: number of threads; None: the machine's cores.
        cache: type of keys and values: float16, llama.cpp's default, or float32.

    Raises:
        MissingDependency: llama-cpp-python. InputError: `gguf-unreadable`.
    """

    decoder = True

    def __init__(self, folder: Path, *, threads: int | None = None, cache: str = "float16") -> None:
        self.path = self.place = folder / MODEL if folder.is_dir() else folder
        self.threads, self.cache = threads or machine.cores(), cache
        self.loaded = Loaded(self.path)
        self.api = self.loaded.api
        room = ctypes.create_string_buffer(128)
        self.api.llama_model_desc(self.loaded.model, room, 128)
        # llama.cpp's name for the types of the file: `Q4_K - Medium`
        self.file_type = room.value.decode(errors="replace")
        self.vocabulary = self.features = int(self.api.llama_vocab_n_tokens(self.loaded.vocabulary))
        self.context = int(self.api.llama_model_n_ctx_train(self.loaded.model))
        self.weight_bytes = self.path.stat().st_size

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the runtime, for rows of measurements."""
        return {"threads": self.threads, "cache": self.cache, "file_type": self.file_type}

    @cached_property
    def sizes(self) -> AttentionSizes:
        """Sizes in the file's metadata."""
        api, model = self.api, self.loaded.model
        layers, heads = api.llama_model_n_layer(model), api.llama_model_n_head(model)
        stated = self.loaded.said(f"{self.loaded.said('general.architecture')}.attention.key_length")
        width = int(stated) if stated else api.llama_model_n_embd(model) // heads
        return AttentionSizes(layers, heads, api.llama_model_n_head_kv(model), width, self.vocabulary)

    def work(self) -> dict[str, Any]:
        """Return the figures of `runtimes.Session.work`. Raises MissingDependency: gguf."""
        return work_of_file(self.path, self.sizes)

    def state(self, batch: int, capacity: int) -> LlamaState:
        """Make room for `batch` sequences of up to `capacity` tokens.

        Raises:
            InputError: `prompt-too-long` beyond the context, `out-of-memory`.
        """
        self.demand_positions(capacity)
        settings = self.api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = batch * capacity, batch
        settings.n_batch = max(batch * min(capacity, 2048), 1)
        settings.n_ubatch = min(_UBATCH, settings.n_batch)
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.no_perf = True
        if self.cache == "float32":
            settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
        context = self.api.llama_init_from_model(self.loaded.model, settings)
        if not context:
            where, value = f"batch {batch}, {capacity} tokens", "llama.cpp makes no context of it"
            remedy = "use a smaller batch or a shorter context"
            raise InputError("out-of-memory", where=where, value=value, remedy=remedy)
        return LlamaState(self, context, capacity, [0] * batch)

    def run(self, state: LlamaState, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Feed tokens to the sequences of a state; arguments as in `OnnxModel.run`.

        Returns:
            logits [B, S or keep, vocabulary], float32; zeros where ids are padding.

        Raises:
            InputError: `prompt-too-long`.
        """
        rows, columns = ids.shape
        kept = min(keep or columns, columns)
        logits = np.zeros((rows, kept, self.vocabulary), np.float32)
        limit = max(1, min(state.capacity, 2048))
        for start in range(0, columns, limit):
            self._piece(state, ids, mask, range(start, min(start + limit, columns)), columns - kept, logits)
        return logits

    def _piece(
        self, state: LlamaState, ids: Array, mask: Array | None, places: range, first: int, logits: Array
    ) -> None:
        """Run some columns of all rows in one batch, and write the logits of columns from `first` on into `logits`."""
        tokens = [(row, place) for row in range(len(ids)) for place in places if mask is None or mask[row, place]]
        batch = self.api.llama_batch_init(max(len(tokens), 1), 0, 1)
        try:
            wanted = []
            for number, (row, place) in enumerate(tokens):
                if state.lengths[row] >= state.capacity:
                    raise too_long("cache", state.lengths[row] + 1, f"there is room for {state.capacity}")
                batch.token[number] = int(ids[row, place])
                batch.pos[number] = state.lengths[row]
                batch.n_seq_id[number] = 1
                batch.seq_id[number][0] = row
                batch.logits[number] = place >= first
                state.lengths[row] += 1
                if place >= first:
                    wanted.append((number, row, place))
            batch.n_tokens = len(tokens)
            if status := self.api.llama_decode(state.context, batch):
                value = f"llama_decode gave {status}"
                raise InputError("gguf-unreadable", str(self.path), value, "0 is fine")
            for number, row, place in wanted:
                computed = self.api.llama_get_logits_ith(state.context, number)
                logits[row, place - first] = np.ctypeslib.as_array(computed, (self.vocabulary,))
        finally:
            self.api.llama_batch_free(batch)

    def cut(self, state: LlamaState, length: int) -> None:
        """Drop the tokens after the first `length` of every sequence."""
        memory = self.api.llama_get_memory(state.context)
        for row in range(len(state.lengths)):
            if not self.api.llama_memory_seq_rm(memory, row, length, -1):
                raise InputError("not-cut", str(self.path), "llama.cpp cannot cut this cache back")
            state.lengths[row] = length

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Raise as `encode` does: no file here holds an encoder."""
        return self.encode(ids, mask)

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Raise InputError `not-an-encoder`: no file here holds an encoder."""
        raise InputError("not-an-encoder", str(self.path), "a decoder", "it gives logits")

    # --- steps for measuring latency ----------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """Prepare one decode step with `context` tokens in the cache, for repeated calls.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`.
        """
        state = self.state(batch, context + 1)
        generator = np.random.default_rng(0)
        if context:
            self.run(state, generator.integers(0, self.vocabulary, (batch, context)), keep=1)
        ids = generator.integers(0, self.vocabulary, (batch, 1))

        def step() -> None:
            self.cut(state, context)
            self.run(state, ids)

        return step

    def prefill(self, batch: int, tokens: int) -> Callable[[], None]:
        """Prepare a prefill of `tokens` for every sequence, up to the first logits, for repeated calls.

        Raises:
            InputError: `prompt-too-long`, `out-of-memory`.
        """
        state = self.state(batch, tokens)
        ids = np.random.default_rng(0).integers(0, self.vocabulary, (batch, tokens))

        def step() -> None:
            self.cut(state, 0)
            self.run(state, ids, keep=1)

        return step


def work_of_file(path: Path, sizes: AttentionSizes) -> dict[str, Any]:
    """Compute the bytes and operations of a step from the tensors of a GGUF file, without loading them.

    llama.cpp rounds the inputs of a product to 8 bits if the weight has codes, so such a file computes in integers;
    keys and values are kept in float16.

    Args:
        sizes: sizes of attention.

    Raises:
        MissingDependency: gguf.
    """
    with MissingDependency.unless_found("gguf", extra="gguf", purpose="measuring speed"):
        import gguf
    from quantkit.model.source.gguf import demand_lengths

    read: dict[str, float] = {}
    products: dict[str, int] = {}  # type of a matrix -> elements
    floats = set()
    for name, (shape, number) in demand_lengths(path).items():
        kind, elements = gguf.GGMLQuantizationType(number), math.prod(shape)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        read[name] = elements / block * size
        if len(shape) > 1:
            products[name] = elements
            floats |= {name} if kind.name in _FLOATS else set()
    if _HEAD in read:  # a table apart from the head: a token reads one row
        del read[_TABLE], products[_TABLE]
    head_flops = 2.0 * products.get(_HEAD, products.get(_TABLE, 0))
    inside = sum(elements for name, elements in products.items() if name not in (_HEAD, _TABLE))
    return {
        "weight_bytes": sum(read.values()),
        "kv_bytes_per_token": 2 * _CACHE_BYTES * sizes.layers * sizes.kv_heads * sizes.head_dim,
        "flops_per_token": 2.0 * inside,
        "attention_flops": 4.0 * sizes.layers * sizes.heads * sizes.head_dim,
        "head_flops": head_flops,
        "io_bytes_per_token": 4.0 * sizes.vocabulary,
        "float_bytes": sum(read[name] for name in floats & read.keys()),
        "float_head_flops": head_flops if floats & {_HEAD, _TABLE} & products.keys() else 0.0,
        "compute": "fp32" if products.keys() <= floats else "int8",
    }
