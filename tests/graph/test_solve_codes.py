"""Codes of products that compute in floats: by rounding, and by second order on what comes to them."""

import numpy as np
import torch
from small_graph import Small

from quantkit.formats import load_format
from quantkit.graph.codes.solve import weights_alone
from quantkit.graph.run import Runner
from quantkit.graph.sites import sites
from quantkit.passes.gptq import Gptq
from quantkit.passes.rtn import Rtn
from quantkit.scheme import WeightScheme

INT4 = WeightScheme(format="int4", granularity="group", group=16, symmetric=True)


def graph() -> tuple[Small, object]:
    small = Small(seed=1)
    x = small.input("x", "n", 5, 32)
    mixed = small.op("MatMul", x, small.normal(32, 32))
    return small, small.model(small.op("MatMul", small.op("Relu", mixed), small.normal(32, 8)))


def outputs(model: object, found: dict[str, object], feed: dict[str, np.ndarray]) -> np.ndarray:
    made = model.clone()  # type: ignore[attr-defined]
    for site in sites(made):
        values = load_format("int4").dequantize(found[site.name]).float().numpy()
        weight = site.node.inputs[1]
        import onnx_ir as ir

        weight.const_value = ir.tensor(site.shaped(values), name=weight.name)
    return next(iter(Runner(made)(feed).values()))


def test_rounding_to_nearest_looks_at_nothing() -> None:
    _, model = graph()
    plain = weights_alone(model, sites(model), iter(()), INT4, {"rtn": Rtn.Settings(range="minmax")})  # type: ignore[arg-type]
    searched = weights_alone(model, sites(model), iter(()), INT4, {})  # type: ignore[arg-type]
    form = load_format("int4")
    for site in sites(model):  # type: ignore[arg-type]
        matrix = torch.from_numpy(site.matrix())
        assert torch.equal(plain[site.name].codes, form.quantize(matrix, INT4).codes)
        lost = [float((form.dequantize(found[site.name]) - matrix).square().sum()) for found in (plain, searched)]
        assert lost[1] < lost[0]


def test_second_order_loses_less_at_the_output() -> None:
    small, model = graph()
    low_rank = small.normal(64 * 5, 8) @ small.normal(8, 32)
    feeds = [{"x": low_rank.reshape(64, 5, 32)}]
    plain = weights_alone(model, sites(model), feeds, INT4, {})  # type: ignore[arg-type]
    solved = weights_alone(model, sites(model), feeds, INT4, {"gptq": Gptq.Settings(damping=0.01, shrink=0.3)})  # type: ignore[arg-type]
    wanted = next(iter(Runner(model)(feeds[0]).values()))  # type: ignore[arg-type]
    lost = [np.square(outputs(model, found, feeds[0]) - wanted).sum() for found in (plain, solved)]
    assert lost[1] < 0.7 * lost[0]


def test_grouped_convolutions_are_solved_group_by_group() -> None:
    small = Small()
    x = small.input("x", "n", 8, 5, 5)
    model = small.model(small.op("Conv", x, small.normal(8, 1, 3, 3), group=8))
    scheme = WeightScheme(format="fp8_e4m3", granularity="channel")
    found = weights_alone(
        model, sites(model), small.feeds(2, x=(2, 8, 5, 5)), scheme, {"gptq": Gptq.Settings(damping=0.01, shrink=0.3)}
    )
    (tensor,) = found.values()
    assert tensor.shape == (8, 9)
    dense = load_format("fp8_e4m3").dequantize(tensor)
    weight = torch.from_numpy(sites(model)[0].matrix())
    assert ((dense - weight).abs() <= 0.07 * weight.abs().amax(dim=1, keepdim=True)).all()
