"""What every format with scales promises, for all that the registry lists and every granularity that each has.

Blocks of GGUF are rounded as ggml rounds them, not to the nearest: `test_blocks.py` has what is nearest there.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import plugins
from quantkit.formats import apart, joined, load_format
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.layout import against, by_row, extremes, scale_shape, split
from quantkit.scheme import WeightScheme

FORMATS: dict[str, GridFormat] = {
    name: form for name in plugins.FORMATS.names() if isinstance(form := load_format(name), GridFormat)
}


def schemes() -> list[WeightScheme]:
    """Every format in every granularity, symmetry and scale, with the smallest group it has (16 where any will do)."""
    return [
        WeightScheme.model_validate(
            {
                "format": name,
                "granularity": granularity,
                "group": min(form.rules.groups, default=16) if granularity in ("group", "block") else None,
                "symmetric": symmetric,
                "scale": scale,
            }
        )
        for name, form in FORMATS.items()
        for granularity in form.rules.granularities
        for symmetric in form.rules.symmetric
        for scale in form.rules.scales
    ]


EVERY = schemes()
# with the scale that each has by default, and doubled ones
USUAL = [how for how in EVERY if how.scale in (FORMATS[how.format].rules.scales[0], "double")]
SCHEMES = [how for how in USUAL if not isinstance(FORMATS[how.format], BlockFormat)]
NEAREST = [how for how in EVERY if not isinstance(FORMATS[how.format], BlockFormat)]
# a lone row, odd numbers of rows, more than one block each way and one that is cut off
SHAPES = [(1, 32), (3, 64), (37, 96)]


def name_of(how: WeightScheme) -> str:
    return f"{how.format}-{how.granularity}-{'sym' if how.symmetric else 'zero'}-{how.scale}"


def random(shape: tuple[int, int], seed: int = 0, exponent: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent


def every_value(form: GridFormat) -> torch.Tensor:
    """The grid, rising, in units of the scale: what each stored bit pattern stands for, NaN and infinity left out."""
    patterns = torch.arange(2**form.bits).to(torch.uint8).reshape(1, -1)
    packed = patterns if form.bits == 8 else _dense(patterns, form.bits)
    values = form.decode(form.unpack(packed, patterns.shape[1]), torch.ones(1), None).reshape(-1)
    return values[values.isfinite()].unique()


def _dense(patterns: torch.Tensor, bits: int) -> torch.Tensor:
    word = sum(int(code) << (place * bits) for place, code in enumerate(patterns.reshape(-1).tolist()))
    return torch.frombuffer(bytearray(word.to_bytes(patterns.numel() * bits // 8, "little")), dtype=torch.uint8)[None]


def effective(tensor: Any) -> torch.Tensor:
    scale = tensor.scale.float()
    return scale if tensor.global_scale is None else scale * tensor.global_scale


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_nearest_of_all_values(how: WeightScheme, shape: tuple[int, int]) -> None:
    """Against a search through all values that the format has, in float64."""
    form, weight = FORMATS[how.format], random(shape)
    before = weight.clone()
    tensor = form.quantize(weight, how)
    assert torch.equal(weight, before)
    assert tensor.shape == shape
    assert tensor.scale.shape == scale_shape(shape, how)
    assert (tensor.zero is None) == how.symmetric
    values = form.dequantize(tensor)
    assert values.dtype == torch.float32
    if how.scale == "double":
        return  # codes are chosen before the scales are doubled: see test_nf4
    grid = every_value(form).double()
    spread = against(effective(tensor), shape, how).double()
    grids = grid.expand(*spread.shape, -1)
    if tensor.zero is not None:
        grids = grids - against(tensor.zero, shape, how).double().unsqueeze(-1)
    parts = split(weight, how).double()
    # a chunk of rows at a time: the widest grids have 256 values
    best = ((parts / spread).unsqueeze(-1) - grids).abs().amin(dim=-1) * spread
    error = (split(values, how).double() - parts).abs()
    assert bool((error <= best + 4e-7 * parts.abs()).all())


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_a_second_rounding_changes_nothing(how: WeightScheme) -> None:
    form, weight = FORMATS[how.format], random((5, 96), 1)
    whole = form.global_scale(weight.abs().amax(), how)
    scale, zero = form.parameters(*extremes(weight, how), how, whole)
    tensor = form.nearest(weight, scale, zero, how, whole)
    values = form.decode(
        split(tensor.codes, how),
        against(scale, weight.shape, how),
        None if zero is None else against(zero, weight.shape, how),
    ).reshape(weight.shape)
    again = form.nearest(values, scale, zero, how, whole)
    assert torch.equal(bits(again.codes), bits(tensor.codes))
    assert torch.equal(bits(again.scale), bits(tensor.scale))
    # `snap` is what solvers round with
    units = split(weight, how) / against(scale, weight.shape, how).float()
    snapped = form.snap(units, None if zero is None else against(zero, weight.shape, how))
    assert torch.equal((snapped * against(scale, weight.shape, how).float()).reshape(weight.shape), values)
    # and what can be stored is stored as it is
    if how.scale != "double":
        assert torch.equal(form.stored(scale.float(), how, whole).float(), scale.float())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=80, deadline=None)
@given(
    how=st.sampled_from(NEAREST),
    rows=st.integers(1, 20),
    groups=st.integers(1, 3),
    exponent=st.integers(-20, 12),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
    seed=st.integers(0, 2**31),
)
def test_error_bound_order_and_zeros(
    how: WeightScheme, rows: int, groups: int, exponent: int, offset: float, seed: int
) -> None:
    """Half of the widest step up to the end of the grid, and what lies beyond it; order kept; zero stays zero."""
    form = FORMATS[how.format]
    if how.scale == "float16":
        exponent = max(exponent, -8)  # below, float16 scales are subnormal: test_integer
    weight = (random((rows, groups * (how.group or 32)), seed) + offset) * 2.0**exponent
    weight[0, 0] = 0.0
    tensor = form.quantize(weight, how)
    values = form.dequantize(tensor)
    assert float(values[0, 0]) == 0.0
    grid = every_value(form)
    spread = against(effective(tensor), tensor.shape, how)
    shift = 0.0 if tensor.zero is None else against(tensor.zero, tensor.shape, how).float()
    parts, found = split(weight, how), split(values, how)
    inside = torch.minimum(torch.maximum(parts, (grid.min() - shift) * spread), (grid.max() - shift) * spread)
    half = float(grid.diff().max()) / 2
    # doubled scales move a whole group by what they were rounded by; float32 rounds the rest
    slack = 0.02 if how.scale == "double" else 2e-6
    bound = half * spread + (inside - parts).abs() + slack * (parts.abs() + spread)
    assert bool(((found - parts).abs() <= bound).all())
    if how.granularity != "block":
        order = parts.argsort(dim=2)
        assert bool((found.gather(2, order).diff(dim=2) >= 0).all())


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)), rows=st.integers(1, 5), columns=st.integers(1, 41), seed=st.integers(0, 99)
)
def test_packing_is_reversible_and_dense(name: str, rows: int, columns: int, seed: int) -> None:
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, -(-columns * form.bits // 8)), generator=generator).to(torch.uint8)
    codes = form.unpack(packed, columns)
    assert codes.shape == (rows, columns)
    again = form.pack(codes)
    assert again.shape == packed.shape
    assert again.dtype == torch.uint8
    assert torch.equal(bits(form.unpack(again, columns)), bits(codes))
    if columns * form.bits % 8 == 0:
        assert torch.equal(again, packed)


@pytest.mark.parametrize("how", NEAREST, ids=name_of)
def test_bits_per_weight_are_what_is_stored(how: WeightScheme) -> None:
    form, shape = FORMATS[how.format], (37, 96)
    tensor = form.quantize(random(shape), how)
    stored = [tensor.scale] if tensor.nested is None else [tensor.nested.codes, tensor.nested.absmax]
    stored += [part for part in (tensor.global_scale, tensor.nested and tensor.nested.offset) if part is not None]
    total = tensor.codes.numel() * form.bits + sum(part.numel() * part.element_size() * 8 for part in stored)
    total += 0 if tensor.zero is None else tensor.zero.numel() * form.bits
    assert form.bits_per_weight(shape, how) == pytest.approx(total / (37 * 96), rel=1e-12)


@pytest.mark.parametrize("how", EVERY, ids=name_of)
def test_zeros_and_extremes_stay_finite(how: WeightScheme) -> None:
    form = FORMATS[how.format]
    weight = torch.zeros(34, 256)
    assert torch.equal(form.dequantize(form.quantize(weight, how)), weight)
    weight[1], weight[2], weight[17] = 1e30, -1e-30, 7.0
    # the mean of doubled scales is a sum before it is a mean
    weight[33] = torch.tensor([-1.0, 1.0] * 128) * (1e36 if how.scale == "double" else 3e38)
    for part in (weight, weight[:1], weight[2:3], weight[17:18], -weight):
        tensor = form.quantize(part, how)
        assert effective(tensor).isfinite().all()
        # half a step more than the largest float32 there is
        assert form.dequantize(tensor).isfinite().all() or (how.format.startswith("int") and how.scale != "float16")
    # int2 reaches 1 of 1.5 steps; no point of iq3_xxs is long in all its weights
    assert form.dequantize(form.quantize(weight[17:18], how)).mean() == pytest.approx(7.0, rel=0.36)


@pytest.mark.parametrize("how", [how for how in EVERY if how.format.startswith("int")], ids=name_of)
def test_a_scale_of_integers_is_positive_and_at_most_a_hundredth_short_of_its_range(how: WeightScheme) -> None:
    form, weight = FORMATS[how.format], random((5, 96), 2) + 0.5
    low, high = extremes(weight, how)
    wanted = torch.maximum(-low, high) / (2 ** (form.bits - 1) - 0.5)
    if not how.symmetric:
        wanted = (high.clamp(min=0) - low.clamp(max=0)) / (2**form.bits - 1)
    scale = form.quantize(weight, how).scale.float()
    assert bool((scale >= wanted * 0.99).all() and (form.quantize(weight * 0, how).scale > 0).all())


def test_blocks_are_square_tiles_cut_off_at_the_edges() -> None:
    how = WeightScheme.model_validate({"format": "fp8_e4m3", "granularity": "block", "group": 16})
    weight = random((37, 50))
    tensor = FORMATS["fp8_e4m3"].quantize(weight, how)
    assert tensor.scale.shape == (3, 4)
    for row in range(3):
        for column in range(4):
            tile = weight[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
            assert float(tensor.scale[row, column]) == float((tile.abs().max() / 448).float())
    assert torch.equal(by_row(tensor.scale, 37, how)[16:32], tensor.scale[1].expand(16, 4))


@pytest.mark.parametrize("how", USUAL, ids=name_of)
def test_a_matrix_of_several_is_cut_apart_without_a_change(how: WeightScheme) -> None:
    form, rows = FORMATS[how.format], [16, 5, 16]
    tensor = form.quantize(random((sum(rows), 256)), how)
    if how.granularity == "block" or how.scale == "double":
        with pytest.raises(ValueError, match="scales for every row, or one for all"):
            apart(tensor, rows)
        return
    parts = apart(tensor, rows)
    assert [part.shape for part in parts] == [(count, 256) for count in rows]
    assert torch.equal(torch.cat([form.dequantize(part) for part in parts]), form.dequantize(tensor))
    assert apart(tensor, [sum(rows)])[0] is tensor
    if how.rows_apart:
        again = joined(parts)
        assert torch.equal(bits(again.codes), bits(tensor.codes)) and torch.equal(again.scale, tensor.scale)
        if tensor.super_blocks is not None:
            assert again.super_blocks is not None and torch.equal(again.super_blocks.sc, tensor.super_blocks.sc)
            assert torch.equal(again.super_blocks.d, tensor.super_blocks.d)
