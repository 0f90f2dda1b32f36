"""Linears of a model as shapes: `[N, K]` with their counts. Torch-free, no weights are read.

They come from a shipped config (`quantkit/model/sizes/shipped_configs/NAME.yaml`), a `config.json`, the names and
shapes
of stored tensors, or typed KxN. A linear computes `y = x Wᵀ`, x [M, K], W [N, K].
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from quantkit.content import Closed
from quantkit.errors import InputError, unknown_name
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture

_TYPED = re.compile(r"(\d+)[x×](\d+)", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"embed|\bwte\b|\bwpe\b|position|token_type|norm", re.IGNORECASE)


class LinearShape(Closed):
    """A linear and its count: activation [M, K] by weight [N, K]."""

    name: str
    K: int = Field(gt=0)
    N: int = Field(gt=0)
    count: int = Field(default=1, gt=0)

    @property
    def label(self) -> str:
        """K x N: `4096x14336`."""
        return f"{self.K}x{self.N}"


@dataclass(frozen=True)
class LinearShapes:
    """Linears of one model, fused or separate as stored; typed shapes have the `name` "", and no sums."""

    name: str
    linears: Sequence[LinearShape]
    source: str = ""

    def distinct(self) -> list[LinearShape]:
        """Merge linears of one [N, K], names joined: `q_proj, o_proj`; largest share of the weights first."""
        groups: dict[tuple[int, int], list[LinearShape]] = {}
        for linear in self.linears:
            groups.setdefault((linear.K, linear.N), []).append(linear)
        joined = []
        for (k, n), group in groups.items():
            name = ", ".join(dict.fromkeys(linear.name for linear in group))
            joined.append(LinearShape(name=name, K=k, N=n, count=sum(linear.count for linear in group)))
        return sorted(joined, key=lambda linear: -linear.K * linear.N * linear.count)


def names() -> list[str]:
    """List the shipped models without experts."""
    return [name for name in configs.shipped_names() if not _has_experts(_architecture(name))]


def shipped(name: str) -> LinearShapes:
    """Read the linears of a shipped model. Raises InputError `unknown-model`, with a did-you-mean."""
    if name not in configs.shipped_names():
        raise unknown_name("model", name, names())
    return _of(_architecture(name), configs.shipped(name).source)


def _architecture(name: str) -> Architecture:
    return configs.from_config(configs.shipped(name).config, name)


def typed(texts: Iterable[str]) -> LinearShapes:
    """Parse shapes in the form of `--shape`: `4096x14336`, K x N. Raises InputError `shape-invalid`."""
    shapes: dict[tuple[int, int], LinearShape] = {}
    for text in texts:
        match = _TYPED.fullmatch(text.strip())
        if match is None or not all(int(size) for size in match.groups()):
            raise InputError("shape-invalid", "--shape", text, "KxN, inputs by outputs, from 1 up: 4096x14336")
        shapes[int(match[1]), int(match[2])] = LinearShape(name=text.strip(), K=int(match[1]), N=int(match[2]))
    return LinearShapes("", list(shapes.values()), "typed")


def from_config(config: Mapping[str, Any], name: str) -> LinearShapes:
    """Read the linears of a `config.json`. Raises `config-invalid`; `config-unknown`, with experts too."""
    if not configs.is_known(config):
        raise _unknown(name, f"model_type {config.get('model_type')!r:.60}", "known models")
    return _of(configs.from_config(config, name), f"config.json, {config.get('model_type')}")


def _of(model: Architecture, source: str) -> LinearShapes:
    """Count the linears by their name inside a block."""
    if _has_experts(model):
        raise _unknown(model.name, "it has experts, which see only some tokens of a batch", "models without experts")
    counts = Counter(
        (_label(matrix.name.removeprefix(f"{layer.name}.")), matrix.K, matrix.N)
        for layer in model.layers
        for matrix in layer.matrices
    )
    if model.head is not None and model.kind != "encoder":  # an encoder's head does not multiply every token
        counts[model.head.name.rpartition(".")[2], model.head.K, model.head.N] = 1
    return _counted(model.name, counts, source)


def _counted(name: str, counts: Mapping[tuple[str, int, int], int], source: str) -> LinearShapes:
    return LinearShapes(
        name, [LinearShape(name=label, K=k, N=n, count=c) for (label, k, n), c in counts.items()], source
    )


def _label(path: str) -> str:
    """Map `self_attn.q_proj` to `q_proj`, `attention.output.dense` to `attention.output`."""
    return path.removesuffix(".dense") if path.endswith(".dense") else path.rpartition(".")[2]


def _has_experts(model: Architecture) -> bool:
    return any(matrix.count > 1 for matrix in model.inside())


def _unknown(name: str, value: str, rule: str) -> InputError:
    remedy = "use a folder that holds the weights, or name the shapes: --shape KxN"
    return InputError("config-unknown", name, value, f"shapes are read from the configs of {rule}", remedy)


def from_tensors(stored: Mapping[str, Sequence[int]], name: str, *, tied_head: bool = False) -> LinearShapes:
    """Find the linears among stored tensors: matrices `*.weight`, no embeddings or norms. Raises `no-linears`."""
    counts = Counter[tuple[str, int, int]]()
    for tensor, shape in stored.items():
        module = tensor.removesuffix(".weight")
        if module == tensor or len(shape) != 2:
            continue
        embedding = bool(_EMBEDDINGS.search(module))
        # a table of tokens that is the head too
        head = tied_head and shape[0] > shape[1] and re.search(r"embed_tokens|word_embeddings|\bwte\b", module)
        if not embedding or head:
            counts["lm_head" if embedding else module.rpartition(".")[2], int(shape[1]), int(shape[0])] += 1
    if not counts:
        raise InputError("no-linears", name, "no matrix among the weights", remedy="--shape KxN")
    return _counted(name, counts, "stored weights")
