"""IQ types of GGUF: what the `gguf` package reads from our bytes, and points against a search of all of them."""

import math
from itertools import combinations

import gguf
import pytest
import torch

from quantkit.exporters.gguf.writer import packed
from quantkit.formats import QuantTensor, SuperBlocks, load_format
from quantkit.formats.base.blocks import SuperBlockFormat
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.passes.solvers.blocks import placed
from quantkit.scheme import WeightScheme

POINTS = ("iq3_s", "iq3_xxs", "iq2_s")


def form_of(name: str) -> LatticeFormat:
    found = load_format(name)
    assert isinstance(found, LatticeFormat)
    return found


def read(tensor: QuantTensor) -> torch.Tensor:
    """Values that the package reads from the bytes of a file."""
    kind, rows = packed(tensor)
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])).view(tensor.shape)


def weights(columns: int = 512) -> torch.Tensor:
    """Rows of many sizes, of zeros, of one sign, of one value."""
    found = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    found *= torch.tensor([1.0, 1e-6, 30.0, 0.1, 1.0, 1.0, 1.0])[:, None]
    found[3, :256], found[4], found[5, 256:] = 0.0, found[4].abs(), -0.25
    return found


@pytest.mark.parametrize("name", ["iq4_xs", *POINTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_package_reads_the_values_that_we_decode(name: str, dtype: torch.dtype) -> None:
    form, weight, scheme = load_format(name), weights().to(dtype), WeightScheme(format=name)
    assert isinstance(form, SuperBlockFormat)
    for tensor in (
        form.quantize(weight, scheme),
        form.laid(weight, placed(weight.float().T.contiguous(), form), scheme),
    ):
        assert torch.equal(read(tensor), tensor.dense())
        assert torch.equal(form.unpack(form.pack(tensor.codes), weight.shape[1]), tensor.codes)
    assert not tensor.dense()[3, :256].any()


def test_every_scale_of_iq4_xs_has_its_bits() -> None:
    """Six bits in two places, of either sign, under every code."""
    form, generator = load_format("iq4_xs"), torch.Generator().manual_seed(1)
    assert isinstance(form, SuperBlockFormat)
    codes = torch.randint(0, 16, (64, 256), generator=generator).to(torch.uint8)
    sc = torch.arange(-32, 32).repeat(8, 1).T.to(torch.int8).contiguous()
    d = torch.randn(64, 1, generator=generator).half()
    grid = form.grid(SuperBlocks(d, sc))
    tensor = form.on(codes, grid, WeightScheme(format="iq4_xs"))
    assert torch.equal(read(tensor), tensor.dense())


@pytest.mark.parametrize("name", POINTS)
def test_every_point_and_scale_has_its_bits(name: str) -> None:
    form, generator = form_of(name), torch.Generator().manual_seed(1)
    points = form.points()
    rows = len(points) * form.length // 256
    signs = torch.randint(0, 2, (rows, 32, 8), generator=generator) * 2.0 - 1
    if form.even:
        signs[..., 7] *= signs.prod(-1)
    codes = form.coded(points.view(rows, 256) * signs.view(rows, 256))
    groups = 256 // form.group
    sc = (torch.arange(rows * groups) % 16 * 2 + 1).view(rows, groups).to(torch.int8)
    tensor = form.on(codes, form.grid(SuperBlocks(torch.ones(rows, 1).half(), sc)), WeightScheme(format=name))
    assert torch.equal(read(tensor), tensor.dense())
    numbers, negative = form.points_of(codes)
    assert torch.equal(numbers.flatten(), torch.arange(len(points), dtype=torch.int32))
    assert torch.equal(negative, signs.view(rows, 256) < 0)


@pytest.mark.parametrize("name", ["iq4_xs", *POINTS])
def test_bits_are_those_of_the_file(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert load_format(name).bits_per_weight((3, 512), WeightScheme(format=name)) == pytest.approx(8 * size / block)


@pytest.mark.parametrize("name", POINTS)
def test_codes_are_the_nearest_points_of_all(name: str) -> None:
    form, scheme = form_of(name), WeightScheme(format=name)
    weight = weights(256)
    tensor = form.quantize(weight, scheme)
    units = (weight.view(7, -1, form.group) / tensor.scale[..., None].clamp(min=1e-30)).reshape(-1, 8)
    points = form.points()

    def nearest(size: torch.Tensor) -> torch.Tensor:
        """Squared distance of signed magnitudes [M, 8] from the points."""
        return (
            torch.cdist(size.reshape(-1, form.length).double(), points.double())
            .amin(1)
            .square()
            .view(len(size), -1)
            .sum(1)
        )

    least = nearest(units.abs())
    if form.even:
        odd = (units < 0).sum(1) % 2 == 1
        at = units.abs().argmin(1, keepdim=True)
        least = torch.where(odd, nearest(units.abs().scatter(1, at, -units.abs().gather(1, at))), least)
    values = form.codebook()[tensor.codes.int()].view(-1, 8)
    assert ((values - units).double().square().sum(1)) == pytest.approx(least, rel=1e-5, abs=1e-5)
    # what lies on the grid stays there
    assert torch.equal(form.nearest(tensor.dense(), tensor.scale, None, scheme).dense()[2:], tensor.dense()[2:])


@pytest.mark.parametrize("name", POINTS)
def test_near_points_are_nearest_to_the_middle_of_a_cell(name: str) -> None:
    """So their distance is at most that of the nearest and twice that of the middle."""
    form = form_of(name)
    units = torch.randn(6, 32, 400, generator=torch.Generator().manual_seed(2)) * form.high * 0.3
    folded = form.folded(units, 1)
    near = form.near(folded, 1) * folded.sign() * units.sign()
    aside = units.movedim(1, -1)
    assert torch.equal(form.near(form.folded(aside, 2), 2).movedim(-1, 1), near.abs())
    one = units.new_ones(6, 1, 400)
    best = form.decode(form.encode(units, one, None), one, None)
    size = (units * near.sign()).clamp(min=0)
    middle = (
        ((size / form.cell).floor().clamp(max=math.ceil(form.high / form.cell) - 1) + 0.5) * form.cell * near.sign()
    )
    far, least, cell = ((each - units).unflatten(1, (-1, form.length)).norm(dim=2) for each in (near, best, middle))
    assert bool((far <= least + 2 * cell + 1e-4).all())
    assert float(far.square().sum()) < 1.3 * float(least.square().sum())
    odd = (near < 0).unflatten(1, (4, 8)).sum(2) % 2
    assert bool(odd.any()) != form.even


@pytest.mark.parametrize("name", POINTS)
def test_the_least_of_a_curved_cost_is_found(name: str) -> None:
    """Against every point, one row at a time."""
    form, generator = form_of(name), torch.Generator().manual_seed(3)
    size, points = form.length, form.points()
    along = torch.randn(size, 5, generator=generator)
    pairs = list(combinations(range(size), 2))
    bend, norms = torch.randn(len(pairs), 5, generator=generator) / 9, torch.rand(size, 5, generator=generator) + 1

    def cost(values: torch.Tensor, row: int) -> torch.Tensor:
        bent = sum(bend[k, row] * values[..., i] * values[..., j] for k, (i, j) in enumerate(pairs))
        return (norms[:, row] * values.square() - 2 * along[:, row] * values).sum(-1) + 2 * bent

    found = form.least(along, norms, bend)
    for row in range(5):
        assert float(cost(found[:, row], row)) == pytest.approx(float(cost(points, row).min()), rel=1e-4)
