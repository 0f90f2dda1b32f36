"""Decoding in torch with as few launches as there can be: one step of a batch is one CUDA graph.

The cache is transformers' static one: its tensors stay where they are, and its length is itself a tensor on the device,
so that a graph that was captured once is right at every position. A sliding window is counted on the host, which a
graph would freeze: such a model's steps are launched one by one. So are those on a CPU, for tests.

Between its linears a step of transformers' classes is some 35 small kernels a layer (norms, rotary embedding, cache,
SwiGLU, sums). `fuse` has torch.compile make a few of them; packed linears are left out of what it sees
(`kernels.linear`), and prompts stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from quantkit.errors import InputError
from quantkit.runtimes.torch import events

# at most, times the batches of a process
_LAYERS = 4096


class DecodeGraph:
    """Steps of B sequences that are decoded together.

    Args:
        model: a decoder of transformers, on its device.
        batch: B.
        length: tokens that the cache holds, prompt and all.
        fuse: what torch.compile joins kernels of a step with: its backend `inductor`; "": nothing does.
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
        """Whether steps are one graph."""
        return self.ids.is_cuda and not any(layer.is_sliding for layer in self.cache.layers)

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Read prompts of equal length, [B, T]; begins anew. Logits [B, V] after them.

        Raises:
            InputError: `context-full`.
        """
        self._demand(ids.shape[1])
        self.cache.reset()
        self.taken = ids.shape[1]
        return self._forward(ids, self.model)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after one token more of each sequence, ids [B]; the next step overwrites them.

        Raises:
            InputError: `context-full`.
        """
        self._demand(self.taken + 1)
        self.taken += 1
        self.ids.copy_(ids[:, None])
        if not self.graphed:
            return self._decode()
        if self._graph is None:
            lengths = [layer.cumulative_length.clone() for layer in self.cache.layers]
            self._graph = events.captured(self._note, lambda: self._restore(lengths))
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    def rewind(self, tokens: int) -> None:
        """Forget all but the first `tokens`; where the graph was captured does not matter."""
        self.taken = tokens
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(tokens)

    def _note(self) -> None:
        """The step that is captured: where its logits are is what replays overwrite."""
        self._logits = self._decode()

    def _restore(self, lengths: list[torch.Tensor]) -> None:
        for layer, length in zip(self.cache.layers, lengths, strict=True):
            layer.cumulative_length.copy_(length)

    def _decode(self) -> torch.Tensor:
        if self._step is self.model:
            return self._forward(self.ids, self.model)
        # the place of a layer in the cache is a constant of its code, which is compiled for each of them therefore
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
            raise InputError(
                "context-full",
                where="decoding",
                value=f"{tokens} tokens",
                rule=f"the cache holds {self.length}",
                remedy="a larger length",
            )
