"""Rotation of a model's residual stream by an orthogonal matrix, and the proof that no output changes.

The stream `x` [tokens, width] runs through all blocks of a pre-norm transformer. It becomes `x Q` without a change of
any
output, if everything on it is rotated too:

    embedding          E -> E Q
    norm and readers   n(x) -> n(x Q) = n(x) Q;  W diag(w) n(x) -> the norm's weight becomes 1, W becomes W diag(w) Q
    writer             W -> Qᵀ W,  b -> b Q
    value path         v -> v R for each head, and R goes into the columns that read it: attention only mixes tokens

RMSNorm commutes with every Q, LayerNorm with those that keep the mean (`Q 1 = 1`). `residual.py` finds the modules on
the
stream. `prove` compares every part before and after, in float64.
(Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; QuaRot, arXiv 2404.00456.)

Parts before and behind the blocks are proved on a few rows of their tables: all rows of an embedding or head are
treated
alike, so a vocabulary of 100,000 rows need not be copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.calls import Call
from quantkit.model.streaming.stream import Whole, record
from quantkit.model.structure.flow import learn
from quantkit.model.structure.fold import disagreement
from quantkit.model.structure.traced import InDouble, hooked, is_linear, set_parameter, set_weight, weight_of

Form = Literal["weight", "one_plus_weight", "none"]
Rotations = Callable[[int], "Orthogonal"]


class Orthogonal(Protocol):
    """An orthogonal matrix Q [size, size]."""

    @property
    def size(self) -> int:
        """Rows and columns."""

    def apply(self, rows: Tensor, gain: Tensor | None = None) -> Tensor:
        """Return `rows` [..., size], times `gain` [size] if given, times Q."""


@dataclass(frozen=True)
class Norm:
    """A norm of the residual stream.

    Args:
        name: name of the module.
        readers: linears on its output, its only readers.
        form: form of its weight.
        centres: True if it subtracts the mean, as LayerNorm does.
    """

    name: str
    readers: tuple[str, ...]
    form: Form
    centres: bool


@dataclass(frozen=True)
class Heads:
    """A value path: a linear whose outputs are only mixed over tokens, head by head, on the way into others.

    Args:
        producer: the value projection, or a linear that contains it.
        consumers: the output projection.
        index: [K], producer's output channel behind each input of the consumers; consecutive within a head.
        size: channels of a head.
    """

    producer: str
    consumers: tuple[str, ...]
    index: Tensor
    size: int


@dataclass(frozen=True)
class Residual:
    """Modules of one part of a model that have to be rotated.

    Args:
        norms: norms of the stream.
        writers: linears that add to the stream.
        embeddings: tables whose rows add up to the stream's beginning.
        heads: value paths, which may have a rotation of their own.
    """

    norms: tuple[Norm, ...] = ()
    writers: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[Heads, ...] = ()

    @property
    def centres(self) -> bool:
        """True if the rotation has to keep the mean."""
        return any(norm.centres for norm in self.norms)

    @property
    def modules(self) -> frozenset[str]:
        """Norms, readers and writers of the stream."""
        norms = {name for norm in self.norms for name in (norm.name, *norm.readers)}
        return frozenset({*norms, *self.writers})


def turn(part: nn.Module, residual: Residual, rotation: Orthogonal, heads: Rotations | None = None) -> None:
    """Rotate a part in place, with a rotation as wide as the stream; `heads` maps a size to R, None to leave value
    paths.
    """
    for norm in residual.norms:
        module = part.get_submodule(norm.name)
        gain = gain_of(module, norm.form)
        for name in norm.readers:
            reader = part.get_submodule(name)
            set_weight(reader, rotation.apply(weight_of(reader), gain))
        if norm.form != "none":
            set_parameter(module, "weight", torch.full_like(module.weight, 1.0 if norm.form == "weight" else 0.0))  # type: ignore[arg-type]
        if getattr(module, "bias", None) is not None:
            bias: Tensor = module.bias.detach()  # type: ignore[union-attr, operator, assignment]
            bias = bias if gain is None else (bias.double() / gain).to(bias.dtype)
            set_parameter(module, "bias", rotation.apply(bias))
    for name in residual.writers:
        writer = part.get_submodule(name)
        set_weight(writer, rotation.apply(weight_of(writer).T).T)
        if getattr(writer, "bias", None) is not None:
            set_parameter(writer, "bias", rotation.apply(writer.bias.detach()))  # type: ignore[union-attr, operator]
    for name in residual.embeddings:
        table = part.get_submodule(name)
        set_parameter(table, "weight", rotation.apply(table.weight.detach()))  # type: ignore[union-attr, operator]
    for path in residual.heads:
        if heads is not None:
            turn_heads(part, path, heads(path.size))


def turn_heads(part: nn.Module, path: Heads, rotation: Orthogonal) -> None:
    """Rotate one value path in place, with a rotation of its size."""
    producer = part.get_submodule(path.producer)
    starts = path.index[:: path.size].unique()
    rows = (starts.unsqueeze(1) + torch.arange(path.size, device=starts.device)).flatten()
    weight = weight_of(producer).clone()
    # `apply` works on the last axis, in pieces of a head's size
    weight[rows] = rotation.apply(weight[rows].T.contiguous().reshape(-1, path.size)).reshape(-1, rows.numel()).T
    set_weight(producer, weight)
    if getattr(producer, "bias", None) is not None:
        bias = producer.bias.detach().clone()  # type: ignore[union-attr, operator]
        bias[rows] = rotation.apply(bias[rows].reshape(-1, path.size)).flatten()
        set_parameter(producer, "bias", bias)
    for name in path.consumers:
        consumer = part.get_submodule(name)
        weight = weight_of(consumer)
        set_weight(consumer, rotation.apply(weight.reshape(-1, path.size)).reshape(weight.shape))


def gain_of(norm: nn.Module, form: Form) -> Tensor | None:
    """Return a norm's factor, [width] float64; None without a weight."""
    if form == "none":
        return None
    weight: Tensor = norm.weight.detach().double()  # type: ignore[union-attr, operator, assignment]
    return weight + 1.0 if form == "one_plus_weight" else weight


@dataclass
class ModelPart:
    """A float64 copy of a part, and the function that runs it; `turns_output` if the output is the stream again (a
    block), not logits.
    """

    module: nn.Module
    run: Callable[[Tensor], Tensor]
    hidden: Tensor
    turns_output: bool = True

    @classmethod
    def of_block(cls, block: nn.Module, call: Call) -> ModelPart:
        """Copy a block."""
        exact, twice = copy.deepcopy(block).double(), call.double()
        return cls(exact, lambda hidden: replace(twice, hidden=hidden)(exact), twice.hidden)


@torch.no_grad()
def prove(part: ModelPart, residual: Residual, rotation: Orthogonal, heads: Rotations | None = None) -> float:
    """Rotate a part, and return the relative change of its outputs.

    The result is infinite if the part lacks modules of the residual: that of a dense block for one with experts.
    """
    if not residual.modules <= {name for name, _ in part.module.named_modules()}:
        return math.inf
    with InDouble():  # type: ignore[no-untyped-call]
        before = part.run(part.hidden)
        turn(part.module, residual, rotation, heads)
        after = part.run(rotation.apply(part.hidden))
        return disagreement(rotation.apply(before) if part.turns_output else before, after)


# rows kept of an embedding or head; more than the positions of a probe
ROWS = 256


class Ends:
    """A model without its blocks, on ids [samples, tokens], each below `ROWS`."""

    def __init__(self, stream: Whole, ids: Tensor) -> None:
        self.paths, self.ids = stream.paths, ids
        self.model = stream.rest()
        self.flow = learn(self.model, self.paths, stream.load, ids)
        self._head = Head(self.model, self.paths, self.flow)
        # the blocks are stand-ins without weights
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.weight.shape[0] > ROWS:
                set_parameter(module, "weight", module.weight.detach()[:ROWS].clone())
                module.padding_idx = None
            elif is_linear(module) and weight_of(module).shape[0] > ROWS:
                set_weight(module, weight_of(module)[:ROWS].clone())
                if getattr(module, "bias", None) is not None:
                    set_parameter(module, "bias", module.bias.detach()[:ROWS].clone())  # type: ignore[union-attr, operator]
        self.model = self.model.double()

    @torch.no_grad()
    def start(self) -> tuple[Tensor, list[Tensor]]:
        """Compute the hidden states before block 0, and the other tensor arguments of blocks."""
        with InDouble():  # type: ignore[no-untyped-call]
            calls = record(self.model, self.paths, self.flow, self.ids, len(self.ids))
        return calls.hidden, calls.tensors()

    def finish(self, hidden: Tensor) -> Tensor:
        """Compute logits, or an encoder's last hidden states, from the last block's output."""
        return self._head(hidden, self.ids)

    @torch.no_grad()
    def embeddings(self, width: int) -> tuple[str, ...]:
        """List the tables with rows of that width that are read before block 0."""
        read: list[Any] = []
        tables = {
            module: name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and module.weight.shape[1] == width
        }
        with hooked(table.register_forward_pre_hook(lambda table, _: read.append(table)) for table in tables):
            self.start()
        return tuple(tables[table] for table in dict.fromkeys(read))
