"""Where weights, their scheme and what calibration saw become codes: for blocks, graphs and the head.

What all assigners need stands here: the last group filled up, weights that have a scale in common, products in several
groups, statistics that are missing. Their mathematics is in `solvers/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from quantkit.formats import QuantTensor, apart, joined
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.grid import load_grid
from quantkit.passes import load_pass
from quantkit.passes.solvers import blocks, device, one_thread, ranges
from quantkit.passes.solvers.moments import Moments, filled
from quantkit.plugins.outside import demand_returned
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.model.structure.block import Block
    from quantkit.passes import Pass

# where nothing else makes an error good, looking further for the grid pays: 8 % of the KL
_WIDE = ranges.Search(smallest=0.55, steps=6, refinements=2)
Range = Literal["minmax", "mse", "importance"]
# elements of a head rounded at a time, in float32
PIECE = 1 << 23


def assign(block: Block, linear: str, tensor: QuantTensor) -> Tensor:
    """`Block.assign`; in two launches on a device, if codes are integers and rows have scales of their own."""
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
    """Return a weight rounded to nearest.

    Args:
        weight: [N, K], filled up to whole groups, of any float dtype.
        range: spans all of a group (`minmax`), or is searched for the least squared error, weighted by `importance`.
        importance: [K] without padding: what an error of each input costs; the search then looks further.
    """
    form = load_grid(scheme.format)
    if range == "minmax":
        return form.quantize(weight, scheme)
    if importance is not None:  # what no token reached counts alike
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
) -> Iterator[tuple[str, QuantTensor]]:
    """Linears that share an input, each with its nearest codes; as one matrix where they have a scale in common."""
    for names in block.alike(linears):
        scheme = block.scheme(names[0])
        together = load_grid(scheme.format).shares_scale(scheme)
        for some in [names] if together else [[name] for name in names]:
            weights = [block.weight(name) for name in some]
            tensor = nearest(torch.cat(weights), scheme, range, importance)
            yield from zip(some, apart(tensor, [len(weight) for weight in weights]), strict=True)


def product(weight: Tensor, moments: Moments | None, scheme: WeightScheme, passes: Mapping[str, Any]) -> QuantTensor:
    """Codes of a graph's product or a head [N, K], by the recipe's pass that assigns them; nearest where there is none.

    Args:
        moments: of what it multiplies; None where nothing came there, or nothing is asked of it.
        passes: of the recipe, name -> settings.
    """
    assigning = assigner(passes)
    if assigning is None:
        return nearest(weight, scheme)
    codes = assigning.product(weight, moments, scheme, passes[assigning.name])
    return demand_returned(codes, QuantTensor, assigning, "product")


def in_pieces(
    weight: Tensor, moments: Moments | None, scheme: WeightScheme, passes: Mapping[str, Any]
) -> tuple[QuantTensor, float]:
    """`product` of a weight [N, K] of any float dtype, a piece of its rows at a time.

    Returns:
        codes [N, K + padding of the last group], and the relative squared error `||W - dequantize(codes)||² / ||W||²`.
    """
    form = load_grid(scheme.format)
    rows, columns = weight.shape
    # rows that share a scale are taken at once
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
    """Return the pass of a recipe that gives codes to weights of products; None where there is none."""
    for step in map(load_pass, passes):
        if "unassigned" in step.requires and "codes" in step.ensures and not step.on_graphs:
            return step
    return None
