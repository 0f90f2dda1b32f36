"""The ends of a model in a graph: its table of token embeddings in codes, and a head with more bits for some rows.

    float      the table as it is, float32
    int8       rounded to nearest in blocks along a row
    shared     the head's codes: tied weights are stored once
    refined    the same, and what they leave of each value in 2 bits more

A head's codes are chosen for its product, and lie up to a step away from the weight. Its product does not see that, a
table that is looked up in does; two bits take most of it back. GatherBlockQuantized looks up and expands
(ONNX Runtime's docs/ContribOperators.md).

A head's error counts by the probability of the words, and vocabularies begin with the frequent ones (those that a
byte-pair encoding merged first): 8 bits for the first rows, a few hundredths of the head, take back half of what 4 bits
cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from quantkit.bundle import Decision, decision
from quantkit.exporters.onnx.nbits import BITS, EmbeddingTable, GraphEnds, block_size
from quantkit.formats import QuantTensor, apart, joined, load_format
from quantkit.passes.assign import PIECE, nearest
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.exporters.values import Values

# in a graph's metadata: how its token embeddings are stored, and rows of the head in 8 bits, where there are any
TABLE, HEAD_ROWS = "quantkit.embedding", "quantkit.head_rows"
Storage = Literal["float", "int8", "shared", "refined"]
# codes of its own are in the largest of these blocks that divides a row
_BLOCKS = (64, 32, 16)
_FLOAT, _OWN, _ROWS = "embedding-float", "embedding-own", "head-rows-left"


def ends(values: Values, storage: Storage, rows: int) -> tuple[GraphEnds, list[Decision]]:
    """Choose both ends, as far as that can be.

    Args:
        storage: of the table.
        rows: of the head, the first so many in 8 bits; of one that is stored in fewer.
    """
    table, taken = coded(values, storage)
    head = values.stream.head or ""
    scheme = values.schemes.get(head)
    if not rows or scheme is None or load_format(scheme.format).bits >= 8:
        return GraphEnds(table), taken
    shape = values.skeleton.get_parameter(f"{head}.weight").shape
    block, why = _block(shape[1]), ""
    if values.before is None:
        why = "a bundle no longer has them as they were"
    elif not scheme.rows_apart:
        why = "its scales are not of single rows"
    elif not block:
        why = f"rows of {shape[1]} are not divided by {_BLOCKS[-1]}"
    if why or values.before is None:
        reason = f"its first rows get no more bits: {why}"
        return GraphEnds(table), [*taken, decision("onnx", _ROWS, head, reason, rows, 0)]
    weight = values.before(f"{head}.weight")[: min(rows, shape[0] - 1)]
    return GraphEnds(table, head, nearest(weight, _grouped("int8", block))), taken


def with_ends(values: Values, storage: Storage, rows: int) -> Values:
    """Give the model the ends that a graph has, for its numbers to be held against."""
    of_graph, _ = ends(values, storage, rows)
    stream = values.stream.on(values.stream.device, values.stream.place)
    if (table := of_graph.table) is not None:
        coded_by = [values.quantized(table.head)] if table.head else []
        coded_by += [table.own] if table.own is not None else []
        total: Any = sum(part.dense()[:, : table.columns] for part in coded_by)
        stream.transforms.append(_Put(table.parameter, total))
    if of_graph.rows is not None:
        stream.transforms.append(_Put(f"{of_graph.head}.weight", of_graph.rows.dense()))
    return replace(values, stream=stream)


def coded(values: Values, storage: Storage) -> tuple[EmbeddingTable | None, list[Decision]]:
    """Store the table as `storage` says, as far as that can be; None where it stays in floats."""
    if storage == "float":
        return None, []
    name, columns = _table(values.skeleton)
    if not name:
        return None, [decision("onnx", _FLOAT, "embedding", "no table of token embeddings was found")]
    block, head = _block(columns), _tied(values, name)
    scheme = values.schemes.get(head)
    reason = "" if block else f"rows of {columns} are not divided by {_BLOCKS[-1]}"
    if head and scheme is None:
        reason = f"{head} reads it as it is, in floats"
    if reason:
        return None, [decision("onnx", _FLOAT, name, reason, storage, "float")]
    why = ""
    if storage != "int8":
        why = _not_of(scheme, columns) if head else "no head shares its weight"
    if storage == "int8" or why:
        own = _rounded(values, name, _grouped("int8", block))
        taken = [decision("onnx", _OWN, name, why, storage, "int8")] if why else []
        return EmbeddingTable(name, "", own, columns), taken
    left = None if storage == "shared" else _rounded(values, name, _grouped("int2", block), head)
    return EmbeddingTable(name, head, left, columns), []


@dataclass(frozen=True)
class _Put:
    """Puts rows in the place of a parameter's first; of parameters that are tied, the other stays."""

    name: str
    rows: Tensor

    def block(self, index: int, block: nn.Module) -> None:
        """Leave blocks alone."""

    def rest(self, model: nn.Module) -> None:
        """Replace them."""
        from quantkit.model.streaming.stream import set_tensor

        value = model.get_parameter(self.name).detach().clone()
        value[: len(self.rows)] = self.rows
        set_tensor(model, self.name, value)


def _table(skeleton: nn.Module) -> tuple[str, int]:
    """The parameter that token ids are looked up in, and its columns; "" where there is none."""
    named = getattr(skeleton, "get_input_embeddings", None)
    module = named() if named is not None else None
    path = next((path for path, inner in skeleton.named_modules() if inner is module), None)
    if path is None or not isinstance(module, torch.nn.Embedding):
        return "", 0
    return f"{path}.weight", module.weight.shape[1]


def _tied(values: Values, table: str) -> str:
    """The head that shares the table's weight; "" where none does."""
    head, skeleton = values.stream.head or "", values.skeleton
    return head if head and skeleton.get_parameter(f"{head}.weight") is skeleton.get_parameter(table) else ""


def _block(columns: int) -> int:
    """The largest block that divides a row; 0 where none does."""
    return next((block for block in _BLOCKS if columns % block == 0), 0)


def _grouped(form: str, block: int) -> WeightScheme:
    return WeightScheme(format=form, granularity="group", group=block)


def _not_of(scheme: WeightScheme | None, columns: int) -> str:
    """Why a head's codes cannot be looked up in; "" where they can."""
    if scheme is None or load_format(scheme.format).bits not in BITS or not scheme.format.startswith("int"):
        return "the head is not stored in blocks of integers"
    return "the head's last block is filled up" if columns % block_size(columns, scheme, "head") else ""


def _rounded(values: Values, name: str, scheme: WeightScheme, head: str = "") -> QuantTensor:
    """The table, or what a head's codes leave of it, rounded to nearest, a piece of its rows at a time."""
    weight = values.tensor(name)
    pieces = weight.split(max(1, PIECE // weight.shape[1]))
    codes = apart(values.quantized(head), [len(piece) for piece in pieces]) if head else ()
    parts = []
    for number, piece in enumerate(pieces):
        left = piece.float()
        if codes:
            left = left - codes[number].dense()[:, : weight.shape[1]]
        parts.append(nearest(left, scheme))
    return joined(parts)
