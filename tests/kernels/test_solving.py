"""The solvers' kernels: their tables round as formats do, and what they are compiled to fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it

from quantkit.formats import load_format
from quantkit.kernels.solving.choose import choose
from quantkit.kernels.solving.grid import search_steps
from quantkit.passes.solvers.device import table

PROGRAM = """
import json, sys
from quantkit.kernels.solving.ahead import BLOCK, compiled, compiled_of_block, variants
known, found = variants(), []
for sm, name in json.load(sys.stdin):
    kernel, words = known[name]
    got = compiled(kernel, sm, **words)
    products = got.count("FFMA", "HMMA", "HGMMA", loop=False)
    found.append([sm, name, got.spill_bytes, got.registers, got.shared_bytes, products])
for name in BLOCK:
    got = compiled_of_block(name, 90)
    found.append([90, name, got.spill_bytes, got.registers, got.shared_bytes, 1])
print(json.dumps(found))
"""
# every kernel on the newest, with whole numbers and with the largest table; all others are in kernel_resources.py
WANTED = [
    *((90, f"choose, {grid}") for grid in ("int4 zeros", "256 values")),
    *((90, name) for name in ("descend, int4 zeros g64", "search, int4 zeros, hessian")),
    *((90, "losses, int4 zeros, hessian"), (80, "choose, int4 zeros")),
]


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


def test_nothing_spills(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(WANTED),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for sm, name, spills, registers, shared, products in json.loads(done.stdout):
        assert spills == 0, (sm, name)
        # two programs of eight warps have room: of 65,536 registers, and of the shared memory of an A100
        assert registers <= 168 and shared <= 80 * 1024, (sm, name)
        assert products > 0, (sm, name)
