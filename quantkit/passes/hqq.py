"""HQQ: round to nearest on grids fitted to the weights alone, with a norm that tolerates outliers. Needs no data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog. The solver is `solvers/hqq.py`. Zero points are integers here, as they are stored,
and with these the l_p norm gains nothing over least squares: on text, the four shared inputs of a middle block of
SmolLM2-135M lose 13 % more (20 iterations) than with `rtn: {range: mse}`, which is several times as fast;
`rtn: {range: importance}` on `random-tokens` loses 35 % less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantkit.content import Closed
from quantkit.formats.base.grid import load_grid
from quantkit.passes import Outcome, Pass

if TYPE_CHECKING:
    from quantkit.passes import Block, Moments, QuantTensor, Stats, Tensor, WeightScheme


class Hqq(Pass):
    """Pass `hqq`."""

    name = "hqq"
    paper = "https://mobiusml.github.io/hqq_blog"
    requires = frozenset({"unassigned"})
    ensures = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """Settings of the solver.

        Args:
            norm: p of the norm of the errors; below 1, so that a few large ones count little.
            beta: weight of the quadratic penalty in the first iteration.
            growth: factor on `beta` in every iteration.
            iterations: number of iterations.
        """

        norm: float = Field(default=0.7, gt=0, le=1)
        beta: float = Field(default=10.0, gt=0)
        growth: float = Field(default=1.01, ge=1)
        iterations: int = Field(default=10, ge=0)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block."""
        from quantkit.passes.assign import assign

        outcome = Outcome(True)
        for linear in block.linears():
            tensor = self.product(block.weight(linear), None, block.scheme(linear), settings)
            outcome.errors[linear] = assign(block, linear, tensor)
        stats.outputs = None
        return outcome

    def product(self, weight: Tensor, moments: Moments | None, scheme: WeightScheme, settings: Settings) -> QuantTensor:
        """Return codes of one weight [N, K]; its inputs are ignored."""
        from quantkit.passes.solvers.hqq import half_quadratic

        grid = half_quadratic(weight, scheme, **settings.model_dump())
        return load_grid(scheme.format).nearest(weight, *grid, scheme)


PASS: Pass = Hqq()
