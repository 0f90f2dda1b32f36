"""A model as sizes: its linears, its attention, what else is stored. Torch-free; read off a `config.json`.

Nothing here knows of formats or hardware. Figures of a config are checked one by one as they are asked for. What is not
there is an error, or the default of the model's own config class in transformers, which is then said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import InputError
from quantkit.kinds import Kind


@dataclass(frozen=True)
class Matrix:
    """A linear as it is stored: `y = x Wᵀ + b`, x [M, K], W [N, K].

    Args:
        name: in the model: `model.layers.0.self_attn.q_proj`; experts that are alike share an entry, `…experts.*.…`.
        count: how many of them there are: the experts of a layer; else 1.
        active: how many of them a token passes through.
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
        kv_heads: of keys and values, shared by `heads / kv_heads` queries each.
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
    """One block by its path: its linears as they run, and elements of none (norms, a router's correction)."""

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
        hidden: features of a token between blocks.
        embeddings: elements of the embeddings (tokens, positions, patches with their biases), each table once.
        others: stored elements outside of blocks, embeddings and head: last norm, pooler, classifier's bias.
        class_name: of transformers; "" where the config names none.
        ends: of `others`, what an encoder has behind its last hidden states: pooler, and what its task adds.
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
        return self.parameters - sum((m.count - m.active) * m.parameters // m.count for m in self.inside())

    def inside(self) -> Iterator[Matrix]:
        """The linears of all blocks."""
        for layer in self.layers:
            yield from layer.matrices


# no config of a real model has larger numbers, and sums over them stay readable
LARGEST, MOST_LAYERS = 10_000_000, 10_000
_TYPES = {"float32": 32, "float16": 16, "bfloat16": 16}


class Figures:
    """One config, read figure by figure; `assumed`: in words, what was taken for keys that it leaves open."""

    def __init__(self, config: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.config, self.where = config, where
        self._defaults = defaults or {}
        self.assumed: list[str] = []

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Read a whole number by any of its names; `default`: where transformers has none. Raises `config-invalid`."""
        value = self.maybe(*keys, least=least, most=most)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(keys[0], "missing", f"a model of type {self.model_type!r} has it")
        return value

    def maybe(self, *keys: str, least: int = 1, most: int = LARGEST) -> int | None:
        """Read one likewise, where null and absent mean that there is none."""
        there = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        for key, value in there.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise self.wrong(key, f"{value!r:.60}", f"a whole number from {least} to {most}")
        if len(set(there.values())) > 1:
            raise self.wrong(keys[0], ", ".join(f"{k} {v}" for k, v in there.items()), "names of one figure agree")
        if there:
            return int(next(iter(there.values())))
        value = self._defaults.get(keys[0])
        if value is None or any(key in self.config for key in keys):  # null, which is said
            return None
        self.assume(f"{keys[0]} {value}, as transformers takes it for {self.model_type} where it is absent")
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
        """Read a list of whole numbers, empty where there is none. Raises InputError `config-invalid`."""
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong(key, f"{value!r:.60}", "a list of whole numbers")
        return value

    @property
    def model_type(self) -> str:
        """As transformers calls it."""
        return str(self.config.get("model_type", ""))

    def dtype(self, name: str = "float32") -> str:
        """Read what the source stores; `name` where the config does not say, which is then said."""
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        if stated is None:
            self.assume(f"stored in {name}: the config has no dtype")
            return name
        plain = str(stated).removeprefix("torch.")
        if plain not in _TYPES:
            raise self.wrong("dtype", f"{stated!r:.60}", f"one of {', '.join(_TYPES)}")
        return plain

    def assume(self, what: str) -> None:
        """Say what was taken, once."""
        if what not in self.assumed:
            self.assumed.append(what)

    def wrong(self, key: str, value: str, rule: str, remedy: str = "check config.json") -> InputError:
        """Make the error for a figure."""
        return InputError("config-invalid", f"{self.where}: {key}", value, rule, remedy)
