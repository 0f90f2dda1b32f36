"""What the assigning passes choose for one product of a graph, against the format and the solvers alone."""

from typing import Any

import onnx_ir as ir
import pytest
import torch

from quantkit.formats import load_format
from quantkit.graph.sites import Site
from quantkit.passes.assign import product
from quantkit.passes.gptq import Gptq
from quantkit.passes.hqq import Hqq
from quantkit.passes.round import Round
from quantkit.passes.rtn import Rtn
from quantkit.passes.solvers import ranges
from quantkit.passes.solvers.gptq import gptq
from quantkit.passes.solvers.moments import Moments
from quantkit.scheme import WeightScheme

INT8 = load_format("int8")
CHANNEL = WeightScheme(format="int8", granularity="channel", scale="float32")
TENSOR = WeightScheme(format="int8", granularity="tensor", scale="float32")
GROUPS, EACH, WIDTH = 3, 4, 9


@pytest.fixture(scope="module")
def site() -> Site:
    """12 channels in 3 groups, of one input channel and 3 x 3 each."""
    torch.manual_seed(0)
    weight = torch.randn(GROUPS * EACH, 1, 3, 3) * torch.rand(GROUPS * EACH, 1, 1, 1)
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,3,9,9] x, float[12,1,3,3] w) => (float y) { y = Conv <group = 3> (x, w) }"""
    return Site("c", next(iter(ir.from_onnx_text(text).graph)), weight.numpy(), 0, GROUPS)


def seen(drift: float = 0.0, halves: int = 2) -> Moments:
    torch.manual_seed(1)
    x = torch.randn(GROUPS, 400, WIDTH, dtype=torch.float64) @ torch.randn(GROUPS, WIDTH, WIDTH, dtype=torch.float64)
    x_hat = x + drift * torch.randn_like(x)
    hessian = x_hat.transpose(1, 2) @ x_hat / 400
    parts = [part.transpose(1, 2) @ part / part.shape[1] for part in (x_hat[:, ::2], x_hat[:, 1::2])][:halves]
    return Moments(hessian, x.transpose(1, 2) @ x_hat / 400, tuple(parts))


def matrix(site: Site) -> torch.Tensor:
    return torch.from_numpy(site.matrix().copy())


@pytest.mark.parametrize("scheme", [CHANNEL, TENSOR])
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_rtn_rounds_the_weight_as_it_is(site: Site, scheme: WeightScheme, drift: float) -> None:
    weight = matrix(site)
    found = product(matrix(site), seen(drift), scheme, {"rtn": Rtn.Settings(range="minmax")})
    expected = INT8.quantize(weight, scheme)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    found = product(matrix(site), seen(drift), scheme, {"rtn": Rtn.Settings()})
    assert torch.equal(found.scale, ranges.searched(weight, scheme)[0])
    assert torch.equal(found.codes, INT8.encode(weight, found.scale, None)), "each code is the nearest"


def test_importance_is_that_of_each_group(site: Site) -> None:
    stats = seen()
    found = product(matrix(site), stats, CHANNEL, {"rtn": Rtn.Settings(range="importance")})
    plain = product(matrix(site), stats, CHANNEL, {"rtn": Rtn.Settings()})

    def cost(tensor: Any) -> torch.Tensor:
        error = (INT8.dequantize(tensor) - matrix(site)).square().reshape(GROUPS, EACH, WIDTH)
        return (error * stats.hessian.diagonal(dim1=1, dim2=2).float().unsqueeze(1)).sum(dim=2)

    assert bool((cost(found) <= cost(plain) * 1.001).all())
    assert float(cost(found).sum()) < float(cost(plain).sum())
    one = product(matrix(site), stats, TENSOR, {"rtn": Rtn.Settings(range="importance")})
    assert one.scale.shape == (1, 1)


def test_gptq_takes_all_its_settings(site: Site) -> None:
    stats, weight = seen(0.3), matrix(site)
    settings = Gptq.Settings(shrink=0.2, sweeps=2, range="mse", act_order=False)
    found = product(matrix(site), stats, CHANNEL, {"gptq": settings})
    same = {"damping": 0.01, "shrink": 0.2, "sweeps": 2, "range": "mse", "act_order": False}
    for group in range(GROUPS):
        rows = slice(group * EACH, (group + 1) * EACH)
        expected = gptq(weight[rows], stats.hessian[group].float(), CHANNEL, **same).tensor
        assert torch.equal(found.codes[rows], expected.codes)
        assert torch.equal(found.scale[rows], expected.scale)
    corrected = product(
        matrix(site), stats, CHANNEL, {"gptq": settings.model_copy(update={"correction": 1.0, "ridge": 0.0})}
    )
    # as far as linear algebra goes, W' makes up for all that x lost: the error is uncorrelated with what is seen
    apart = INT8.dequantize(corrected).double().reshape(GROUPS, EACH, WIDTH)
    whole = weight.double().reshape(GROUPS, EACH, WIDTH)
    left = (apart @ stats.hessian - whole @ stats.cross).norm()
    assert float(left) < 0.2 * float((whole @ (stats.hessian - stats.cross)).norm())


def test_auto_is_the_share_of_chance(site: Site) -> None:
    stats = seen()
    assert 0 < stats.noise < 0.2
    assert seen(halves=1).noise == 1.0
    auto, given = (
        product(matrix(site), stats, CHANNEL, {"gptq": Gptq.Settings(shrink=value)}) for value in ("auto", stats.noise)
    )
    assert torch.equal(auto.codes, given.codes)


def test_where_nothing_comes_there_are_codes_still(site: Site) -> None:
    nothing = torch.zeros(GROUPS, WIDTH, WIDTH, dtype=torch.float64)
    found = product(matrix(site), Moments(nothing, nothing, (nothing, nothing)), CHANNEL, {"gptq": Gptq.Settings()})
    assert float((INT8.dequantize(found) - matrix(site)).abs().max()) < 0.02


def test_one_scale_for_several_groups_is_rounded_to_nearest(site: Site) -> None:
    found = product(matrix(site), seen(), TENSOR, {"gptq": Gptq.Settings()})
    assert found.scale.shape == (1, 1)
    assert torch.equal(found.codes, INT8.encode(matrix(site), found.scale, None))


def test_hqq_and_round_alone_start_from_the_weight(site: Site) -> None:
    for passes in ({"hqq": Hqq.Settings()}, {"round": Round.Settings()}):
        found = product(matrix(site), seen(0.5), CHANNEL, passes)
        assert torch.equal(found.codes, INT8.encode(matrix(site), found.scale, None))
