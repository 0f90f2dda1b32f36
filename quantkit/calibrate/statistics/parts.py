"""Sums in eight parts, equal bit for bit for any number of ranks.

Part p holds every eighth sequence, from the p-th on. A part is summed by itself, in the order of its sequences; then
parts are added in one tree, whose leaves are

    ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))

Each rank holds the leaves under one node of it: of two ranks the first has the even parts, the second the odd ones. The
nodes above are total by pairs of ranks, each of which adds what the other sends. Floating-point addition commutes, so
both find the same bits, and all ranks end with all sums. The two sides of the last addition are the halves of a Hessian
(`InputStats.halves`): every other sequence, as without ranks.

Every forward takes as many sequences as divide all parts, so that a sequence's values do not depend on ranks either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from quantkit.calibrate import PARTS
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics.sums import DRIFT, DTYPES, LAG, SUMS, InputStats, Sums, add, panels

# bytes of one message: as many as its cost is hidden in, and few beside a Hessian
_MESSAGE = 1 << 22
# rows of weights that are worth a call of their own where two ranks have some, and more of them
_FEW, _ROWS = 128, 512
_TREE = (0, 4, 2, 6, 1, 5, 3, 7)

# some rows of some weights with one input: number of each weight, and its rows
Piece = list[tuple[int, slice]]
# kind of a sum, some rows of it, and whether this rank and the other one have them
_Sent = tuple[str, torch.Tensor, bool, bool]


@dataclass(frozen=True)
class Share:
    """A rank's share of a set of sequences.

    Args:
        ranks: the ranks.
        samples: number of sequences of all ranks.
        at_once: number of sequences whose activations fit the memory.
        device: device of the sums.
    """

    ranks: Ranks
    samples: int
    at_once: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts of this rank, in the order of the tree."""
        count = PARTS // self.ranks.count
        return _TREE[self.ranks.number * count : (self.ranks.number + 1) * count]

    def size(self, part: int) -> int:
        """Count the sequences of a part."""
        return len(range(part, self.samples, PARTS))

    @property
    def rows(self) -> list[int]:
        """Sequences of this rank by their numbers in the whole set, in the order in which it holds them."""
        return [row for part in self.parts for row in range(part, self.samples, PARTS)]

    @property
    def chunk(self) -> int:
        """Sequences of one forward: as many as fit, and divide every part."""
        sizes = math.gcd(*(self.size(part) for part in range(PARTS)))
        return max(size for size in range(1, sizes + 1) if sizes % size == 0 and (size <= self.at_once or size == 1))

    def first(self, samples: int) -> tuple[Share, list[int]]:
        """Return the share of the first sequences of the set, and where this rank holds them among its own."""
        fewer = replace(self, samples=min(samples, self.samples))
        there = {row: place for place, row in enumerate(self.rows)}
        return fewer, [there[row] for row in fewer.rows]

    def by_part(self, chunk: int) -> Iterator[tuple[int, range]]:
        """Yield each part of this rank with the numbers of its chunks."""
        start = 0
        for part in self.parts:
            count = self.size(part) // chunk
            yield part, range(start, start + count)
            start += count

    def summed(self, name: str, members: Sequence[str], lots: Iterable[InputStats | None]) -> InputStats:
        """Return the sums of all ranks from those of this rank's parts.

        Args:
            name: name of the shared input.
            members: its linears, of which some may have lags.
            lots: statistics of each part in the order of `parts`, made as they are asked for; None, or without tokens,
                for a part that no token reached.

        Raises:
            Stopped: `rank-lost`.
        """
        total, step = _folded(iter(lots), len(self.parts)), 1
        while step < self.ranks.count:
            total = self._exchanged(total, self.ranks.number ^ step, members)
            step *= 2
        return InputStats.of_sums(total, name) if total else InputStats(name=name)

    def _exchanged(self, mine: Sums | None, peer: int, members: Sequence[str]) -> Sums | None:
        """Add the sums of another rank, which adds these; some rows at a time, so that no matrix is there twice."""
        kinds = [*SUMS, *(LAG + linear for linear in members)]
        here = [0] * (5 + len(kinds)) if mine is None else [*mine.counts, mine.columns, *mine.rows(kinds)]
        there = torch.zeros(len(here), dtype=torch.int64)
        self.ranks.swap(peer, torch.tensor(here), there)
        counts, columns, rows = tuple(there[:4].tolist()), int(there[4]), there[5:].tolist()
        if mine is None and not counts[0]:
            return None
        total = Sums(columns=columns) if mine is None else mine
        together: list[_Sent] = []
        for kind, ours, others in zip(kinds, here[5:], rows, strict=True):
            if kind == DRIFT and bool(ours) != bool(others) and here[0] and counts[0]:
                total.values.pop(kind, None)  # it is known of one side alone
                continue
            value = total.values.get(kind)
            if value is None and others:
                total.values[kind] = value = torch.zeros(others, columns, dtype=DTYPES.get(kind), device=self.device)
            together += (
                [(kind, panel, bool(ours), bool(others)) for panel in panels(kind, value)] if value is not None else []
            )
        for few in _batches(together):
            self._swapped(peer, few)
        return total.counting(counts)

    def _swapped(self, peer: int, few: Sequence[_Sent]) -> None:
        """Send and receive some panels as one message."""
        flat = [panel.reshape(-1).view(torch.float32) for _, panel, ours, _ in few if ours]
        size = sum(panel.numel() * panel.itemsize // 4 for _, panel, _, others in few if others)
        heard = torch.empty(size, device=self.device) if size else None
        self.ranks.swap(peer, torch.cat(flat) if flat else None, heard)
        start = 0
        for kind, panel, ours, others in few:
            if heard is None or not others:
                continue
            end = start + panel.numel() * panel.itemsize // 4
            other, start = heard[start:end].view(panel.dtype).reshape(panel.shape), end
            if ours:
                add(kind, panel, other)
            else:
                panel.copy_(other)


def _batches(panels: Iterable[_Sent]) -> Iterator[list[_Sent]]:
    """Cut panels into messages of a few megabytes."""
    few, size = list[_Sent](), 0
    for sent in panels:
        few.append(sent)
        size += sent[1].nbytes
        if size > _MESSAGE:
            yield few
            few, size = [], 0
    if few:
        yield few


def _folded(lots: Iterator[InputStats | None], count: int) -> Sums | None:
    """Add the next statistics in a tree; at most one more sum than it has levels is there at a time."""
    if count == 1:
        seen = next(lots)
        return None if seen is None or not seen.tokens else seen.sums()
    left, right = _folded(lots, count // 2), _folded(lots, count // 2)
    if left is None or right is None:
        return left if right is None else right
    if (DRIFT in left.values) != (DRIFT in right.values):
        left.values.pop(DRIFT, None)
        right.values.pop(DRIFT, None)
    for kind, value in right.values.items():
        if kind in left.values:
            add(kind, left.values[kind], value)
        else:
            left.values[kind] = value
    return left.counting(right.counts)


def pieces(rows: Sequence[int], *, apart: bool) -> list[Piece]:
    """Cut the rows of weights with one input into pieces, which do not depend on the ranks.

    Args:
        rows: number of rows of each weight.
        apart: whether rows share nothing.

    """
    whole, count = sum(rows), 1
    while apart and count < PARTS and whole // (2 * count) >= (_ROWS if count > 1 else _FEW):
        count *= 2
    ends, cut = [whole * (number + 1) // count for number in range(count)], list[Piece]()
    for number, end in enumerate(ends):
        start, piece, at = ends[number - 1] if number else 0, Piece(), 0
        for weight, length in enumerate(rows):
            low, high = max(start, at), min(end, at + length)
            if low < high:
                piece.append((weight, slice(low - at, high - at)))
            at += length
        cut.append(piece)
    return cut
