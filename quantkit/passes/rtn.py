"""Round to nearest: every weight to its closest code, after choosing the range of every group.

`minmax` spans all weights of a group; `mse` searches the range with the least squared rounding error; `importance`
weighs an error by the mean square of its input, which takes one forward over the calibration set: an importance
matrix, as llama.cpp calls it (`llama-imatrix`; Kawrakow, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from quantkit.content import Closed
from quantkit.formats import QuantTensor, joined
from quantkit.passes import Outcome, Pass, decision

if TYPE_CHECKING:
    from quantkit.passes import Block, InputStats, Moments, SharedInput, Stats, Tensor, WeightScheme


class Rtn(Pass):
    """Pass `rtn`."""

    name = "rtn"
    requires = frozenset({"unassigned"})
    ensures = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """Choice of the ranges.

        Args:
            range: `minmax`; `mse`: the least squared rounding error; or `importance`: weighted by inputs' mean squares.
            imatrix: file of these mean squares, from llama-imatrix or `quantkit imatrix`; "" uses calibration.
        """

        range: Literal["minmax", "mse", "importance"] = "mse"
        imatrix: str = ""

        @model_validator(mode="after")
        def _weighed(self) -> Self:
            if self.imatrix and self.range != "importance":
                raise ValueError("`imatrix` needs `range: importance`")
            return self

    def needs_with(self, settings: Settings) -> frozenset[str]:
        """Add squared inputs if the range is weighted by them."""
        looks = settings.range == "importance" and not settings.imatrix
        return self.needs | {"mean_square"} if looks else self.needs

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block."""
        from quantkit.passes.assign import assign, nearest_alike

        outcome = Outcome(True)

        def visit(group: SharedInput, seen: InputStats) -> None:
            for linear, tensor in nearest_alike(block, group.members, settings.range, seen.mean_square, stats):
                outcome.errors[linear] = assign(block, linear, tensor)

        stated = _stated(block, settings.imatrix) if settings.imatrix else {}
        if settings.range == "importance" and not settings.imatrix:
            stats.staged(visit, products=False)
        for group in block.groups():
            left = [linear for linear in group.members if linear not in block.tensors]
            known = next((stated[linear] for linear in left if linear in stated), None)
            for linear, tensor in nearest_alike(block, left, settings.range, known, stats):
                if settings.range == "importance" and known is None:
                    why = "the importance matrix does not speak of it" if stated else "no calibration token reached it"
                    where = block.full_name(linear)
                    outcome.note(self.name, "no-importance", where, f"{why}; its inputs count alike")
                outcome.errors[linear] = assign(block, linear, tensor)
                stats.outputs = None
        return outcome

    def product(self, weight: Tensor, moments: Moments | None, scheme: WeightScheme, settings: Settings) -> QuantTensor:
        """Return codes of a graph's product; a scale shared by its groups is fitted to the mean of their inputs."""
        from quantkit.passes.assign import nearest

        if moments is None or settings.range != "importance":
            return nearest(weight, scheme, settings.range)
        squares = moments.mean_square if scheme.rows_apart else moments.mean_square.mean(0, keepdim=True)
        parts = zip(weight.chunk(len(squares)), squares, strict=True)
        return joined([nearest(part, scheme, settings.range, own) for part, own in parts])

    def accepts(self, columns: Mapping[str, int], settings: Settings) -> None:
        """Refuse a file made for another model.

        Raises:
            InputError: `imatrix-damaged`, `imatrix-foreign`, `file-missing`.
        """
        from quantkit.calibrate.statistics import imatrix

        if settings.imatrix:
            imatrix.read(Path(settings.imatrix)).demand_of(columns, settings.imatrix)

    def brought(self, head: str, columns: int, settings: Settings) -> Moments | None:
        """Read the file's entry for the head, or for the embedding that it is tied to; raises as `accepts`."""
        if not settings.imatrix:
            return None
        from quantkit.calibrate.statistics import imatrix
        from quantkit.lazy import torch
        from quantkit.passes.solvers.moments import Moments

        squares = imatrix.read(Path(settings.imatrix)).of_head(columns, settings.imatrix)
        taken = []
        if squares is None:
            reason = "the importance matrix does not speak of it; its inputs count alike"
            taken, squares = [decision(self.name, "no-importance", head, reason)], torch.ones(columns)
        return Moments(squares.diag()[None], name=head, decisions=taken)


def _stated(block: Block, file: str) -> dict[str, Tensor]:
    """Map every linear of a block to the file's mean squares of its inputs, [K]."""
    from quantkit.calibrate.statistics import imatrix

    names = {block.full_name(linear): linear for group in block.groups() for linear in group.members}
    columns = {name: block.weight(linear).shape[1] for name, linear in names.items()}
    return {names[name]: squares for name, squares in imatrix.read(Path(file)).of_linears(columns, file).items()}


PASS: Pass = Rtn()
