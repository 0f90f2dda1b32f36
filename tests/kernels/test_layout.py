"""The packed layout: every element where the docstring says, and back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_tools import quantized

from quantkit.errors import InputError
from quantkit.kernels.layout import KINDS, codes_of, pack, pack_parts, scales_of, unpack

SCHEMES: list[dict[str, Any]] = [
    {"format": "int4", "granularity": "group", "group": 64},
    {"format": "int4", "granularity": "group", "group": 32, "symmetric": False, "scale": "bfloat16"},
    {"format": "int4", "granularity": "channel", "symmetric": False},
    {"format": "int8"},
    {"format": "int8", "granularity": "group", "group": 32, "symmetric": False},
    {"format": "int8", "granularity": "tensor"},
    {"format": "fp8_e4m3", "granularity": "channel"},
    {"format": "fp8_e4m3", "granularity": "block", "group": 128},
    {"format": "nf4"},
    {"format": "nf4", "group": 32, "scale": "double"},
]


def same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    bits = [each.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for each in (ours, theirs)]
    return ours.dtype == theirs.dtype and torch.equal(*bits)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "-".join(map(str, scheme.values())))
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (17, 192), (131, 320)])
def test_back_bit_for_bit(scheme: dict[str, Any], rows: int, columns: int) -> None:
    tensor = quantized(rows, columns, **scheme)
    packed = pack(tensor)
    back = unpack(packed, tensor)
    assert same(back.codes, tensor.codes)
    assert same(back.scale, tensor.scale) and back.scale.shape == tensor.scale.shape
    assert same(back.zero, tensor.zero)
    if tensor.nested is not None and back.nested is not None:
        assert same(back.nested.codes, tensor.nested.codes)
        assert same(back.nested.offset, tensor.nested.offset)
    share = tensor.scale.expand(rows, -1) if tensor.scale.shape[0] == 1 else tensor.scale
    if scheme.get("granularity") != "block":
        assert torch.equal(scales_of(packed), share.float())


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_native_back_bit_for_bit(fmt: str) -> None:
    tensor = quantized(19, 77, format=fmt, granularity="channel")
    assert same(pack(tensor, native=True).words, tensor.codes), "in rows, where torch's products read them too"
    assert same(unpack(pack(tensor, native=True), tensor).codes, tensor.codes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith(".native")])
def test_every_element_lies_where_the_layout_says(kind: str) -> None:
    form, rows, columns = KINDS[kind], 35, 150
    generator = torch.Generator().manual_seed(1)
    unsigned = torch.randint(0, 2**form.bits, (rows, columns), generator=generator)
    codes = (unsigned - form.offset).to(torch.int8) if kind.startswith("int") else unsigned.to(torch.uint8)
    packed = pack_parts(kind, codes, torch.ones(rows, 1))
    words = packed.words.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    per_fragment = 8 * form.lanes
    for n in range(rows):
        for k in range(0, columns, 7):
            tile, inside = divmod(k, form.columns)
            i, inside = divmod(inside, per_fragment)
            rh, inside = divmod(inside, 4 * form.lanes)
            t, h = divmod(inside, form.lanes)
            rl, g = divmod(n % 16, 8)
            word = words[n // 16, tile, ((g * 4 + t) * 2 + rh) * 2 + rl]
            found = (int(word) >> (form.stride[0] * h + form.stride[1] * i)) & (2**form.bits - 1)
            assert found == int(unsigned[n, k])
    assert torch.equal(codes_of(packed), codes)


def test_resident_bytes_are_codes_scales_and_zeros() -> None:
    packed = pack(quantized(256, 512, format="int4", granularity="group", group=128, symmetric=False))
    assert packed.resident_bytes == 256 * 512 // 2 + 256 * 4 * 2 + 256 * 4


@pytest.mark.parametrize(
    ("kind", "group", "columns", "code"),
    [("int4", 48, 96, "group-unsupported"), ("int4", 96, 192, "group-unsupported"), ("int5", 64, 64, "unknown-kernel"),
     ("int8.native", 64, 128, "kernel-unsupported")],
)  # fmt: skip
def test_what_no_kernel_reads_is_refused(kind: str, group: int, columns: int, code: str) -> None:
    codes = torch.zeros(16, columns, dtype=torch.int8)
    with pytest.raises(InputError) as caught:
        pack_parts(kind, codes, torch.ones(16, columns // group))
    assert caught.value.code == code


def test_floats_have_no_zero_points() -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    with pytest.raises(InputError, match="only integer formats have zero points"):
        pack_parts("nf4", codes, torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.int8))
