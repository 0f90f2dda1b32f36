"""The solvers' kernels: their tables round as formats do, and what lies otherwise in memory is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.formats import load_format
from quantkit.kernels.solving.gptq import choose
from quantkit.kernels.solving.search import search_steps
from quantkit.passes.solvers.device import table


@pytest.mark.parametrize(
    ("name", "steps"), [("nf4", 4), ("mxfp4", 4), ("nvfp4", 4), ("fp8_e4m3", 8), ("fp8_e5m2", 8), ("mxfp8", 8)]
)
def test_a_table_rounds_as_its_format_does(name: str, steps: int) -> None:
    """Between values, on them, halfway, beyond the ends; zero as it is, next to it the sign is kept. Bit for bit."""
    form = load_format(name)
    values, edges = table(form, torch.device("cpu"))
    assert values is not None and edges is not None
    assert search_steps(values) == steps and len(edges) == len(values) - 1
    some = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * form.high / 2
    halfway = (values[1:] + values[:-1]) / 2
    past = halfway.nextafter(torch.tensor(torch.inf))
    units = torch.cat([some, values, halfway, past, torch.tensor([1e-30, -1e-30])])
    units = torch.where(units == 0, 0.0, units)
    # what the kernel counts: edges below
    found = values[torch.searchsorted(edges, units)]
    expected = form.snap(units)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_what_lies_otherwise_in_memory_is_refused() -> None:
    square = torch.eye(16)
    with pytest.raises(ValueError, match="contiguous"):
        choose(
            torch.zeros(8, 16).T, square, torch.ones(16), torch.arange(16), torch.ones(1, 8), None, None, None,
            -8.0, 7.0, 16, "ieee",
        )  # fmt: skip
