"""Store the ends of a model in a graph: quantized token embeddings, and a head with more bits for some rows.

    float      float32 embeddings
    int8       rounded to nearest, in blocks along a row
    shared     the codes of the tied head, stored once
    refined    the codes of the tied head, and 2 bits more for the remaining error of each value

A solver chooses a head's codes for its product; single values may differ from the weight by a step. That hardly changes
the product but harms a looked-up embedding; two bits recover most of it. GatherBlockQuantized looks up and dequantizes
(ONNX Runtime's docs/ContribOperators.md).

The error of a head's row counts by the probability of its word. Vocabularies begin with frequent words (which byte-pair
encoding merged first), so 8 bits for the first rows, a few hundredths of the head, recover half of the loss.
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
# blocks for an embedding's own codes; the largest that divides a row is used
_BLOCKS = (64, 32, 16)
_FLOAT, _OWN, _ROWS = "embedding-float", "embedding-own", "head-rows-left"


def ends(values: Values, storage: Storage, rows: int) -> tuple[GraphEnds, list[Decision]]:
    """Choose the storage of both ends, and record what is not possible.

    Args:
        values: the quantized model.
        storage: requested storage of the embedding.
        rows: requested number of the head's first rows in 8 bits, for a head in fewer bits.
    """
    table, taken = coded(values, storage)
    head = values.stream.head or ""
    scheme = values.schemes.get(head)
    if not rows or scheme is None or load_format(scheme.format).bits >= 8:
        return GraphEnds(table), taken
    shape = values.skeleton.get_parameter(f"{head}.weight").shape
    block, why = _block(shape[1]), ""
    if values.before is None:
        why = "a bundle no longer has their original weights"
    elif not scheme.rows_apart:
        why = "its scales are not per row"
    elif not block:
        why = f"{_BLOCKS[-1]} does not divide rows of {shape[1]}"
    if why or values.before is None:
        reason = f"its first rows get no more bits: {why}"
        return GraphEnds(table), [*taken, decision("onnx", _ROWS, head, reason, rows, 0)]
    weight = values.before(f"{head}.weight")[: min(rows, shape[0] - 1)]
    return GraphEnds(table, head, nearest(weight, _grouped("int8", block))), taken


def with_ends(values: Values, storage: Storage, rows: int) -> Values:
    """Return the expected values of a model with a graph's ends."""
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
    """Store the embedding by `storage` if possible; None if it stays in floats."""
    if storage == "float":
        return None, []
    name, columns = _table(values.skeleton)
    if not name:
        return None, [decision("onnx", _FLOAT, "embedding", "no table of token embeddings was found")]
    block, head = _block(columns), _tied(values, name)
    scheme = values.schemes.get(head)
    reason = "" if block else f"{_BLOCKS[-1]} does not divide rows of {columns}"
    if head and scheme is None:
        reason = f"{head} shares it and reads floats"
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
    return "the head's last block is padded" if columns % block_size(columns, scheme, "head") else ""


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
