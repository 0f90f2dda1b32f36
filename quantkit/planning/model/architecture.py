"""A model as sizes: its linears, its attention, what else is stored. Torch-free; read off a `config.json`.

Nothing here knows of formats or hardware. What a recipe makes of the sizes is `storage.py`, what they take while the
model runs is `memory.py`, how long `bound/roofline.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.kinds import Kind


@dataclass(frozen=True)
class Matrix:
    """A linear as it is stored: `y = x Wᵀ + b`, x [M, K], W [N, K].

    Args:
        name: in the model: `model.layers.0.self_attn.q_proj`; experts that are alike share an entry, `…experts.*.…`.
        N: outputs.
        K: inputs.
        count: how many of them there are: the experts of a layer; else 1.
        active: how many of them a token passes through.
        bias: whether each has a vector of N beside it.
        router: it chooses experts; in transformers a parameter, no linear, so that no recipe ever quantizes it.
    """

    name: str
    N: int
    K: int
    count: int = 1
    active: int = 1
    bias: bool = False
    router: bool = False

    @property
    def parameters(self) -> int:
        """Of all `count`, biases included."""
        return self.count * (self.N * self.K + (self.N if self.bias else 0))


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, and what it keeps of each token.

    Args:
        kind: `full` reaches back to the first token, `sliding` no further than `window`; `latent` keeps one vector of
            `latent + rope_dim` for all heads (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).
        heads: of queries.
        kv_heads: of keys and values, shared by `heads / kv_heads` queries each.
        head_dim: features of a query and a key.
        value_dim: features of a value.
        window: tokens that a `sliding` layer sees.
        latent: features of the compressed keys and values of a `latent` layer.
        rope_dim: of the key that its heads share, which carries the position.
        causal: whether tokens see only those before them, so that keys and values are kept between steps.
    """

    kind: Literal["full", "sliding", "latent"]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    latent: int | None = None
    rope_dim: int | None = None
    causal: bool = True


@dataclass(frozen=True)
class BlockShapes:
    """One block.

    Args:
        name: its path: `model.layers.0`.
        matrices: its linears, in the order in which they run.
        attention: None for a block without.
        others: stored elements that belong to no linear: norms, a router's correction.
    """

    name: str
    matrices: Sequence[Matrix]
    attention: Attention | None
    others: int = 0

    @property
    def parameters(self) -> int:
        """All that it stores."""
        return sum(matrix.parameters for matrix in self.matrices) + self.others


@dataclass(frozen=True)
class Architecture:
    """A model as sizes.

    Args:
        name: shipped name, folder's or file's.
        kind: `decoder`, `encoder` or `network`.
        model_type: as transformers calls it.
        dtype: what the source stores: `bfloat16`.
        hidden: features of a token between blocks.
        layers: all blocks, one by one.
        embeddings: elements of the embeddings (tokens, positions, patches with their biases), each table once.
        others: stored elements outside of blocks, embeddings and head: last norm, pooler, classifier's bias.
        class_name: of transformers; "" where the config names none.
        ends: of `others`, what an encoder has behind its last hidden states: pooler, and what its task adds.
        head: the matrix that gives the logits; None where there is none.
        tied: whether the head is the table of embedded tokens, which is then stored once.
        vocabulary: tokens, or classes; None where there are neither.
        max_context: positions that the model was made for; None where it says none.
        assumed: what the config leaves open, and what was taken for it, in words.
    """

    name: str
    kind: Kind
    model_type: str
    dtype: str
    hidden: int
    layers: Sequence[BlockShapes]
    embeddings: int
    others: int
    head: Matrix | None = None
    tied: bool = False
    vocabulary: int | None = None
    max_context: int | None = None
    assumed: Sequence[str] = ()
    ends: int = 0
    class_name: str = ""

    @property
    def parameters(self) -> int:
        """All that is stored, a tied table once."""
        head = self.head.parameters if self.head is not None and not self.tied else 0
        return sum(layer.parameters for layer in self.layers) + self.embeddings + self.others + head

    @property
    def active_parameters(self) -> int:
        """Those that a token passes through: of experts only the ones it is routed to."""
        idle = sum((each.count - each.active) * each.parameters // each.count for each in self.inside())
        return self.parameters - idle

    def inside(self) -> Iterator[Matrix]:
        """The linears of all blocks."""
        for layer in self.layers:
            yield from layer.matrices
