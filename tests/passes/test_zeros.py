"""Groups, rows and whole matrices of zeros, in every format and through every pass that assigns codes."""

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from quantkit import Pipeline, plugins
from quantkit.formats import load_format
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.model.structure.traced import weight_of

LAYER, ALL = "model.layers.0", (slice(None), slice(None))
FORMATS = {name: form for name in plugins.FORMATS.names() if isinstance(form := load_format(name), GridFormat)}
# no point of these lies at zero, so a group of zeros is none under the least scale of its super-block, which is none
POINTS = {name for name, form in FORMATS.items() if isinstance(form, LatticeFormat)}
ASSIGNERS: list[Any] = [{"rtn": {"range": "minmax"}}, "rtn", {"rtn": {"range": "importance"}}, "gptq", "hqq"]


def holey(multiple: int | None) -> nn.Module:
    """A Llama of one block; what v puts out, and so what o is given, is zero as well."""
    widths = (
        {} if multiple is None else {"hidden_size": multiple, "intermediate_size": multiple, "head_dim": multiple // 4}
    )
    model = zoo.tiny("llama", num_hidden_layers=1, **widths)
    with torch.no_grad():
        weights = {name: weight_of(model.get_submodule(f"{LAYER}.{name}_proj")) for name in places()}
        for name, place in places().items():
            weights[name][place] = 0.0
    return model


def places() -> dict[str, Any]:
    group = slice(0, 32)
    return {
        "self_attn.q": (slice(0, 1), group),
        "self_attn.k": (slice(1, 2), slice(None)),
        "self_attn.v": ALL,
        "mlp.gate": (group, group),
        "mlp.up": (slice(3, 4), slice(None)),
        "mlp.down": ALL,
    }


@pytest.mark.parametrize(
    ("name", "assigner"),
    # hqq finds zero points, which integers alone have
    [
        (name, each)
        for name in FORMATS
        for each in ASSIGNERS
        if each != "hqq" or isinstance(FORMATS[name], IntegerFormat)
    ],
    ids=str,
)
def test_zeros_stay_zero_and_all_else_finite(name: str, assigner: Any) -> None:
    form = FORMATS[name]
    group = min(form.rules.groups, default=32)
    for granularity in form.rules.granularities:
        weights = {"format": name, "granularity": granularity}
        if granularity in ("group", "block"):
            weights["group"] = group
        pipeline = Pipeline([assigner], weights=weights)
        model = pipeline.apply(holey(form.rules.multiple), zoo.ids(4, 12))
        for linear, tensor in pipeline.tensors.items():
            values = form.dequantize(tensor)
            assert values.isfinite().all()
            assert tensor.scale.float().isfinite().all()
            assert torch.equal(values, weight_of(model.get_submodule(linear)))
        for place, where in places().items():
            # gptq may make up for errors elsewhere in a row; where there are none it has nothing to do
            if where == ALL or (assigner != "gptq" and name not in POINTS):
                assert not form.dequantize(pipeline.tensors[f"{LAYER}.{place}_proj"])[where].any(), place
