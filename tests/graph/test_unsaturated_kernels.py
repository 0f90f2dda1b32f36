"""Signed codes with bounded neighbours give what unsigned ones give in ONNX Runtime's kernels, whatever comes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from quantkit.graph.codes import solve
from quantkit.graph.open import open_graph
from quantkit.graph.pairs import placement, qdq
from quantkit.graph.run import Runner
from quantkit.graph.sites import sites
from quantkit.model.to_onnx import write_onnx
from quantkit.passes.rtn import Rtn
from quantkit.passes.solvers.unsaturated import LIMIT
from quantkit.scheme import ActivationScheme, WeightScheme

WEIGHTS = WeightScheme(format="int8", granularity="channel", symmetric=True, scale="float32")
INPUTS = ActivationScheme(format="int8", granularity="tensor", dynamic=False, symmetric=False)


class Loud(nn.Module):
    """All weights of one sign and alike, all inputs large: the sums of two products are as large as they get."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Conv2d(8, 16, 3, padding=1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.odd = nn.Conv2d(16, 7, 1)
        self.groups = nn.Conv2d(7, 7, 3, padding=1)
        self.head = nn.Linear(7, 5)
        for parameter in self.parameters():
            parameter.data = parameter.data.abs() + 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.groups(self.odd(self.depth(self.whole(x))))
        return self.head(x.mean(dim=(2, 3)))


def test_signed_codes_are_as_exact_as_unsigned_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_onnx(Loud().eval(), [torch.rand(2, 8, 10, 10)], tmp_path / "loud.onnx", inputs=["x"], outputs=["y"])
    model = open_graph(tmp_path / "loud.onnx").model
    x = np.random.default_rng(0).uniform(0.5, 1.0, (8, 8, 10, 10)).astype(np.float32)
    found = sites(model)
    named = {site.name: site for site in found}
    place = placement.place(model, found, named)
    ranges = solve.ranges(model, place, [{"x": x}], INPUTS)

    def made(codes: dict[str, qdq.Codes], kind: qdq.WeightType = "int8") -> object:
        return qdq.insert(model, place, ranges, codes, named, weight_type=kind)

    codes = solve.solved(model, made, found, [{"x": x}], WEIGHTS, ranges, place, unsaturated=True)
    for site in found:
        other = solve.neighbours(site)
        assert (other is None) == site.depthwise
        if other is not None:
            mine = codes[site.name].codes.astype(int)
            beside = np.where(np.arange(mine.shape[1]) == other.numpy(), 0, mine[:, other.numpy()])
            assert np.maximum(mine, 0).max() <= LIMIT
            assert (np.maximum(mine, 0) + np.maximum(beside, 0)).max() <= LIMIT
    signed, unsigned = (Runner(made(codes, kind))({"x": x})["y"] for kind in ("int8", "uint8"))
    assert np.array_equal(signed, unsigned)
    expected = Runner(model)({"x": x})["y"]
    assert np.linalg.norm(signed - expected) / np.linalg.norm(expected) < 0.02


def test_no_code_is_one_that_arm_cannot_add_up(tmp_path: Path) -> None:
    """(-128)(-128) twice is 2^15: the largest weights of each row are negative, and alike."""
    torch.manual_seed(0)
    loud = Loud().eval()
    for parameter in loud.parameters():
        parameter.data = -parameter.data.round(decimals=1)
    write_onnx(loud, [torch.rand(2, 8, 10, 10)], tmp_path / "loud.onnx", inputs=["x"], outputs=["y"])
    model = open_graph(tmp_path / "loud.onnx").model
    x = np.random.default_rng(0).uniform(0.5, 1.0, (8, 8, 10, 10)).astype(np.float32)
    found = sites(model)
    named = {site.name: site for site in found}
    place = placement.place(model, found, named)
    ranges = solve.ranges(model, place, [{"x": x}], INPUTS)

    def made(codes: dict[str, qdq.Codes]) -> object:
        return qdq.insert(model, place, ranges, codes, named, weight_type="int8")

    codes = solve.solved(model, made, found, [{"x": x}], WEIGHTS, ranges, place, passes={"rtn": Rtn.Settings()})
    least = {site.name: int(codes[site.name].codes.min()) for site in found}
    assert set(least.values()) == {-127}
    products = [np.abs(codes[site.name].codes.astype(int)).max() * 128 * 2 for site in found]
    assert max(products) < 1 << 15
