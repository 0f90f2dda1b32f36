"""Assign codes from weights, their scheme and calibration statistics: for blocks, graphs and the head.

All assigners need these: padding of the last group, weights that share a scale, products with several groups, missing
statistics. Their mathematics is in `solvers/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from quantkit.formats import QuantTensor, apart, joined
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.grid import load_grid
from quantkit.model.device import one_thread
from quantkit.passes import load_pass
from quantkit.passes.solvers import blocks, device, ranges
from quantkit.passes.solvers.moments import Moments, filled
from quantkit.plugins.outside import demand_returned
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.calibrate.statistics.parts import Piece
    from quantkit.model.structure.block import Block
    from quantkit.passes import Pass, Stats

# a longer search of the grid pays if nothing compensates an error: 8 % of the KL
_WIDE = ranges.Search(smallest=0.55, steps=6, refinements=2)
Range = Literal["minmax", "mse", "importance"]
# elements of a head that are rounded at a time, in float32
PIECE = 1 << 23


def assign(block: Block, linear: str, tensor: QuantTensor) -> Tensor:
    """Assign codes to a linear as `Block.assign` does; in two launches on a device for integers with scales by row."""
    codes, scale = tensor.codes, tensor.scale
    known = tensor.scheme.rows_apart and not codes.is_floating_point() and scale.dtype.itemsize > 1
    known = known and tensor.offset is None
    if not (known and device.launched(codes)):
        return block.assign(linear, tensor)
    from quantkit.kernels.solving.statistics import quotient
    from quantkit.kernels.solving.stored import loss
    from quantkit.model.structure.traced import weight_of

    weight = weight_of(block.module.get_submodule(linear)).float()
    values, parts = loss(weight, codes, scale, tensor.zero, tensor.codebook, tensor.global_scale)
    return block.assign(linear, tensor, (values, quotient(parts, False)))


def nearest(
    weight: Tensor,
    scheme: WeightScheme,
    range: Range = "mse",  # noqa: A002
    importance: Tensor | None = None,
) -> QuantTensor:
    """Round a weight to nearest.

    Args:
        weight: [N, K], padded to whole groups, of any float dtype.
        range: span of a group (`minmax`), or a search for the least squared error, weighted by `importance`.
        importance: [K] without padding: cost of an error of every input; the search is then longer.
    """
    form = load_grid(scheme.format)
    if range == "minmax":
        return form.quantize(weight, scheme)
    if importance is not None:  # inputs that no token reached count as equal
        importance = filled(torch.where(importance.amax() > 0, importance, 1.0), weight.shape[1])
    if isinstance(form, BlockFormat):
        with one_thread(weight):
            return form.laid(weight, blocks.placed(weight.float().T.contiguous(), form, importance), scheme)
    if importance is None:
        return form.nearest(weight, *ranges.searched(weight, scheme), scheme)
    return form.nearest(weight, *ranges.searched(weight, scheme, importance, _WIDE), scheme)


def nearest_alike(
    block: Block,
    linears: Sequence[str],
    range: Range,  # noqa: A002
    importance: Tensor | None = None,
    stats: Stats | None = None,
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield linears with one input and their nearest codes; as one matrix if they share a scale.

    Args:
        stats: statistics of the block, whose ranks share the work; None for one process.
    """
    for names in block.alike(linears):
        scheme = block.scheme(names[0])
        together = load_grid(scheme.format).shares_scale(scheme)
        for some in [names] if together else [[name] for name in names]:
            weights = [block.weight(name) for name in some]
            whole = torch.cat(weights)

            def rounded(
                piece: Piece, whole: Tensor = whole, how: WeightScheme = scheme
            ) -> list[tuple[QuantTensor, Tensor]]:
                return [(nearest(whole[rows], how, range, importance), whole.new_empty(0)) for _, rows in piece]

            if stats is None or stats.ranks is None:
                tensor = nearest(whole, scheme, range, importance)
            else:
                ((tensor, _),) = stats.by_rows([len(whole)], rounded, apart=scheme.rows_apart)
            yield from zip(some, apart(tensor, [len(weight) for weight in weights]), strict=True)


def product(weight: Tensor, moments: Moments | None, scheme: WeightScheme, passes: Mapping[str, Any]) -> QuantTensor:
    """Compute codes for a graph's product or a head [N, K] by the recipe's assigning pass; nearest without one.

    Args:
        moments: moments of its input; None if no token arrived there, or if the pass needs none.
        passes: passes of the recipe, name -> settings.
    """
    assigning = assigner(passes)
    if assigning is None:
        return nearest(weight, scheme)
    codes = assigning.product(weight, moments, scheme, passes[assigning.name])
    return demand_returned(codes, QuantTensor, assigning, "product")


def in_pieces(
    weight: Tensor, moments: Moments | None, scheme: WeightScheme, passes: Mapping[str, Any]
) -> tuple[QuantTensor, float]:
    """Apply `product` to a weight [N, K] of any float dtype, some rows at a time.

    Returns:
        codes [N, K + padding of the last group], and the relative squared error `||W - dequantize(codes)||² / ||W||²`.
    """
    form = load_grid(scheme.format)
    rows, columns = weight.shape
    # rows that share a scale stay together
    step = max(1, PIECE // columns) if scheme.rows_apart else rows
    parts: list[QuantTensor] = []
    lost = energy = torch.zeros((), dtype=torch.float64, device=weight.device)
    whole = columns + scheme.padding(columns)
    moments = None if moments is None else moments.filled(whole)
    for piece in weight.split(step):
        exact = filled(piece.float(), whole)
        parts.append(product(exact, moments, scheme, passes))
        lost = lost + (form.dequantize(parts[-1]) - exact).double().square().sum()
        energy = energy + exact.double().square().sum()
    return joined(parts), float(lost / torch.where(energy > 0, energy, 1.0))


def assigner(passes: Mapping[str, Any]) -> Pass | None:
    """Return the recipe's pass for codes of products; None if there is none."""
    for step in map(load_pass, passes):
        if "unassigned" in step.requires and "codes" in step.ensures and not step.on_graphs:
            return step
    return None
