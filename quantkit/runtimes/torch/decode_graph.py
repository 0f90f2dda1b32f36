"""Decode in torch with few kernel launches: one step of a batch is one CUDA graph.

The cache is transformers' static one: its tensors stay at their addresses, and its length is a tensor on the device, so
a graph that was captured once is right at every position. A sliding window is counted on the host, which a graph would
freeze: the steps of such a model are launched kernel by kernel, as they are on a CPU, in tests.

`attend_by_kernel` has decode steps attend with `kernels.attention`. Prompts keep torch's attention, and so does any
model whose attention is not transformers' `sdpa`.

Between its linears a step of transformers' classes is some 35 small kernels a layer (norms, rotary embedding, cache,
SwiGLU, sums). With `fuse`, torch.compile joins them to a few around the packed linears, each of which stays one
operator (`kernels.modules`); prefill is not compiled.

`TorchDecoder` is a `runtimes.generate.Decoder` for a checkpoint, by transformers' own classes and cache.

`seconds` and `captured` do what a GPU offers: time between two events on its stream, and a step as one graph.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.errors import InputError
from quantkit.kernels.workspace import one_graph
from quantkit.model.structure.kinds import positions
from quantkit.runtimes.generate import Array, too_long

if TYPE_CHECKING:
    from transformers import DynamicCache


# tokens of all prompts that are read at once: a long prompt of many sequences takes more memory than its cache
_AT_ONCE = 32768
# largest number of compiled variants, times the batches of a process
_LAYERS = 4096
# names in transformers of attention by the kernel, and of the one it stands for
ATTENTION, _TORCH = "quantkit", "sdpa"
_BY_NAME = re.compile(rf"_attn_implementation (?:==|!=|in|not in) .*{_TORCH}")


def attend_by_kernel(model: Any) -> str:
    """Let a model's decode steps attend with `kernels.attention`; return the reason if they do not, else "".

    The kernel takes one token of each sequence, with the boolean mask that transformers makes for a static cache or a
    padded batch. Everything else goes to torch's attention, as before.

    Args:
        model: model of transformers; its configuration is changed in place.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    kinds = {str(part.config._attn_implementation) for part in parts} - {ATTENTION}
    if kinds - {_TORCH}:
        return f"{type(model).__name__}: its attention is {', '.join(sorted(kinds - {_TORCH}))}"
    for part in parts:
        if _BY_NAME.search(inspect.getsource(sys.modules[type(part).__module__])):
            return f"{type(part).__name__}: its code asks whether attention is {_TORCH}"
    AttentionInterface.register(ATTENTION, partial(_attention, AttentionInterface()[_TORCH]))
    AttentionMaskInterface.register(ATTENTION, partial(_mask, AttentionMaskInterface()[_TORCH]))
    model.set_attn_implementation(ATTENTION)
    if others := [type(part).__name__ for part in parts if part.config._attn_implementation != ATTENTION]:
        model.set_attn_implementation(_TORCH)
        return f"{others[0]}: its attention cannot be replaced"
    return ""


def _mask(whole: Callable[..., torch.Tensor | None], q_length: int, **words: Any) -> torch.Tensor | None:
    """Make the mask of transformers' `sdpa`, which is `whole`; that of a step once for all layers."""
    from quantkit.kernels.attention import kept

    mask = whole(q_length=q_length, **words)
    return mask if mask is None or q_length > 1 else kept(mask)


def _attention(
    whole: Callable[..., tuple[torch.Tensor, None]],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **words: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the kernel where it fits, else by `whole`, transformers' `sdpa`."""
    from quantkit.kernels.attention import attend, fits

    scale = words.get("scaling") or query.shape[-1] ** -0.5
    others = any(words.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if others or words.get("dropout") or not fits(query, key, value, attention_mask):
        return whole(module, query, key, value, attention_mask, **words)
    assert attention_mask is not None
    return attend(query, key, value, attention_mask, scale), None


class DecodeGraph:
    """Steps of B sequences that are decoded together.

    Args:
        model: decoder of transformers, on its device.
        batch: B.
        length: tokens that the cache holds, prompt included.
        fuse: backend of torch.compile that joins the kernels of a step: `inductor`; "": none.
    """

    def __init__(self, model: Any, batch: int, length: int, *, fuse: str = "") -> None:
        from transformers import StaticCache

        self.model, self.length, self.taken = model, length, 0
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self._step = torch.compile(model, backend=fuse, dynamic=False) if fuse else model
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    @property
    def graphed(self) -> bool:
        """True if a step is one CUDA graph."""
        return self.ids.is_cuda and not self._sliding

    @property
    def _sliding(self) -> bool:
        return any(layer.is_sliding for layer in self.cache.layers)

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Read prompts of equal length, [B, T], into an empty cache; returns the logits [B, V] after them.

        Raises:
            InputError: `context-full`.
        """
        self._demand(ids.shape[1])
        self.cache.reset()
        self.taken = ids.shape[1]
        parts = ids.split(self.taken if self._sliding else max(1, _AT_ONCE // len(ids)), dim=1)
        return [self._forward(part, self.model) for part in parts][-1]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed one more token of every sequence, ids [B]; returns logits [B, V], which the next step overwrites.

        Raises:
            InputError: `context-full`.
        """
        self._demand(self.taken + 1)
        self.taken += 1
        self.ids.copy_(ids[:, None])
        if not self.graphed:
            return self._decode()
        with torch.cuda.device_of(self.ids):
            if self._graph is None:
                lengths = [layer.cumulative_length.clone() for layer in self.cache.layers]
                self._graph = captured(self._note, lambda: self._restore(lengths))
            assert self._logits is not None
            self._graph.replay()
        return self._logits

    def rewind(self, tokens: int) -> None:
        """Drop all but the first `tokens`; a captured graph stays valid."""
        self.taken = tokens
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(tokens)

    def _note(self) -> None:
        """Run the step to be captured; replays overwrite its logits in place."""
        self._logits = self._decode()

    def _restore(self, lengths: list[torch.Tensor]) -> None:
        for layer, length in zip(self.cache.layers, lengths, strict=True):
            layer.cumulative_length.copy_(length)

    def _decode(self) -> torch.Tensor:
        if self._step is self.model:
            return self._forward(self.ids, self.model)
        # the index of a layer in the cache is a constant of its code, so every layer is compiled separately
        with torch._dynamo.config.patch(recompile_limit=_LAYERS, accumulated_recompile_limit=_LAYERS):
            return self._forward(self.ids, self._step)

    def _forward(self, ids: torch.Tensor, model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            ).logits
        return logits[:, -1]

    def _demand(self, tokens: int) -> None:
        if tokens > self.length:
            value, rule = f"{tokens} tokens", f"the cache holds {self.length}"
            raise InputError("context-full", "decoding", value, rule, "a larger length")


class TorchDecoder:
    """Decoder of `runtimes.generate` for a transformers model.

    Args:
        model: decoder of transformers, on its device.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.context = positions(model.config.to_dict()) or 1 << 30

    def state(self, batch: int, capacity: int) -> DynamicCache:
        """Make a growing cache; the first tokens set its batch. Raises InputError `prompt-too-long`."""
        from transformers import DynamicCache

        if capacity > self.context:
            remedy = "shorten the prompt, or ask for fewer new tokens"
            raise too_long("--prompt", capacity, f"the context holds {self.context}", remedy)
        return DynamicCache(config=self.model.config)

    def run(self, state: DynamicCache, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Return logits [B, S or keep, V], float32, of tokens [B, S], which continue the sequences of a state."""
        assert mask is None, "prompts are of one length"
        with torch.no_grad():
            output = self.model(
                input_ids=torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.model.device),
                past_key_values=state,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: Array = output.logits.float().cpu().numpy()
        return logits


def seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Run once and return the seconds on the GPU; None on other devices, where the caller has a clock."""
    if device.type != "cuda":
        run()
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(run: Callable[[], object], undo: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    """Capture a step as one CUDA graph; `undo` reverts the runs before it, for compiling and warm-up."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside), one_graph():
        for _ in range(2):
            run()
            undo()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), one_graph():
        run()
    return graph
