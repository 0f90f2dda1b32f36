"""Sums in eight parts: any number of ranks ends with the bits of one, whatever parts lack tokens."""

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics.parts import Share, pieces
from quantkit.calibrate.statistics.sums import InputStats


class Wired(Ranks):
    """A rank in a thread, whose messages go through queues."""

    def __init__(self, number: int, count: int, wires: dict[tuple[int, int], "queue.Queue[Tensor]"]) -> None:
        super().__init__(number, count, number, None)
        self._wires = wires

    def swap(self, peer: int, mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        if mine is not None:
            self._wires[self.number, peer].put(mine.clone())
        if theirs is not None:
            theirs.copy_(self._wires[peer, self.number].get(timeout=20))
        return theirs


def summed(count: int, inputs: Sequence[Tensor], drifts: bool) -> list[InputStats]:
    """Sums of sequences [tokens, K], some without tokens, as each of `count` ranks finds them."""
    wires: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
    for one in range(count):
        for other in range(count):
            wires[one, other] = queue.Queue()
    found: dict[int, InputStats] = {}

    def work(number: int) -> None:
        share = Share(Wired(number, count, wires), len(inputs))

        def lot(part: int) -> InputStats:
            sums = InputStats(name="up", part=part)
            for row in range(part, len(inputs), 8):
                if len(inputs[row]):
                    x = inputs[row][None]
                    lags = {"up": x[..., :3] * 0.5} if drifts else {}
                    sums.add(x, x * 1.25 if drifts else None, lags, x if drifts else None)
            return sums

        found[number] = share.summed("up", ("up", "gate"), (lot(part) for part in share.parts))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == count
    return [found[number] for number in range(count)]


def bits(seen: InputStats, drifts: bool) -> list[Tensor]:
    values = [seen.hessian, seen.noise, seen.mean, seen.mean_square, seen.low, seen.high, *seen.halves]
    if drifts:
        lag = seen.taken_lag("up")
        assert seen.drift is not None and lag is not None
        values += [seen.drift, lag]
    return values


@pytest.mark.parametrize("width", [17, 300])
@pytest.mark.parametrize("drifts", [False, True])
def test_sums_are_the_same_bits_on_any_number_of_ranks(width: int, drifts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 0, 3, 7, 0, 2, 9, 4, 6, 0, 1, 8]  # part 1 has no token at all
    inputs = [torch.randn(length, width, generator=generator) for length in lengths]
    (alone,) = summed(1, inputs, drifts)
    everything = torch.cat(inputs).double()
    if not drifts:
        assert torch.allclose(alone.hessian.double(), everything.T @ everything / len(everything), atol=1e-5)
    assert alone.tokens == len(everything)
    assert (alone.drift is not None) == drifts
    expected = bits(alone, drifts)
    for count in (2, 4, 8):
        for other in summed(count, inputs, drifts):
            assert other.tokens == alone.tokens
            for mine, theirs in zip(expected, bits(other, drifts), strict=True):
                assert torch.equal(mine, theirs)


def test_halves_are_those_of_one_process() -> None:
    inputs = [torch.randn(6, 24, generator=torch.Generator().manual_seed(row)) for row in range(11)]
    (seen,), plain = summed(1, inputs, False), InputStats(torch.stack(inputs).split(3), "up")
    for mine, theirs in zip(seen.halves, plain.halves, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert torch.allclose(seen.noise, plain.noise, atol=1e-6)


def test_an_input_that_no_rank_reaches_has_no_tokens() -> None:
    assert [seen.tokens for seen in summed(4, [torch.empty(0, 8)] * 8, False)] == [0] * 4


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 9, 16, 24, 40])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_ranks_share_all_sequences_and_chunks_do_not_depend_on_them(samples: int, count: int) -> None:
    shares = [Share(Ranks(number, count, 0, None), samples, at_once=3) for number in range(count)]
    assert sorted(row for share in shares for row in share.rows) == list(range(samples))
    assert len({share.chunk for share in shares} | {Share(Ranks(0, 1, 0, None), samples, at_once=3).chunk}) == 1
    if count <= samples:
        assert all(share.rows for share in shares)
    for share in shares:
        chunks = [(part, list(numbers)) for part, numbers in share.by_part(share.chunk)]
        assert [number for _, numbers in chunks for number in numbers] == list(range(len(share.rows) // share.chunk))
        first, places = share.first(4)
        assert [share.rows[place] for place in places] == first.rows
        assert all(row < 4 for row in first.rows)


@pytest.mark.parametrize("rows", [[1], [127], [256], [960], [576, 192, 192], [1536, 1536], [7, 4096, 1]])
def test_pieces_cover_the_rows_once(rows: list[int]) -> None:
    for apart in (True, False):
        cut = pieces(rows, apart=apart)
        assert len(cut) in ((1, 2, 4, 8) if apart else (1,))
        covered = [(weight, row) for piece in cut for weight, some in piece for row in range(rows[weight])[some]]
        assert covered == [(weight, row) for weight, length in enumerate(rows) for row in range(length)]
