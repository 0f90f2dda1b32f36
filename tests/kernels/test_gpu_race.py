"""The race test of `benchmarks/gpu/run_all.py` sees a race: planted ones, in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux alone has it

import triton.language as tl  # noqa: E402

HERE = Path(__file__).parents[2] / "benchmarks/gpu"


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run imports by its own names."""
    monkeypatch.syspath_prepend(str(HERE))


@triton.jit
def split_sum(x_ptr, y_ptr, sums_ptr, count_ptr, WAITS: tl.constexpr, RESETS: tl.constexpr):
    """y [16] = x [2, 16] summed over rows, each by one program; the last to arrive adds, or, planted, the first."""
    row, column = tl.program_id(0), tl.arange(0, 16)
    tl.store(sums_ptr + row * 16 + column, tl.load(x_ptr + row * 16 + column).to(tl.float32))
    arrived = tl.atomic_add(count_ptr, 1) % 2
    if (arrived == 1 and WAITS) or (arrived == 0 and not WAITS):
        total = tl.load(sums_ptr + column) + tl.load(sums_ptr + 16 + column)
        tl.store(y_ptr + column, total.to(tl.float16))
    if RESETS and arrived == 1:
        tl.store(count_ptr, 0)


@pytest.mark.parametrize(
    ("waits", "resets", "seen"), [(True, True, set()), (False, True, {"differing"}), (True, False, {"counters_left"})]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NaN, in the interpreter
def test_a_race_and_a_counter_left_behind_are_seen(waits: bool, resets: bool, seen: set[str]) -> None:
    from parts.race import raced

    def product(x: torch.Tensor, memory: Any) -> torch.Tensor:
        y = torch.empty(16, dtype=torch.float16)
        sums, counts = memory.of(32, 1, x.device)
        split_sum[(2,)](x, y, sums, counts, WAITS=waits, RESETS=resets)
        return y

    inputs = [torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3)]
    got = raced(product, inputs, 6)
    assert {name for name in ("differing", "counters_left") if got[name]} == seen
    if not seen:
        assert torch.equal(got["first"], torch.stack([x.float().sum(0).half() for x in inputs]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NaN, in the interpreter
def test_graphs_that_share_a_workspace_are_seen(shared: bool) -> None:
    from parts.race import beside

    from quantkit.kernels.workspace import Workspace, present

    one, calls = Workspace(), 0

    def product(x: torch.Tensor, memory: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        y = torch.zeros(16, dtype=torch.float16)
        sums, counts = (one if shared else memory or present(x.device)).of(32, 1, x.device)
        # planted: another graph's program counts itself between two of this one
        counts += int(shared and calls == 6)
        split_sum[(2,)](x, y, sums, counts, WAITS=True, RESETS=True)
        return y

    inputs = [torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).half() for seed in range(2)]
    got = beside(product, inputs, 4)
    assert (got["launches"], got["differing"] > 0) == (8, shared)


def test_a_result_of_the_last_input_and_one_not_written_are_seen() -> None:
    from parts.race import raced

    kept: list[torch.Tensor] = []

    def late(x: torch.Tensor, memory: Any) -> torch.Tensor:
        """What was asked before: on one input alone it would be right each time."""
        kept.append(x.sum(0).half())
        return kept[-2 if len(kept) > 4 else -1].clone()

    inputs = [torch.full((2, 4), float(number)).half() for number in range(3)]
    assert raced(late, inputs[:1], 9)["differing"] == 0
    kept.clear()
    assert raced(late, inputs, 9)["differing"] > 0

    y = torch.zeros(4, dtype=torch.float16)

    def unwritten(x: torch.Tensor, memory: Any) -> torch.Tensor:
        y[:3] = x.sum(0)[:3]
        return y

    assert raced(unwritten, inputs, 9)["differing"] == 8
