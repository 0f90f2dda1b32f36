"""Store the ends of a model in a graph: token embeddings in codes, and a head with more bits for some rows.

    float      the table as it is, float32
    int8       rounded to nearest in blocks along a row
    shared     the head's codes: tied weights are stored once
    refined    the same, and the remaining error of each value in 2 bits more

A head's codes are chosen for its product, and differ from the weight by up to a step. This harms an embedding that is
looked up, but not the product; two bits recover most of it. GatherBlockQuantized looks up and expands
(ONNX Runtime's docs/ContribOperators.md).

A head's error counts by the probability of the words, and vocabularies begin with the frequent ones (those that a
byte-pair encoding merged first): 8 bits for the first rows, a few hundredths of the head, recover half of the loss.
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

# keys of a graph's metadata: storage of token embeddings, and number of head rows in 8 bits
TABLE, HEAD_ROWS = "quantkit.embedding", "quantkit.head_rows"
Storage = Literal["float", "int8", "shared", "refined"]
# its own codes are in the largest of these blocks that divides a row
_BLOCKS = (64, 32, 16)
_FLOAT, _OWN, _ROWS = "embedding-float", "embedding-own", "head-rows-left"


def ends(values: Values, storage: Storage, rows: int) -> tuple[GraphEnds, list[Decision]]:
    """Choose the storage of both ends, as far as possible.

    Args:
        storage: storage of the embedding.
        rows: number of first rows of the head in 8 bits, for a head stored in fewer.
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
    """Return the model with a graph's ends, as the expected values."""
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
    """Store the embedding as `storage` says, if possible; None if it stays in floats."""
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
    """Replaces the first rows of a parameter; of tied parameters, the other one stays."""

    name: str
    rows: Tensor

    def block(self, index: int, block: nn.Module) -> None:
        """Leave blocks unchanged."""

    def rest(self, model: nn.Module) -> None:
        """Replace the rows."""
        from quantkit.model.streaming.stream import set_tensor

        value = model.get_parameter(self.name).detach().clone()
        value[: len(self.rows)] = self.rows
        set_tensor(model, self.name, value)


def _table(skeleton: nn.Module) -> tuple[str, int]:
    """Return the parameter of token embeddings, and its columns; "" if there is none."""
    named = getattr(skeleton, "get_input_embeddings", None)
    module = named() if named is not None else None
    path = next((path for path, inner in skeleton.named_modules() if inner is module), None)
    if path is None or not isinstance(module, torch.nn.Embedding):
        return "", 0
    return f"{path}.weight", module.weight.shape[1]


def _tied(values: Values, table: str) -> str:
    """Return the head with the embedding's weight; "" if there is none."""
    head, skeleton = values.stream.head or "", values.skeleton
    return head if head and skeleton.get_parameter(f"{head}.weight") is skeleton.get_parameter(table) else ""


def _block(columns: int) -> int:
    """Return the largest block for a row; 0 if there is none."""
    return next((block for block in _BLOCKS if columns % block == 0), 0)


def _grouped(form: str, block: int) -> WeightScheme:
    return WeightScheme(format=form, granularity="group", group=block)


def _not_of(scheme: WeightScheme | None, columns: int) -> str:
    """Describe why a head's codes cannot be looked up; "" if they can."""
    if scheme is None or load_format(scheme.format).bits not in BITS or not scheme.format.startswith("int"):
        return "the head is not stored in blocks of integers"
    return "the head's last block is filled up" if columns % block_size(columns, scheme, "head") else ""


def _rounded(values: Values, name: str, scheme: WeightScheme, head: str = "") -> QuantTensor:
    """Round the embedding, or its difference to a head's codes, to nearest, some rows at a time."""
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
