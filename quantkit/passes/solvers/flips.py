"""Flip codes: move codes of a finished weight by one step each, where gradients of the whole model's loss ask for it.

The loss around the codes is `<G, D> + ½ tr(Dᵀ F D H)`, G its gradient by the weight, F the curvature by outputs and H
that by inputs (Martens and Grosse, 2015, arXiv 1503.05671). One round of coordinate descent goes through the columns,
the most important inputs first; rows of a column move at once. A row counts what all others that move would add to
the curvature, as if all of it were in its way, so every column lowers the model.

That scalar codes, moved by what the model's own loss asks for, come near to trellises is shown by GSQ (Dadgarnia et
al., 2026, arXiv 2604.18556), which relaxes them and draws samples. Here nothing is relaxed: a descent as in QuantEase
(Behdin et al., 2023, arXiv 2309.01885), whose caller tests each block's codes on text that gave no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

# columns whose errors reach the others together
_BLOCK = 48
# share taken off the off-diagonal entries of curvatures
_SHRINK = 0.2
# times that the rows of a column are thinned out, until all gain
_THINNED = 6


def flipped(
    codes: Tensor, steps: Tensor, gradient: Tensor, outputs: Tensor, inputs: Tensor, low: float, high: float
) -> Tensor:
    """Return codes [N, K] of which some are one larger or smaller.

    No input is modified.

    Args:
        codes: codes [N, K], float32.
        steps: change of the weight by one code [N, K], above zero.
        gradient: gradient of the loss by the weight [N, K], float32.
        outputs: curvature by outputs, `E[g gᵀ]` [N, N].
        inputs: curvature by inputs, `E[x xᵀ]` [K, K].
        low, high: ends of the codes.
    """
    codes, gradient = codes.clone(), gradient.clone()
    absolute, own, diagonal = outputs.abs(), outputs.diagonal(), inputs.diagonal()
    for columns in diagonal.argsort(descending=True).split(_BLOCK):
        slopes, wide, inner = gradient[:, columns], steps[:, columns], inputs[columns][:, columns]
        block, sent = codes[:, columns], torch.zeros_like(gradient[:, columns])
        for place in range(len(columns)):
            slope = slopes[:, place] + sent[:, :place] @ inner[:place, place]
            step, curve, way = wide[:, place], inner[place, place], -slope.sign()
            asked = (block[:, place] + way).clamp(low, high) != block[:, place]
            rows = (asked & (slope.abs() > 0.5 * curve * own * step)).nonzero()[:, 0]
            for _ in range(_THINNED):
                size = step[rows]
                gain = slope[rows].abs() - 0.5 * curve * (absolute[rows][:, rows] @ size)
                if bool((gain > 0).all()):
                    break
                rows = rows[gain > gain.median().clamp(max=0)]
            else:
                rows = rows[:0]
            block[rows, place] += way[rows]
            sent[:, place] = outputs[:, rows] @ (way * step)[rows]
        codes[:, columns] = block
        gradient.addmm_(sent, inputs[columns])
    return codes


def curvature(parts: list[Tensor], damping: float, *, even: bool = False) -> Tensor:
    """Return the mean of outer products of rows [n, n], shrunk and damped.

    Args:
        parts: rows [tokens, n] of every sequence, inputs or gradients by outputs.
        damping: share of the mean diagonal that is added to the diagonal.
        even: whether rows are divided by the root of their length first: a few tokens have gradients a thousand times
            longer than the others.
    """
    rows, size = torch.cat(parts).float(), torch.ones(())
    if even:
        lengths = rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        rows, size = rows / lengths.sqrt(), lengths.mean()
    matrix = rows.T @ rows * (size / len(rows))
    diagonal = matrix.diagonal().clone()
    return matrix.mul_(1 - _SHRINK) + torch.diag(_SHRINK * diagonal + damping * diagonal.mean())
