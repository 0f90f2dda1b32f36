"""Choose the codes of several neighbours at once, where a format has points for them (`formats/base/lattice.py`).

For values v of neighbours with curvature A and slope b the cost is `vᵀ A v - 2 vᵀ b`.

- Of columns of GPTQ: with U the part of the factor between them and P their pivots, `A = U P Uᵀ` and `b = U P t`. A t
  is asked of every column after the errors of earlier units, if those of its own unit are fed back inside A.
- Of coordinate descent A is the part of the Hessian.

Signs are those of the best real values `A⁻¹ b`; where an even number is negative, the cheapest is turned. Of all points
with these signs the one of least cost is found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.base.lattice import LatticeFormat


def unit(
    form: LatticeFormat, aims: Tensor, wanted: Tensor, inner: Tensor, pivots: Tensor, steps: tuple[Tensor, Tensor]
) -> Tensor:
    """Choose the values of a unit of columns [U, R], in units of the scale.

    Args:
        aims: [U, R], the weights minus the errors of earlier units.
        wanted: [U, R], the weights.
        inner: [U, U] or [U, U, R], unit upper triangular part of the factor.
        pivots: [U, 1] or [U, R].
        steps: scales [R], and their inverses.
    """
    above = inner.triu(1) if inner.dim() == 2 else inner * torch.ones(inner.shape[:2]).triu(1)[..., None]
    target = aims + _fed(above, wanted)
    best, even = _solved(above, target), None
    if form.even:
        negative = form.signs(best * pivots.sqrt(), 0) < 0
        even = negative.unflatten(0, (-1, form.length)).sum(1) % 2  # type: ignore[no-untyped-call]
    values = torch.zeros_like(wanted)
    for number, start in enumerate(range(0, len(wanted), form.length)):
        part = slice(start, start + form.length)
        own, rest, cost = inner[part, part], target[part], pivots[part]
        if start:
            rest = rest - _fed(above[:start, part], values[:start] * steps[0])
            best = _solved(above[part, part], rest)
        slope = (own @ (cost * rest)) if own.dim() == 2 else (own * (cost * rest)[None]).sum(1)
        curve = (own * cost.T) @ own.T if own.dim() == 2 else (own[:, None] * own[None] * cost).sum(2)
        odd = None if even is None else even[number]
        values[part] = points(form, curve, slope, best if start else best[part], steps[1], odd)
    return values


def points(
    form: LatticeFormat, curve: Tensor, slope: Tensor, best: Tensor, inverse: Tensor, odd: Tensor | None = None
) -> Tensor:
    """Choose points [L, R] of least `v A v - 2 v b` with the signs of the best real values.

    Args:
        curve: `A`, [L, L] or [L, L, R].
        slope: `b`, [L, R].
        best: `A⁻¹ b`, [L, R].
        inverse: 1 / scale, [R].
        odd: [R], 1 where an odd number has to be negative; None: any number.
    """
    signs = torch.ones_like(best).copysign_(best)
    norms = curve.diagonal().T if curve.dim() == 3 else curve.diagonal().unsqueeze(1)
    if odd is not None:
        least = (norms * best.square()).min(0, keepdim=True).indices
        turned = signs.gather(0, least) * signs.prod(0, keepdim=True) * (1 - 2 * odd)
        signs = signs.scatter(0, least, turned)
    first, second = torch.combinations(torch.arange(form.length, device=best.device)).T
    bent = curve[first, second] if curve.dim() == 3 else curve[first, second].unsqueeze(1)
    return form.least(slope * signs * inverse, norms, bent * signs[first] * signs[second]).mul_(signs)


def descended(
    form: LatticeFormat, curve: Tensor, slope: Tensor, free: Tensor, values: Tensor, steps: tuple[Tensor, Tensor]
) -> Tensor:
    """Return points [L, R] of no higher cost than `values`, as even or odd in signs; arguments as for `points`."""
    odd = (values < 0).sum(0) % 2 if form.even else None
    chosen = points(form, curve, slope, free, steps[1], odd)

    def cost(units: Tensor) -> Tensor:
        scaled = units * steps[0]
        return (scaled * (curve @ scaled - 2 * slope)).sum(0)

    return torch.where(cost(chosen) < cost(values), chosen, values)


def _fed(above: Tensor, values: Tensor) -> Tensor:
    """Return `sum_i above_ij values_i`."""
    return above.T @ values if above.dim() == 2 else (above * values[:, None]).sum(0)


def _solved(above: Tensor, target: Tensor) -> Tensor:
    """Return x with `x_j + sum_i above_ij x_i = target_j`."""
    solved = target.clone()
    for column in range(1, len(target)):
        solved[column] -= _fed(above[:column, column : column + 1], solved[:column])[0]
    return solved
