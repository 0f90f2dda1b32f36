"""Sizes of a model: its linears, its attention, its other parameters. Torch-free; read from a `config.json`.

Nothing here knows formats or hardware. Figures of a config are checked as they are read. A missing figure is an error,
or the default of the model's config class in transformers, which is then listed as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import InputError
from quantkit.kinds import Kind

# tokens that a linear multiplies: all; of the source; of the answer
When = Literal["", "prompt", "step"]


@dataclass(frozen=True)
class Matrix:
    """A stored linear: `y = x Wᵀ + b`, x [M, K], W [N, K].

    Args:
        name: name in the model: `model.layers.0.self_attn.q_proj`; equal experts share an entry, `…experts.*.…`.
        N: outputs.
        K: inputs.
        count: number of equal linears: the experts of a layer; else 1.
        active: number of them that a token passes through.
        bias: True with a bias.
        router: True if it chooses experts; a parameter in transformers, not a linear, so recipes never quantize it.
        when: "prompt" if it multiplies only the tokens of a source, "step" if only those of an answer.
    """

    name: str
    N: int
    K: int
    count: int = 1
    active: int = 1
    bias: bool = False
    router: bool = False
    when: When = ""

    @property
    def parameters(self) -> int:
        """Parameters of all `count`, with biases."""
        return self.count * (self.N * self.K + (self.N if self.bias else 0))


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, and the size of its cache.

    Args:
        kind: `full` attends to all earlier tokens, `sliding` to a `window` of them; `latent` keeps one vector of
            `latent + rope_dim` for all heads (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434); `linear`
            keeps a `state` of one size for any number of tokens (Gated DeltaNet, arXiv:2412.06464).
        heads: heads of queries.
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` heads of queries.
        head_dim: features of a query and key.
        value_dim: features of a value.
        window: tokens in a `sliding` window.
        latent: features of the compressed keys and values of a `latent` layer.
        rope_dim: features of its shared key for positions.
        causal: True if tokens attend only to earlier ones, so that keys and values are cached.
        state: elements that a `linear` layer keeps for a sequence, in float32.
    """

    kind: Literal["full", "sliding", "latent", "linear"]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    latent: int | None = None
    rope_dim: int | None = None
    causal: bool = True
    state: int = 0


@dataclass(frozen=True)
class BlockShapes:
    """One block: its path, its linears in order, its attention, and other parameters (norms, a router's correction)."""

    name: str
    matrices: Sequence[Matrix]
    attention: Attention | None
    others: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the block."""
        return sum(matrix.parameters for matrix in self.matrices) + self.others


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model.

    Args:
        name: shipped name, or that of the folder or file.
        kind: kind of the model.
        model_type: its type in transformers.
        dtype: stored dtype.
        hidden: features of a token between blocks.
        layers: its blocks.
        embeddings: elements of the embeddings (tokens, positions, patches with their biases), each table once.
        others: elements outside of blocks, embeddings and head: last norm, pooler, classifier's bias.
        head: the head.
        tied: True if the head is the table of tokens, which is then stored once.
        vocabulary: number of tokens, or of classes; None without either.
        max_context: positions that the model supports; None if unknown.
        assumed: assumptions about figures that the config leaves open, in words.
        ends: part of `others` behind an encoder's last hidden states: pooler, and the head of its task.
        class_name: class in transformers; "" if the config names none.
        sees: True for a vision-language model: a decoder that takes images too.
        source_positions: positions of every source, if all are as long: recordings; else None.
        image_tokens: tokens of the context for an image of the usual size; None if the config does not say.
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
    sees: bool = False
    image_tokens: int | None = None
    source_positions: int | None = None

    @property
    def has_encoder(self) -> bool:
        """True for a decoder beside an encoder."""
        return any(matrix.when for matrix in self.inside())

    @property
    def parameters(self) -> int:
        """Stored parameters, a tied table once."""
        head = self.head.parameters if self.head is not None and not self.tied else 0
        return sum(layer.parameters for layer in self.layers) + self.embeddings + self.others + head

    @property
    def active_parameters(self) -> int:
        """Parameters for one token: only the experts of its route."""
        return self.parameters - sum((m.count - m.active) * m.parameters // m.count for m in self.inside())

    def inside(self) -> Iterator[Matrix]:
        """Yield the linears of all blocks."""
        for layer in self.layers:
            yield from layer.matrices


# limits of a config's numbers, above those of any real model
LARGEST, MOST_LAYERS = 10_000_000, 10_000
# bytes of a layer's experts in 32-bit floats; larger ones lie in files during a compile, one in memory at a time
EXPERTS_IN_MEMORY = 8 * 2**30
# a block larger than the process's memory divided by this has its weights in files
BLOCK_SHARE = 4
_TYPES = {"float32": 32, "float16": 16, "bfloat16": 16}


class Figures:
    """Checked reading of a config; `assumed` lists the defaults of missing keys, in words."""

    def __init__(self, config: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.config, self.where = config, where
        self._defaults = defaults or {}
        self.assumed: list[str] = []

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Read a whole number by any of its names; `default` if transformers has none. Raises `config-invalid`."""
        value = self.maybe(*keys, least=least, most=most)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(keys[0], "missing", f"a model of type {self.model_type!r} has it")
        return value

    def maybe(self, *keys: str, least: int = 1, most: int = LARGEST) -> int | None:
        """Read a whole number likewise; None for null or absent."""
        there = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        for key, value in there.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise self.wrong(key, f"{value!r:.60}", f"a whole number from {least} to {most}")
        if len(set(there.values())) > 1:
            raise self.wrong(keys[0], ", ".join(f"{k} {v}" for k, v in there.items()), "names of one figure agree")
        if there:
            return int(next(iter(there.values())))
        value = self._defaults.get(keys[0])
        if value is None or any(key in self.config for key in keys):  # an explicit null
            return None
        self.assume(f"{keys[0]} {value}, the default of transformers for {self.model_type}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read a switch. Raises InputError `config-invalid`."""
        value = self.config.get(key)
        if value is None:
            return bool(self._defaults.get(key, default))
        if not isinstance(value, bool):
            raise self.wrong(key, f"{value!r:.60}", "true or false")
        return value

    def numbers(self, key: str) -> list[int]:
        """Read a list of whole numbers, empty if absent. Raises InputError `config-invalid`."""
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong(key, f"{value!r:.60}", "a list of whole numbers")
        return value

    @property
    def model_type(self) -> str:
        """Model type in transformers."""
        return str(self.config.get("model_type", ""))

    def dtype(self, name: str = "float32") -> str:
        """Read the stored dtype; `name` if the config has none, which is listed as an assumption."""
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        if stated is None:
            self.assume(f"stored in {name}: the config has no dtype")
            return name
        plain = str(stated).removeprefix("torch.")
        if plain not in _TYPES:
            raise self.wrong("dtype", f"{stated!r:.60}", f"one of {', '.join(_TYPES)}")
        return plain

    def assume(self, what: str) -> None:
        """Record an assumption, once."""
        if what not in self.assumed:
            self.assumed.append(what)

    def wrong(self, key: str, value: str, rule: str, remedy: str = "check config.json") -> InputError:
        """Make the error for a figure."""
        return InputError("config-invalid", f"{self.where}: {key}", value, rule, remedy)
