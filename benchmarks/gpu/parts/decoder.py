"""A decoder of Llama's build with random weights, in torch alone: one token a sequence against a cache that is full.

What a step does is what a runtime does: norms, q, k and v as one product, rotary embedding, the new keys and values
into the cache, grouped attention, gate and up as one product, the head in 16 bits. Positions do not move, so that every
step reads as much as the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

# (rows, columns) of a weight and the layer it is in -> the product
MakeLinear = Callable[[tuple[int, int], int], torch.nn.Module]


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    hidden: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    def linears(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of a block's products: qkv, o, gate and up, down."""
        both = self.heads + 2 * self.kv_heads
        return (
            (both * self.head, self.hidden),
            (self.hidden, self.heads * self.head),
            (2 * self.wide, self.hidden),
            (self.hidden, self.wide),
        )


class Decoder(torch.nn.Module):
    """See the module.

    Args:
        sizes: of the model.
        make: a block's products.
        dtype: of activations, cache, embedding and head.
        at: device.
    """

    def __init__(self, sizes: Sizes, make: MakeLinear, dtype: torch.dtype, at: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.blocks = [[make(shape, layer) for shape in sizes.linears()] for layer in range(sizes.layers)]
        self.norms = torch.ones(2 * sizes.layers + 1, sizes.hidden, dtype=dtype, device=at)
        generator = torch.Generator(device=at).manual_seed(0)
        shape = (sizes.vocabulary, sizes.hidden)
        self.embedding = (torch.randn(shape, generator=generator, device=at) / sizes.hidden**0.5).to(dtype)

    def cache(self, batch: int, context: int) -> torch.Tensor:
        """Keys and values of every layer, [layers, 2, batch, kv heads, context, head], at random."""
        s, like = self.sizes, self.embedding
        shape = (s.layers, 2, batch, s.kv_heads, context, s.head)
        return torch.randn(shape, device=like.device).to(like.dtype)

    def forward(self, ids: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary] of the token after ids [batch], which takes the cache's last place."""
        s, batch = self.sizes, len(ids)
        x = functional.embedding(ids, self.embedding)
        cos, sin = self._angles(cache.shape[-2] - 1)
        for layer, (qkv, o, gate_up, down) in enumerate(self.blocks):
            both = qkv(self._norm(x, 2 * layer)).view(batch, -1, 1, s.head)
            q, k, v = both.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            keys, values = cache[layer, 0], cache[layer, 1]
            keys[:, :, -1:] = _turned(k, cos, sin)
            values[:, :, -1:] = v
            found = functional.scaled_dot_product_attention(_turned(q, cos, sin), keys, values, enable_gqa=True)
            x = x + o(found.reshape(batch, -1))
            gate, up = gate_up(self._norm(x, 2 * layer + 1)).chunk(2, dim=-1)
            x = x + down(functional.silu(gate) * up)
        return functional.linear(self._norm(x, -1), self.embedding)

    def _norm(self, x: torch.Tensor, place: int) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.norms[place], 1e-5)

    def _angles(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        at, half = self.embedding.device, self.sizes.head // 2
        angle = position * 500000.0 ** -(torch.arange(half, device=at) / half)
        both = torch.cat([angle, angle])
        return both.cos().to(self.embedding.dtype), both.sin().to(self.embedding.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def dense(dtype: torch.dtype, at: str) -> MakeLinear:
    """Make the linears in 16 bits."""

    def make(shape: tuple[int, int], layer: int) -> torch.nn.Module:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype, device=at)
        return linear.requires_grad_(False)

    return make


def stepping(model: Decoder, batch: int, context: int) -> Callable[[], object]:
    """Return a step of so many sequences, with so many tokens in the cache."""
    cache = model.cache(batch, context)
    ids = torch.arange(batch, device=cache.device) % model.sizes.vocabulary

    def step() -> object:
        with torch.no_grad():
            return model(ids, cache)

    return step
