"""A quantized layer runs what its table says, and computes what its weight stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it
from kernel_tools import bound, quantized

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.kernels import linear as layers
from quantkit.kernels.dispatch import EXPANDED, INT_MM, OURS, Choice, Config, Table
from quantkit.kernels.layout import pack
from quantkit.kernels.linear import QuantLinear, unmeasured
from quantkit.kernels.matmul import by_slabs

N, K = 40, 128
TILES = Config(block_n=64, block_m=16, unroll=1, split=2, warps=4, stages=2)
SCHEME = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False}


def table(*choices: tuple[int, str, Any]) -> Table:
    return Table({(N, K): tuple(Choice(batch, name, config, 1e-6, 1) for batch, name, config in choices)})


def test_no_rows_have_no_product_and_other_types_are_refused() -> None:
    layer = QuantLinear(pack(quantized(N, K, **SCHEME)))
    assert layer(torch.zeros(2, 0, K, dtype=torch.float16)).shape == (2, 0, N)
    with pytest.raises(InputError, match=r"kernel-dtype.*float32"):
        layer(torch.zeros(1, K))


def test_each_number_of_rows_goes_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = quantized(N, K, **SCHEME)
    chosen = table((2, OURS, TILES.as_dict()), (8, EXPANDED, None))
    layer = QuantLinear(pack(tensor), table=chosen)
    expanded: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        expanded.append(1)
        return by_slabs(*arguments)

    monkeypatch.setattr(layers, "by_slabs", counted)
    for rows, expected in ((1, 0), (2, 0), (3, 1), (8, 1), (9, 1)):
        expanded.clear()
        layer(torch.ones(rows, K, dtype=torch.float16))
        assert len(expanded) == expected, rows


@pytest.mark.parametrize("name", [OURS, EXPANDED])
def test_it_computes_what_the_weight_stands_for(name: str) -> None:
    tensor = quantized(N, K, **SCHEME)
    weight = load_format("int4").dequantize(tensor).double()
    bias = torch.arange(N).half()
    config = TILES.as_dict() if name == OURS else None
    layer = QuantLinear(pack(tensor), bias, table=table((4, name, config)))
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).half()
    y = layer(x.requires_grad_()).detach()
    assert y.shape == (2, 3, N) and y.dtype == torch.float16
    x = x.detach()
    flat = x.reshape(-1, K).double()
    allowed = bound(flat, weight, y.reshape(-1, N), decoded=2.0**-11 if name == EXPANDED else 0.0)
    # the sum is rounded once more by the bias
    allowed += (flat @ weight.T).abs() * 2.0**-11 + y.reshape(-1, N).double().abs() * 2.0**-11
    assert torch.all((y.reshape(-1, N).double() - (flat @ weight.T + bias.double())).abs() <= allowed)


def test_inputs_of_eight_bits_are_quantized_by_token() -> None:
    tensor = quantized(N, K, format="int8")
    chosen = table((2, OURS, TILES.as_dict()), (4, INT_MM, None))
    layer = QuantLinear(pack(tensor, native=True), table=chosen)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).half()
    exact = x.double() @ load_format("int8").dequantize(tensor).double().T
    found = layer(x)
    assert 0 < (found.double() - exact).norm() / exact.norm() < 0.02
    # two rows take our kernel, three torch's; both have exact sums
    assert torch.equal(layer(x[:2]), found[:2])


def test_what_it_cannot_run_is_refused() -> None:
    packed = pack(quantized(N, K, **SCHEME))
    with pytest.raises(InputError, match=r"kernel-unsupported.*torch\._int_mm"):
        QuantLinear(packed, table=table((1, "torch._int_mm", None)))
    with pytest.raises(InputError, match=r"kernel-unsupported.*dequantize_matmul"):
        QuantLinear(pack(quantized(N, K, format="int8"), native=True), table=table((1, EXPANDED, None)))
    odd = pack(quantized(N, 100, format="int8"), native=True)
    with pytest.raises(InputError, match=r"kernel-unsupported.*torch\._int_mm.*runs quantkit with its tile sizes\b"):
        QuantLinear(odd, table=Table({(N, 100): (Choice(1, INT_MM, None, 1e-6, 1),)}))
    with pytest.raises(InputError, match="shape-unmeasured"):
        QuantLinear(packed, table=Table({(1, 1): ()}))


def test_without_measurements_small_batches_take_the_kernel_and_large_ones_expand() -> None:
    found = unmeasured(pack(quantized(N, K, **SCHEME)))
    assert [found.choose((N, K), rows).candidate for rows in (1, 128, 129, 4096)] == [OURS, OURS, EXPANDED, EXPANDED]
    assert all(choice.config for choice in found.choices[N, K] if choice.candidate == OURS)
    found = unmeasured(pack(quantized(N, K, format="int8"), native=True))
    assert [found.choose((N, K), rows).candidate for rows in (1, 32, 33, 4096)] == [OURS, OURS, INT_MM, INT_MM]
    found = unmeasured(pack(quantized(N, 100, format="int8"), native=True))
    assert found.choose((N, 100), 4096).candidate == OURS, "torch takes no such K"
