"""What a GPU's ceilings say of themselves: the samples that were taken, planted here, and nothing besides."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.kernels.workspace import present
from quantkit.measurement.cuda import device as limits
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.operators.ceilings import Ceiling, joined, median_interval
from quantkit.measurement.operators.tax import Limits

DEVICE = GpuDevice("cpu", dry=True)
BEFORE = np.array([[101.0, 99.0], [100.0, 103.0], [98.0, 102.0], [97.0, 104.0]])
AFTER = BEFORE - 10


def read(taken: np.ndarray) -> Ceiling:
    return Ceiling("ceiling.read", "B/s", tuple(taken.ravel()), {}, {})


def test_every_sample_is_kept_in_the_order_in_which_it_was_taken() -> None:
    assert read(BEFORE).samples == (101.0, 99.0, 100.0, 103.0, 98.0, 102.0, 97.0, 104.0)
    (both,) = joined([read(BEFORE)], [read(AFTER)])
    row = both.row(device=DEVICE.identity(), versions={})
    values = sorted([*BEFORE.ravel(), *AFTER.ravel()])
    assert (row.n, row.value) == (16, np.median(values))
    assert row.ci95 == median_interval(values)
    assert row.quantiles == {f"p{q}": pytest.approx(np.percentile(values, q)) for q in (50, 90, 99)}
    # the halves are the run's start and its end
    assert row.aa_spread == pytest.approx(abs(np.median(BEFORE) / np.median(AFTER) - 1))


def test_of_few_samples_no_interval_is_stated() -> None:
    (both,) = joined([read(BEFORE[:1])], [read(AFTER[:1])])
    row = both.row(device=DEVICE.identity(), versions={})
    assert (row.n, row.value, row.ci95) == (4, 95.0, None)


def test_what_the_device_lacks_says_so_and_limits_nothing() -> None:
    reason = "not measured: no kernel"
    found = [read(BEFORE), Ceiling("ceiling.compute", "op/s", (), {"compute_type": "fp8_e4m3"}, {}, reason)]
    row = joined(found, found)[1].row(device=DEVICE.identity(), versions={})
    assert (row.value, row.n, row.quantiles, row.ci95) == (None, None, None, None)
    assert row.flags == ["not measured: no kernel"]
    known = Limits.of(found)
    assert (known.read, known.compute) == (100.5, {})
    assert 0 < known.error < 0.1  # as far as the order statistics of what was read lie apart


def test_a_run_hands_on_what_its_clock_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(samplers: Any, blocks: int, generator: Any) -> list[np.ndarray]:
        return [BEFORE[:blocks] for _ in samplers]

    monkeypatch.setattr(limits, "interleaved", planted)
    monkeypatch.setattr(limits.Implementation, "ready", lambda self: lambda: 1.0)
    generator = np.random.default_rng(0)
    found = {each.name: each for each in limits.sampled(DEVICE, 4, generator)}
    assert found["ceiling.launch"].samples == tuple(BEFORE.ravel())
    assert found["ceiling.copy"].samples == pytest.approx(tuple(8 * 1024 / BEFORE.ravel()))
    rows = limits.measured(DEVICE, 3, generator)
    assert {row["n"] for row in rows if row["value"] is not None} == {6}
    (copy,) = [row for row in rows if row["name"] == "ceiling.copy"]
    assert (copy["value"], copy["better"]) == (pytest.approx(np.median(8 * 1024 / BEFORE[:3])), "higher")


def test_a_copy_is_a_kernel_that_copies_all() -> None:
    x = torch.arange(2 * 3 * 256, dtype=torch.int32)
    y = torch.zeros_like(x)
    limits._copy[(2,)](x, y, 3, BLOCK=256)
    assert torch.equal(x, y)


class Card:
    """A GPU's graphs and clock: every call takes its seconds, a kernel behind its like the fewer of two."""

    TAKES: ClassVar = {"ours": (5e-6, 3e-6), "theirs": (5e-6, 5e-6), "plain": (2e-6, 2e-6), "long": (4e-4, 4e-4)}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.graph: list[str] = []
        self.owners: set[Any] = set()
        cuda = {"CUDAGraph": SimpleNamespace, "graph": self.capture, "Event": self.event}
        for name, stand_in in {**cuda, "is_available": lambda: True, "synchronize": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        number = SimpleNamespace(add_=lambda _: self.graph.append("plain"))
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: number)

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        self.graph = []
        yield
        calls = self.graph

        def replay() -> None:
            for last, name in zip([None, *calls], calls, strict=False):
                self.now += self.TAKES[name][last == name]

        graph.replay = replay

    def event(self, **_: Any) -> Any:
        made = SimpleNamespace(at=0.0, synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: 1e3 * (end.at - made.at)
        return made

    def side(self, name: str, **words: Any) -> Callable[[], float]:
        def step() -> None:
            self.owners.add(present(torch.device("cpu")))
            self.graph.append(name)

        return limits.Implementation(name, [step] * 4, 0, {}, **words).ready()


def test_kernels_that_hide_their_start_behind_themselves_are_timed_behind_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch)
    assert [card.side(name)() for name in ("ours", "theirs")] == pytest.approx([5e-6, 5e-6])
    eager = present(torch.device("cpu"))
    # each graph with a workspace of its own, that of one call too; and the call before them in the stream's
    assert len(card.owners - {eager}) == 4
    alone = card.side("ours", spaced=False)
    assert 3e-6 < alone() < 3.1e-6
    assert card.side("theirs", spaced=False)() == pytest.approx(5e-6)
    # all copies in turn, and no more of a long product than a millisecond
    assert (card.side("long")(), len(card.graph)) == (pytest.approx(4e-4), 4)


def test_of_one_block_nothing_can_be_drawn_again() -> None:
    from quantkit.measurement.cuda.device import ratio, summary

    generator = np.random.default_rng(0)
    found = summary(BEFORE[:1], generator)
    assert (found["n"], found["value"], found["ci95"]) == (2, 100.0, None)
    assert ratio(BEFORE[:1], AFTER[:1], generator)[1] is None
    low, high = summary(BEFORE, generator)["ci95"]
    assert BEFORE.min() <= low < high <= BEFORE.max()
