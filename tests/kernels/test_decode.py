"""The kernel of decode steps in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it
from kernel_tools import bound, quantized, within_bounds
from thorough import beside

from quantkit.formats import load_format
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import pack, pack_parts
from quantkit.kernels.matmul import weight_only

GROUP = {"granularity": "group"}
ZEROS = {**GROUP, "format": "int4", "symmetric": False}
ONE = Config(block_n=16, block_m=8, unroll=2, split=1, warps=2, stages=0)
TWO = Config(block_n=32, block_m=16, unroll=1, split=1, warps=4, stages=0)
MANY = replace(TWO, block_m=32, unroll=2)
LONG = replace(ONE, unroll=4, warps=8)

# scheme, M, N, K: K and N that no tile divides, an odd K, groups of half a tile, a tile, two and four, a row; one row
# of x, a block, more than one
CASES: list[tuple[dict[str, Any], int, int, int, Config]] = [
    ({**ZEROS, "group": 64}, 1, 48, 384, ONE),
    ({**ZEROS, "group": 64}, 17, 40, 192, TWO),
    ({**ZEROS, "group": 64}, 8, 24, 2112, LONG),
    ({**ZEROS, "group": 32}, 3, 40, 160, ONE),
    ({**ZEROS, "group": 128}, 32, 72, 256, MANY),
    ({"format": "int4", **GROUP, "group": 128}, 9, 40, 640, ONE),
    ({"format": "int4", **GROUP, "group": 256}, 5, 16, 512, TWO),
    ({"format": "int4", "granularity": "channel", "symmetric": False}, 17, 72, 101, ONE),
    ({"format": "int4", "granularity": "channel"}, 31, 24, 100, MANY),
    ({"format": "int8"}, 3, 40, 99, TWO),
    ({"format": "int8", **GROUP, "group": 64, "symmetric": False}, 1, 33, 128, ONE),
    ({"format": "int8", "granularity": "channel", "symmetric": False}, 16, 33, 72, TWO),
    ({"format": "fp8_e4m3", "granularity": "channel"}, 17, 24, 72, ONE),
    ({"format": "fp8_e4m3", "granularity": "block", "group": 128}, 3, 136, 200, TWO),
    ({"format": "nf4"}, 3, 24, 128, TWO),
    ({"format": "nf4", "group": 32, "scale": "double"}, 1, 40, 96, ONE),
    ({"format": "nf4", "group": 64, "scale": "double"}, 32, 24, 192, MANY),
]
BRIEF = [CASES[place] for place in (0, 3, 7, 9, 12, 15)]


def named(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("scheme", "M", "N", "K", "config"), CASES, ids=named)
def test_products_equal_float64(scheme: dict[str, Any], M: int, N: int, K: int, config: Config) -> None:
    within_bounds(scheme, M, N, K, config)


@pytest.mark.parametrize(("scheme", "M", "N", "K", "config"), beside(BRIEF, CASES), ids=named)
def test_bfloat16_inputs(scheme: dict[str, Any], M: int, N: int, K: int, config: Config) -> None:
    tensor = quantized(N, K, **scheme)
    weight = load_format(scheme["format"]).dequantize(tensor).double()
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(7)).bfloat16()
    y = weight_only(x, pack(tensor), config)
    allowed = bound(x.double(), weight, y, decoded=2.0**-8 if scheme["format"] == "nf4" else 0.0, bits=7)
    assert y.dtype == torch.bfloat16
    assert torch.all((y.double() - x.double() @ weight.T).abs() <= allowed)


@pytest.mark.parametrize("config", [ONE, TWO, MANY])
def test_each_column_of_the_weight_meets_its_column_of_x(config: Config) -> None:
    """A product with ones and zeros reads single weights off, and rounds nothing."""
    codes = torch.randint(-8, 8, (40, 136), generator=torch.Generator().manual_seed(5), dtype=torch.int8)
    y = weight_only(torch.eye(136).half(), pack_parts("int4", codes, torch.ones(40, 1)), config)
    assert torch.equal(y.T, codes.half())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # words taken as numbers may be no numbers
def test_the_raw_twin_multiplies_words_as_they_are() -> None:
    codes = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
    weight = pack_parts("int4", codes, torch.ones(16, 1))
    # every fragment's operand is the whole word: its first 16 columns, four times over
    words = weight.words.view(torch.float16).reshape(8, 4, 2, 2, 2).permute(3, 0, 2, 1, 4).reshape(16, 16)
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, 37] = 1.0
    y = weight_only(x, weight, ONE, decode=False)
    finite = y[0].isfinite()
    assert torch.equal(y[0][finite], words[:, 37 % 16][finite]) and finite.any()
