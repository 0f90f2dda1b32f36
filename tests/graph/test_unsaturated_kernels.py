"""Signed codes with bounded neighbours give what unsigned ones give in ONNX Runtime's kernels, whatever comes in."""

from pathlib import Path
from typing import Any

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


class Ranged:
    """A `Loud` as a graph, with the ranges that its inputs have on `x`, 8 samples."""

    def __init__(self, loud: Loud, path: Path) -> None:
        write_onnx(loud.eval(), [torch.rand(2, 8, 10, 10)], path, inputs=["x"], outputs=["y"])
        self.model = open_graph(path).model
        self.x = {"x": np.random.default_rng(0).uniform(0.5, 1.0, (8, 8, 10, 10)).astype(np.float32)}
        self.found = sites(self.model)
        self.named = {site.name: site for site in self.found}
        self.place = placement.place(self.model, self.found, self.named)
        self.ranges = solve.ranges(self.model, self.place, [self.x], INPUTS)

    def made(self, codes: dict[str, qdq.Codes], kind: qdq.WeightType = "int8") -> Any:
        """The graph with these codes."""
        return qdq.insert(self.model, self.place, self.ranges, codes, self.named, weight_type=kind)

    def solved(self, **how: Any) -> dict[str, qdq.Codes]:
        """Codes of all sites; `how` as in `solve.solved`."""
        return solve.solved(self.model, self.made, self.found, [self.x], WEIGHTS, self.ranges, self.place, **how)


def test_signed_codes_are_as_exact_as_unsigned_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = Ranged(Loud(), tmp_path / "loud.onnx")
    codes = given.solved(unsaturated=True)
    for site in given.found:
        other = solve.neighbours(site)
        assert (other is None) == site.depthwise
        if other is not None:
            mine = codes[site.name].codes.astype(int)
            beside = np.where(np.arange(mine.shape[1]) == other.numpy(), 0, mine[:, other.numpy()])
            assert np.maximum(mine, 0).max() <= LIMIT
            assert (np.maximum(mine, 0) + np.maximum(beside, 0)).max() <= LIMIT
    signed, unsigned = (Runner(given.made(codes, kind))(given.x)["y"] for kind in ("int8", "uint8"))
    assert np.array_equal(signed, unsigned)
    expected = Runner(given.model)(given.x)["y"]
    assert np.linalg.norm(signed - expected) / np.linalg.norm(expected) < 0.02


def test_no_code_is_one_that_arm_cannot_add_up(tmp_path: Path) -> None:
    """(-128)(-128) twice is 2^15: the largest weights of each row are negative, and alike."""
    torch.manual_seed(0)
    loud = Loud()
    for parameter in loud.parameters():
        parameter.data = -parameter.data.round(decimals=1)
    given = Ranged(loud, tmp_path / "loud.onnx")
    codes = given.solved(passes={"rtn": Rtn.Settings()})
    assert {int(codes[site.name].codes.min()) for site in given.found} == {-127}
    assert max(np.abs(each.codes.astype(int)).max() for each in codes.values()) * 128 * 2 < 1 << 15
