"""Learned rounding of one convolution, against autograd through the convolution itself."""

import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from quantkit.formats import load_format
from quantkit.graph.codes.rounding import CalibrationRows, _Objective, _within, learned, limits
from quantkit.graph.sites import Site, patches
from quantkit.passes.round import Round
from quantkit.scheme import WeightScheme

INT4 = load_format("int4")
SCHEME = WeightScheme(format="int4", granularity="channel", scale="float32")
TENSOR = WeightScheme(format="int4", granularity="tensor", scale="float32")


def made(groups: int, behind: str = "y = Relu (c)") -> Site:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,4,8,8] x, float[8,{4 // groups},3,3] w) => (float y)
    <float zero = {{0.0}}, float six = {{6.0}}, float two = {{2.0}}> {{
        c = Conv <group = {groups}, pads = [1, 1, 1, 1]> (x, w)
        {behind} }}"""
    torch.manual_seed(0)
    node = next(node for node in ir.from_onnx_text(text).graph if node.op_type == "Conv")
    return Site("c", node, torch.randn(8, 4 // groups, 3, 3).numpy(), 0, groups)


def images(count: int, seed: int = 0) -> Tensor:
    """Smooth, so that neighbours can make up for one another."""
    torch.manual_seed(seed)
    return torch.nn.functional.avg_pool2d(torch.randn(count, 4, 10, 10), 3, stride=1) * 3


def kept(site: Site, x: Tensor, x_hat: Tensor) -> tuple[CalibrationRows, tuple[Tensor, Tensor]]:
    rows = CalibrationRows([], [])
    found, wanted = (torch.from_numpy(patches(site, each.numpy())) for each in (x_hat, x))
    rows.add(found, wanted, samples=len(x), total=len(x))
    return rows, (found.mean(1), wanted.mean(1))


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        ("y = Relu (c)", (0, float("inf"))),
        ("y = Clip (c, zero, six)", (0, 6)),
        ("r = Relu (c)  y = Clip (r, zero, two)", (0, 2)),
        ("y = Sigmoid (c)", (-float("inf"), float("inf"))),
        ("r = Relu (c)  y = Add (r, c)", (-float("inf"), float("inf"))),
    ],
)
def test_the_activation_behind_a_product(behind: str, ends: tuple[float, float]) -> None:
    assert limits(made(1, behind)) == ends


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_gradient_is_that_of_the_convolution(groups: int) -> None:
    site = made(groups, "y = Clip (c, zero, two)")
    x = images(3)
    x_hat = x + 0.1 * torch.randn_like(x)
    rows, means = kept(site, x, x_hat)
    weight = torch.from_numpy(site.weight.copy())
    values = (weight + 0.1 * torch.randn_like(weight)).requires_grad_()
    bias = torch.randn(8)

    wanted = conv2d(x, weight, bias, padding=1, groups=groups)
    found = conv2d(x_hat, values, padding=1, groups=groups)
    # whatever the values, the mean over all of calibration is that of the float product
    given = wanted.mean(dim=(0, 2, 3)) - found.mean(dim=(0, 2, 3))
    errors = (found + given[:, None, None]).clamp(0, 2) - wanted.clamp(0, 2)
    gradient = torch.autograd.grad(errors[1:].square().sum() / 2, values)[0].reshape(8, -1)

    objective = _Objective(site, weight.reshape(8, -1), rows, means, bias)
    flat = values.detach().reshape(8, -1)
    own = objective.gradient(flat, [1, 2])
    assert torch.allclose(objective.errors(flat, range(3)), errors.detach().square().mean(dim=(0, 2, 3)), atol=1e-5)
    assert torch.allclose(own, gradient, atol=1e-3 * float(gradient.abs().max()))


@pytest.mark.parametrize(("scheme", "groups"), [(SCHEME, 1), (SCHEME, 4), (TENSOR, 2)])
def test_what_is_learned_helps_where_nothing_was_learned_from(scheme: WeightScheme, groups: int) -> None:
    site = made(groups)
    weight = torch.from_numpy(site.matrix().copy())
    x, other = images(32), images(32, seed=1)
    rows, means = kept(site, x, x)
    start = INT4.quantize(weight, scheme)
    settings = Round.Settings()
    tensor, better = learned(site, start, rows, means, None, settings, torch.Generator().manual_seed(0))
    assert tensor.scale.shape == start.scale.shape

    objective = _Objective(site, weight, rows, means, None)
    before, after = (objective.errors(INT4.dequantize(each), range(24, 32)) for each in (start, tensor))
    assert float(after.sum()) < float(before.sum()) if better else torch.equal(tensor.codes, start.codes)
    if scheme == SCHEME:
        assert bool((after <= before).all()), "each channel's own"
        unseen = _Objective(site, weight, *kept(site, other, other), None)
        before, after = (unseen.errors(INT4.dequantize(each), range(32)) for each in (start, tensor))
        assert float(after.sum()) < 0.9 * float(before.sum())
    again, _ = learned(site, start, rows, means, None, settings, torch.Generator().manual_seed(0))
    assert torch.equal(again.codes, tensor.codes)


def test_a_channel_that_gains_nothing_keeps_its_codes() -> None:
    site = made(1)
    rows, means = kept(site, images(8), images(8))
    start = INT4.quantize(torch.from_numpy(site.matrix().copy()), SCHEME)
    # steps of half a cell, with no time to come to rest
    settings = Round.Settings(iterations=1, batch=1, rate=0.5, scale_rate=0.2, checks=1)
    tensor, better = learned(site, start, rows, means, None, settings, torch.Generator().manual_seed(0))
    same = (tensor.codes == start.codes).all(dim=1) & (tensor.scale == start.scale).squeeze(1)
    assert int(same.sum()) == 8 - better
    assert better < 8


def test_few_rows_of_each_sample_are_kept() -> None:
    rows = CalibrationRows([], [])
    x = torch.arange(2 * 1000, dtype=torch.float32).reshape(1, 2000, 1)
    rows.add(x, -x, samples=2, total=2)
    assert [part.shape for part in rows.quantized] == [(1, 256, 1)] * 2
    assert [float(end) for part in rows.quantized for end in torch.aminmax(part)] == [0, 999, 1000, 1999]
    assert torch.equal(rows.original[1], -rows.quantized[1])
    rows.add(x, x, samples=2, total=1 << 24)
    assert rows.quantized[-1].numel() == 1, "of very many, one each"


def test_codes_that_are_bounded_stay_so() -> None:
    neighbours = torch.tensor([1, 0, 2])
    codes = torch.tensor([[100, 28, 127], [100, 29, 0], [-100, 120, 0], [-100, -29, 1], [-64, -64, -128]])
    assert _within(codes.to(torch.int8), neighbours).tolist() == [True, False, True, False, True]
    assert bool(_within(codes.to(torch.int8), None).all())
