"""The weight-only kernels in Triton's interpreter, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it
from kernel_tools import bound, quantized, within_bounds

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.nf4 import VALUES
from quantkit.kernels.decoders import DECODERS
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import KINDS, pack, pack_parts, scales_of
from quantkit.kernels.matmul import by_slabs, dequantize, slab_rows, weight_only
from quantkit.kernels.workspace import Workspace, one_graph, present

WHOLE = Config(block_n=32, block_m=16, unroll=1, split=1, warps=2, stages=2)
SPLIT = Config(block_n=64, block_m=16, unroll=2, split=3, warps=4, stages=3)
GROUP = {"granularity": "group"}

# scheme, M, N, K: K and N that no tile divides, groups of half a tile, a tile and two, a row; one row of x and more
# than a block of them
CASES: list[tuple[dict[str, Any], int, int, int, Config]] = [
    ({"format": "int4", **GROUP, "group": 128}, 1, 48, 256, SPLIT),
    ({"format": "int4", **GROUP, "group": 32, "symmetric": False}, 3, 40, 160, SPLIT),
    ({"format": "int4", **GROUP, "group": 64, "symmetric": False}, 17, 24, 192, WHOLE),
    ({"format": "int4", "granularity": "channel", "symmetric": False}, 17, 72, 100, SPLIT),
    ({"format": "int8"}, 3, 40, 100, WHOLE),
    ({"format": "int8", **GROUP, "group": 64, "symmetric": False}, 1, 33, 128, SPLIT),
    ({"format": "fp8_e4m3", "granularity": "channel"}, 17, 24, 72, SPLIT),
    ({"format": "fp8_e4m3", "granularity": "block", "group": 128}, 3, 136, 200, WHOLE),
    ({"format": "nf4"}, 3, 24, 128, SPLIT),
    ({"format": "nf4", "group": 32, "scale": "double"}, 1, 40, 96, WHOLE),
]


@pytest.mark.parametrize(("scheme", "M", "N", "K", "config"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_products_equal_float64(scheme: dict[str, Any], M: int, N: int, K: int, config: Config) -> None:
    within_bounds(scheme, M, N, K, config)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8_e4m3", "nf4"])
def test_whole_numbers_are_multiplied_exactly(kind: str) -> None:
    form, generator = KINDS[kind], torch.Generator().manual_seed(3)
    codes = torch.randint(0, 2**form.bits, (24, 128), generator=generator)
    if kind == "fp8_e4m3":
        # zero, subnormal numbers and small normal ones: multiples of 2^-9, so that all sums are exact
        codes = codes % 32 + 128 * (codes // 128)
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        codes = codes.to(torch.uint8)
    elif kind == "nf4":
        codes = torch.where(codes % 3 == 0, 0, torch.where(codes % 3 == 1, 7, 15)).to(torch.uint8)
        values = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[(codes.int() > 0).int() + (codes.int() > 7).int()]
    else:
        codes = (codes - form.offset).to(torch.int8)
        values = codes.double()
    x = torch.randint(-2, 3, (3, 128), generator=generator).half()
    want = x.double() @ values.T
    y = weight_only(x, pack_parts(kind, codes, torch.full((24, 1), 0.125)), SPLIT)
    assert torch.equal(y.double(), (want * 0.125).half().double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8_e4m3", "nf4"])
def test_every_code_has_the_bits_of_its_value(kind: str, dtype: torch.dtype) -> None:
    """Read off a product with ones and zeros, which rounds nothing; FP8's two NaNs are no codes of a weight."""
    bits = torch.arange(2 ** KINDS[kind].bits).repeat(256 // 2 ** KINDS[kind].bits).view(4, 64).to(torch.uint8)
    if kind == "fp8_e4m3":
        bits = torch.where(bits % 128 == 127, 0, bits)
        codes = bits.view(torch.float8_e4m3fn)
        values = codes.to(dtype)
    elif kind == "nf4":
        codes, values = bits, torch.tensor(VALUES, dtype=torch.float64).to(dtype)[bits.int()]
    else:
        codes = (bits.int() - 2 ** (KINDS[kind].bits - 1)).to(torch.int8)
        values = codes.to(dtype)
    y = weight_only(torch.eye(64, dtype=dtype), pack_parts(kind, codes, torch.ones(4, 1)), WHOLE)
    assert torch.equal(y.T.contiguous().view(torch.int16), (values + 0.0).view(torch.int16))


@pytest.mark.parametrize("scheme", [case[0] for case in CASES], ids=lambda scheme: "-".join(map(str, scheme.values())))
def test_every_weight_decodes_to_its_value(scheme: dict[str, Any]) -> None:
    tensor = quantized(24, 128, **scheme)
    want = load_format(scheme["format"]).dequantize(tensor)
    found = dequantize(pack(tensor), torch.float32)
    if scheme["format"] == "nf4":
        # the codebook in float16, and a scale whose sum may be rounded otherwise
        assert torch.all((found - want).abs() <= want.abs() * 2.0**-11 + 2.0**-20)
    else:
        assert torch.equal(found, want)


@pytest.mark.parametrize("scheme", [CASES[0][0], CASES[2][0], CASES[5][0], CASES[6][0], CASES[8][0]])
def test_bfloat16_inputs(scheme: dict[str, Any]) -> None:
    """Magic numbers of their own; codes and FP8 are exact there, nf4's codebook has 8 significant bits."""
    tensor = quantized(24, 128, **scheme)
    weight = load_format(scheme["format"]).dequantize(tensor).double()
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    y = weight_only(x, pack(tensor), WHOLE)
    # the interpreter cuts what is written in bfloat16, where a GPU rounds it
    allowed = bound(x.double(), weight, y, decoded=2.0**-8 if scheme["format"] == "nf4" else 0.0, bits=7)
    assert y.dtype == torch.bfloat16
    assert torch.all((y.double() - x.double() @ weight.T).abs() <= allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "K"), [(case[0], case[3]) for case in CASES[2:]], ids=str)
def test_slabs_are_expanded_and_multiplied_one_by_one(scheme: dict[str, Any], K: int, dtype: torch.dtype) -> None:
    """N in whole slabs, with a rest, and in one; the memory is that of the last, larger product."""
    tensor = quantized(296, K, **scheme)
    weight, packed = load_format(scheme["format"]).dequantize(tensor).double(), pack(tensor)
    bits = 11 if dtype == torch.float16 else 7
    for M, rows in ((300, 128), (1, 256), (17, 0), (64, 128)):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
        y = by_slabs(x, packed, rows=rows)
        assert y.dtype == dtype and y.is_contiguous()
        # the weight is rounded to the dtype of x: `dequantize` is
        allowed = bound(x.double(), weight, y, decoded=2.0**-bits * 1.01, bits=bits)
        assert torch.all((y.double() - x.double() @ weight.T).abs() <= allowed)


def test_a_slab_fits_the_cache_and_all_slabs_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gpu = torch.device("cpu"), SimpleNamespace(type="cuda")
    assert [slab_rows(rows, 4096, device) for rows in (40, 4096, 6144, 28672)] == [128, 2048, 2048, 2048]
    h200 = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200 if device is gpu else None)
    assert (slab_rows(4096, 14336, gpu), slab_rows(4096, 1 << 20, gpu)) == (1024, 128)  # type: ignore[arg-type]
    packed, x = pack(quantized(296, 128, format="int8")), torch.ones(3, 128).half()
    with one_graph() as memory:
        by_slabs(x, packed, rows=128)
        slab = memory.floats(128, 128, torch.float16, device)
        by_slabs(x, packed, rows=128)
        assert memory.floats(1, 1, torch.bfloat16, device).data_ptr() == slab.data_ptr()
        assert memory.floats(128, 129, torch.float16, device).data_ptr() != slab.data_ptr()


def test_a_split_sum_is_the_same_every_time_and_leaves_its_counters_at_zero() -> None:
    weight = pack(quantized(72, 320, format="int4", granularity="group", group=64))
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(2)).half()
    memory = Workspace()
    first = weight_only(x, weight, SPLIT, workspace=memory)
    again = weight_only(x, weight, SPLIT, workspace=memory)
    assert torch.equal(first, again)
    sums, counts = memory.of(1, 1, x.device)
    assert not counts.any() and sums.numel() == 3 * 5 * 72


def test_two_graphs_and_two_streams_never_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack(quantized(72, 320, format="int4", granularity="group", group=64))
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(2)).half()
    want = weight_only(x, weight, SPLIT)
    with one_graph() as first:
        assert torch.equal(weight_only(x, weight, SPLIT), want)
    counts = first.of(1, 1, x.device)[1]
    # the first graph is under way on another stream: one of its programs has counted itself
    counts.fill_(1)
    with one_graph() as second:
        assert torch.equal(weight_only(x, weight, SPLIT), want)
    assert counts.eq(1).all() and not second.of(1, 1, x.device)[1].any()
    weight_only(x, weight, SPLIT, workspace=first)
    assert counts.any(), "shared, they would never be zero again"
    gpu, stream = torch.device("cuda"), SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    of_stream = present(gpu)
    assert present(gpu) is of_stream
    # another stream is captured by somebody else, or allocates what torch.compile's graphs take back: each its own
    stream.cuda_stream = 8
    assert present(gpu) is not of_stream
    assert present(gpu) is not present(gpu)
    with one_graph() as own:
        assert present(gpu) is own and present(gpu) is own


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # words taken for numbers may be none
def test_the_raw_twin_multiplies_words_as_they_are() -> None:
    codes = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
    weight = pack_parts("int4", codes, torch.ones(16, 1))
    # every fragment's operand is the whole word: its first 16 columns, four times over
    words = weight.words.view(torch.float16).reshape(8, 4, 2, 2, 2).permute(3, 0, 2, 1, 4).reshape(16, 16)
    if not words.isfinite().all():
        words = words.nan_to_num(0.0, 0.0, 0.0)
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, 37] = 1.0
    y = weight_only(x, weight, WHOLE, decode=False)
    finite = y[0].isfinite()
    assert torch.equal(y[0][finite], words[:, 37 % 16][finite]) and finite.any()


def test_inputs_of_a_wrong_shape_are_refused() -> None:
    weight = pack(quantized(16, 64, format="int8"))
    for x in (torch.zeros(2, 63).half(), torch.zeros(0, 64).half(), torch.zeros(64, 2).half().T):
        with pytest.raises(InputError) as caught:
            weight_only(x, weight, WHOLE)
        assert caught.value.code == "kernel-shape"
    native = pack(quantized(16, 64, format="int8"), native=True)
    for call in (
        lambda: weight_only(torch.zeros(1, 64).half(), native, WHOLE),
        lambda: dequantize(native, torch.float16),
    ):
        with pytest.raises(InputError, match="packed for"):
            call()


def test_every_kind_has_a_kernel() -> None:
    assert set(DECODERS) == {kind for kind in KINDS if not kind.endswith(".native")}
    assert scales_of(pack(quantized(8, 64, format="nf4", scale="double"))).shape == (8, 1)
