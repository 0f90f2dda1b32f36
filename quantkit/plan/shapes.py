"""The linears of a model as shapes: `[N, K]` with how often each occurs. Torch-free, no weights are read.

From a shipped list (`quantkit/plan/models/NAME.yaml`), from a `config.json`, from the names and shapes of stored
tensors, or typed in as KxN. A linear computes `y = x Wᵀ`, x [M, K], W [N, K].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from quantkit.content import Closed, known_keys, read_yaml
from quantkit.errors import InputError, from_validation, unknown_name

_FOLDER = Path(__file__).parent / "models"
_TYPED = re.compile(r"(\d+)[x×](\d+)", re.IGNORECASE)
# how blocks are built, by `model_type`: q, k, v and gate, up as tensors of their own; the same with each group in one
# tensor; and q, k, v with a multilayer perceptron of two
_SEPARATE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo", "olmo2", "smollm3"),
    *("cohere", "stablelm"),
)
_JOINED = ("phi3",)
_PLAIN = ("bert", "roberta", "xlm-roberta", "electra", "vit", "deit")
# heads of encoders differ too much to be read off a config
_WITH_HEAD = (*_SEPARATE, *_JOINED)
_EMBEDDINGS = re.compile(r"embed|\bwte\b|\bwpe\b|position|token_type|norm", re.IGNORECASE)


class Linear(Closed):
    """A linear and how often it occurs: activation [M, K] by weight [N, K]."""

    name: str
    K: int = Field(gt=0)
    N: int = Field(gt=0)
    count: int = Field(default=1, gt=0)

    @property
    def label(self) -> str:
        """`4096x14336`: K x N."""
        return f"{self.K}x{self.N}"


class _List(Closed):
    """A file of `models/`."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    summary: str
    source: str
    linears: list[Linear] = Field(min_length=1)


@dataclass(frozen=True)
class Shapes:
    """The linears of one model, or a few that were typed in.

    Args:
        name: of the model; "" for typed shapes, which are no model: nothing is summed over them.
        linears: as the model has them, fused or separate.
        source: where they are from.
    """

    name: str
    linears: Sequence[Linear]
    source: str = ""

    def distinct(self) -> list[Linear]:
        """One for each [N, K], counts added up, names joined: `q_proj, o_proj`; largest share of the weights first."""
        found: dict[tuple[int, int], list[Linear]] = {}
        for linear in self.linears:
            found.setdefault((linear.K, linear.N), []).append(linear)
        joined = [
            Linear(
                name=", ".join(dict.fromkeys(each.name for each in group)), K=k, N=n, count=sum(x.count for x in group)
            )
            for (k, n), group in found.items()
        ]
        return sorted(joined, key=lambda linear: -linear.K * linear.N * linear.count)


def names() -> list[str]:
    """The shipped lists."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def summaries() -> dict[str, str]:
    """Name -> what it is."""
    return {name: _read(name).summary for name in names()}


def shipped(name: str) -> Shapes:
    """A shipped list. Raises InputError `unknown-model`, with a did-you-mean."""
    if name not in names():
        raise unknown_name("model", name, names())
    found = _read(name)
    return Shapes(name, found.linears, found.source)


def _read(name: str) -> _List:
    path = _FOLDER / f"{name}.yaml"
    try:
        return _List.model_validate(read_yaml(path))
    except ValidationError as error:
        raise from_validation(error, where=str(path), code="shapes-invalid", known=known_keys(_List)) from None


def typed(texts: Iterable[str]) -> Shapes:
    """Shapes as `--shape` takes them: `4096x14336`, K x N. Raises InputError `shape-invalid`."""
    found = []
    for text in texts:
        match = _TYPED.fullmatch(text.strip())
        if match is None or not all(int(size) for size in match.groups()):
            raise InputError(
                "shape-invalid", where="--shape", value=text, rule="KxN, inputs by outputs, from 1 up: 4096x14336"
            )
        found.append(Linear(name=text.strip(), K=int(match[1]), N=int(match[2])))
    return Shapes("", list({(each.K, each.N): each for each in found}.values()), "typed")


def from_config(config: Mapping[str, Any], name: str) -> Shapes:
    """The linears that a transformers `config.json` stands for.

    Raises:
        InputError: `config-unknown` for a `model_type` whose blocks are not known by their config.
    """
    kind = str(config.get("model_type", ""))
    if kind not in (*_SEPARATE, *_JOINED, *_PLAIN):
        raise InputError(
            "config-unknown",
            where=name,
            value=f"model_type {kind!r}",
            rule="shapes are read off the configs of models whose blocks are known",
            remedy="use a folder that holds the weights, or name the shapes: --shape KxN",
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key) or default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError("config-unknown", where=f"{name}: {key}", value=config.get(key), rule="a number from 1 up")
        return value

    hidden, wide, layers = (number(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = number("num_attention_heads")
    head = number("head_dim", hidden // heads)
    q, kv = heads * head, number("num_key_value_heads", heads) * head

    def linear(label: str, k: int, n: int, count: int = layers) -> Linear:
        return Linear(name=label, K=k, N=n, count=count)

    if kind in _PLAIN:
        block = [linear(label, hidden, hidden) for label in ("query", "key", "value", "attention.output")]
        block += [linear("intermediate", hidden, wide), linear("output", wide, hidden)]
    else:
        if kind in _JOINED:
            block = [linear("qkv_proj", hidden, q + 2 * kv), linear("gate_up_proj", hidden, 2 * wide)]
        else:
            block = [linear("q_proj", hidden, q), linear("k_proj", hidden, kv), linear("v_proj", hidden, kv)]
            block += [linear("gate_proj", hidden, wide), linear("up_proj", hidden, wide)]
        block += [linear("o_proj", q, hidden), linear("down_proj", wide, hidden)]
    if kind in _WITH_HEAD:
        block.append(linear("lm_head", hidden, number("vocab_size"), 1))
    return Shapes(name, block, f"config.json, {kind}")


def from_tensors(stored: Mapping[str, Sequence[int]], name: str, *, tied_head: bool = False) -> Shapes:
    """The linears among stored tensors: matrices called `*.weight` that are neither embeddings nor norms.

    Args:
        stored: tensor -> shape.
        name: of the model.
        tied_head: whether the embedding is the head as well.

    Raises:
        InputError: `no-linears`.
    """
    found: dict[tuple[str, int, int], int] = {}
    for tensor, shape in stored.items():
        module = tensor.removesuffix(".weight")
        embedding = bool(_EMBEDDINGS.search(module))
        if module == tensor or len(shape) != 2 or (embedding and not _is_head(module, shape, tied_head)):
            continue
        label = "lm_head" if embedding else module.rpartition(".")[2]
        key = (label, int(shape[0]), int(shape[1]))
        found[key] = found.get(key, 0) + 1
    if not found:
        raise InputError("no-linears", where=name, value="no matrix among the weights", remedy="--shape KxN")
    return Shapes(name, [Linear(name=label, K=k, N=n, count=c) for (label, n, k), c in found.items()], "stored weights")


def _is_head(module: str, shape: Sequence[int], tied: bool) -> bool:
    """Whether an embedding of tokens is multiplied with at the end too."""
    return tied and bool(re.search(r"embed_tokens|word_embeddings|\bwte\b", module)) and shape[0] > shape[1]
