"""HQQ through the pipeline: codes on the grids that its solver finds, without looking at data."""

from __future__ import annotations

import torch
import zoo

from quantkit import Pipeline
from quantkit.formats import load_format
from quantkit.model.structure.traced import weight_of
from quantkit.passes import load_pass
from quantkit.passes.solvers.hqq import half_quadratic
from quantkit.scheme import WeightScheme

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}


def test_codes_lie_on_the_fitted_grids() -> None:
    original = zoo.tiny("llama")
    pipeline = Pipeline([{"hqq": {"iterations": 4, "norm": 0.8}}], weights=GROUPED)
    model = pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 8))
    scheme = WeightScheme.model_validate(GROUPED)
    form = load_format("int4")
    assert len(pipeline.tensors) == 21
    for linear, tensor in pipeline.tensors.items():
        weight = weight_of(original.get_submodule(linear))
        scale, zero = half_quadratic(weight, scheme, iterations=4, norm=0.8)
        assert torch.equal(tensor.scale, scale)
        assert torch.equal(tensor.codes, form.nearest(weight, scale, zero, scheme).codes)
        assert torch.equal(weight_of(model.get_submodule(linear)), form.dequantize(tensor))
    assert not pipeline.decisions
    assert not load_pass("hqq").needs
