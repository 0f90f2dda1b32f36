"""Where to put the grid: scale and zero point of each group, from its extremes or by searching for the least error.

    min-max:  the grid spans the smallest to the largest weight
    searched: minimise over p of  sum_k a_k (decode(encode(w_k; p)) - w_k)²
              with the grid spanning p * min to p * max, p in a few steps from 1 down,
              then alternately the best scale for the codes (closed form) and the best codes for the scale

`a_k` is the importance of input k: 1, or the diagonal of the Hessian, which weighs an error by how strongly the
calibration text excites it. A few outliers stretch a min-max grid for all; clipping them a little costs less than it
gains. (Searched clipping: Nagel et al., "A White Paper on Neural Network Quantization", 2021, section 3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantkit import registry
from quantkit.errors import InputError
from quantkit.formats._integer import IntegerFormat, groups_of, stored

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.recipe import WeightScheme

# elements worked on at a time: few calls, and yet the handful of temporaries stays in the last-level cache
_CHUNK = 1 << 17


@dataclass(frozen=True)
class Search:
    """How far a range search looks.

    Args:
        smallest: the shortest grid tried, as a share of min-max.
        steps: how many lengths are tried from there up to, but without, min-max itself, which always is.
        refinements: how often scale and codes are fitted to each other after that.
    """

    smallest: float = 0.7
    steps: int = 5
    refinements: int = 1


def integer_format(scheme: WeightScheme) -> IntegerFormat:
    """The scheme's format, which has to be a uniform integer one.

    Raises:
        InputError: `format-not-integer`.
    """
    found = registry.load("formats", scheme.format)
    if not isinstance(found, IntegerFormat):
        raise InputError(
            "format-not-integer",
            value=f"format {scheme.format}",
            rule="this solver assigns codes of uniform integer formats",
            remedy="use an int format, or another assigner",
        )
    return found


def minmax(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """Ranges from the smallest to the largest weight of each group.

    Args:
        weight: [N, K] of any float dtype.
        scheme: granularity, symmetry and scale dtype.

    Returns:
        scale [N, G] in the stored dtype ([1, 1] per tensor) and zero [N, G] int8, None when symmetric.

    Raises:
        InputError: `group-indivisible`, `format-not-integer`.
    """
    return _by_rows(weight, scheme, None, Search(steps=0, refinements=0))


def searched(
    weight: Tensor, scheme: WeightScheme, importance: Tensor | None = None, search: Search | None = None
) -> tuple[Tensor, Tensor | None]:
    """Ranges with the least (weighted) squared rounding error among those tried; never worse than min-max.

    Args:
        weight: [N, K] of any float dtype.
        scheme: granularity, symmetry and scale dtype.
        importance: [K], not negative: how much an error of each input costs; None is 1 for all.
        search: how far to look.

    Returns:
        scale [N, G] in the stored dtype ([1, 1] per tensor) and zero [N, G] int8, None when symmetric.

    Raises:
        InputError: `group-indivisible`, `format-not-integer`.
    """
    return _by_rows(weight, scheme, importance, search or Search())


def for_output(
    weight: Tensor, scheme: WeightScheme, hessian: Tensor, search: Search | None = None
) -> tuple[Tensor, Tensor | None]:
    """Like `searched`, but each group's error is measured at the output: `d H_gg dᵀ`, as if other groups were exact.

    Args:
        weight: [N, K] of any float dtype.
        scheme: granularity, symmetry and scale dtype; per tensor only the diagonal of the Hessian is used.
        hessian: [K, K].
        search: how far to look.

    Raises:
        InputError: `group-indivisible`, `format-not-integer`.
    """
    if scheme.granularity == "tensor":
        return searched(weight, scheme, hessian.diagonal(), search)
    length = weight.shape[1] // groups_of(weight.shape[1], scheme)
    scale, zero = transposed(weight.float().T.contiguous(), length, scheme, blocks(hessian, length), search or Search())
    return scale.T.contiguous(), None if zero is None else zero.T.contiguous()


def blocks(hessian: Tensor, length: int) -> Tensor:
    """The blocks on the diagonal of [K, K]: [K / length, length, length] float32."""
    return torch.stack(
        [hessian[at : at + length, at : at + length].float() for at in range(0, hessian.shape[0], length)]
    )


def _by_rows(
    weight: Tensor, scheme: WeightScheme, importance: Tensor | None, search: Search
) -> tuple[Tensor, Tensor | None]:
    rows, columns = weight.shape
    length = columns // groups_of(columns, scheme)
    target, costs = weight.float().T, None if importance is None else importance.float()
    if scheme.granularity == "tensor":  # one long column
        target, length = target.reshape(-1, 1), rows * columns
        costs = None if costs is None else costs.repeat_interleave(rows)
    scale, zero = transposed(target, length, scheme, costs, search)
    return scale.T.contiguous(), None if zero is None else zero.T.contiguous()


def transposed(
    target: Tensor, length: int, scheme: WeightScheme, importance: Tensor | None, search: Search
) -> tuple[Tensor, Tensor | None]:
    """`searched` for weights that lie transposed, as the solvers hold them: every step is then one vector operation.

    Args:
        target: [K, N] float32.
        length: weights of a column that share a scale; divides K.
        scheme: symmetry and scale dtype.
        importance: [K] float32, or the blocks of a Hessian [K / length, length, length], or None.
        search: how far to look.

    Returns:
        scale [K / length, N] in the stored dtype, and zero of that shape, int8, None when symmetric.
    """
    form = integer_format(scheme)
    groups, columns = target.shape[0] // length, target.shape[1]
    scale = torch.empty(groups, columns, dtype=getattr(torch, scheme.scale))
    zero = None if scheme.symmetric else torch.empty(groups, columns, dtype=torch.int8)
    step = max(1, _CHUNK // length)
    for group in range(groups):
        costs = None
        if importance is not None:
            costs = importance[group] if importance.dim() == 3 else importance[group * length : (group + 1) * length]
        for start in range(0, columns, step):
            part = target[group * length : (group + 1) * length, start : start + step].contiguous()
            best, shift = _search(part, costs, scheme, form, search)
            scale[group, start : start + step] = best
            if zero is not None and shift is not None:
                zero[group, start : start + step] = shift
    return scale, zero


def _search(
    part: Tensor, costs: Tensor | None, scheme: WeightScheme, form: IntegerFormat, search: Search
) -> tuple[Tensor, Tensor | None]:
    """The search for columns [L, n] of one group that fit into a cache; scale and zero [n]."""
    low, high = part.amin(dim=0), part.amax(dim=0)
    scale, zero = form.parameters(low, high, scheme)
    if search.steps == search.refinements == 0:
        return scale, zero
    exact, codes, error = torch.empty_like(part), torch.empty_like(part), torch.empty_like(part)
    weights = torch.ones(part.shape[0]) if costs is None else costs

    def total(left: Tensor, right: Tensor) -> Tensor:
        """The sums of left * costs * right, [n]; overwrites left."""
        if weights.dim() == 2:
            return left.mul_(weights @ right).sum(dim=0)
        return weights @ left.mul_(right)

    def measure(step: Tensor, shift: Tensor | None) -> Tensor:
        """Leaves codes less zero in `codes`; what each column costs [n]."""
        width = step.float()
        torch.mul(part, width.reciprocal(), out=exact)
        if shift is None:
            torch.clamp(exact, form.low, form.high, out=codes)
        else:
            torch.clamp(exact, form.low - shift.float(), form.high - shift.float(), out=codes)
        torch.sub(codes.round_(), exact, out=error)
        return total(error, error) * width.square()

    least = measure(scale, zero)
    for number in range(search.steps):
        share = search.smallest + (1 - search.smallest) * number / search.steps
        tried, shift = form.parameters(low * share, high * share, scheme)
        scale, zero, least = _better(measure(tried, shift), tried, shift, scale, zero, least)
    for _ in range(search.refinements):
        measure(scale, zero)
        # the scale that fits these codes best; a group of zeros keeps its own
        fitted = total(error.copy_(codes), part) / total(exact.copy_(codes), codes)
        fitted = torch.where(torch.isfinite(fitted) & (fitted > 0), fitted, scale.float())
        tried = stored(fitted, scheme)
        scale, zero, least = _better(measure(tried, zero), tried, zero, scale, zero, least)
    return scale, zero


def _better(
    cost: Tensor,
    tried: Tensor,
    shift: Tensor | None,
    scale: Tensor,
    zero: Tensor | None,
    least: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What was tried where it costs less, what was there elsewhere."""
    wins = cost < least
    if zero is not None and shift is not None:
        zero = torch.where(wins, shift, zero)
    return torch.where(wins, tried, scale), zero, torch.where(wins, cost, least)
