"""GPTQ of rows that have a small Hessian each, all at once: the filters of a depthwise convolution.

Each row is solved as in `gptq.py`: columns go in order of falling `H_jj`, each makes up for those before it. Here
a step is one column of all rows, each in an order of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.base.grid import load_grid
from quantkit.model.device import one_thread
from quantkit.passes.solvers import device
from quantkit.scheme import WeightScheme

# shares of the largest weight to try as the end of the grid
_SHARES = tuple(torch.linspace(1.0, 0.6, 81).tolist())
_ATTEMPTS = 6


def gptq_rows(
    weight: Tensor, hessian: Tensor, scheme: WeightScheme, *, damping: float = 0.01, shrink: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Choose codes [N, K] int8 and scales [N] float32 for rows with a Hessian each.

    Args:
        hessian: [N, K, K], of every row's inputs; an identity replaces one without inputs.
        scheme: integers without zero points, one scale a row.
        damping, shrink: as for `factor`; a row without a Cholesky factor is damped more.
    """
    with one_thread(weight):
        form = load_grid(scheme.format)
        columns = weight.shape[1]
        eye = torch.eye(columns, device=weight.device)
        diagonal = hessian.diagonal(dim1=1, dim2=2).float()
        empty = diagonal.mean(1) <= 0
        hessian = torch.where(empty[:, None, None], eye, hessian.float())
        diagonal = torch.where(empty[:, None], 1.0, diagonal)
        scale = _scales(weight, diagonal, scheme)
        order = diagonal.argsort(dim=1, descending=True, stable=True)
        unit = _unit(hessian, diagonal, order, damping, shrink)
        wanted = weight.gather(1, order)
        codes, delta = torch.empty_like(wanted), torch.zeros_like(wanted)
        for column in range(columns):
            aim = wanted[:, column] - (delta[:, :column] * unit[:, :column, column]).sum(1)
            codes[:, column] = form.snap(aim / scale)
            delta[:, column] = codes[:, column] * scale - wanted[:, column]
        return torch.empty_like(codes).scatter_(1, order, codes).to(torch.int8), scale


def _scales(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> Tensor:
    """Return the scale of every row [N] with the least weighted squared error, among shares of its largest weight."""
    form = load_grid(scheme.format)
    top = weight.abs().amax(1, keepdim=True)
    best, least = form.parameters(-top, top, scheme)[0].float(), torch.full_like(top, torch.inf)
    for share in _SHARES:
        scale = form.parameters(-top * share, top * share, scheme)[0].float()
        error = (importance * (form.snap(weight / scale) * scale - weight).square()).sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.where(error < least, error, least)
    return best[:, 0]


def _unit(hessian: Tensor, diagonal: Tensor, order: Tensor, damping: float, shrink: float) -> Tensor:
    """Return factors [N, K, K], upper triangular with unit diagonal; see `factor`."""
    mean = diagonal.mean(1, keepdim=True)
    backwards = order.flip(1)
    whole = hessian * (1 - shrink)
    share = torch.full_like(mean, damping)
    rows = torch.arange(len(hessian), device=hessian.device)[:, None, None]
    for _ in range(_ATTEMPTS):
        raised = diagonal + share * mean + torch.where(diagonal <= 0, mean, 0.0)
        damped = whole - torch.diag_embed(whole.diagonal(dim1=1, dim2=2)) + torch.diag_embed(raised)
        lower, info = torch.linalg.cholesky_ex(damped[rows, backwards[:, :, None], backwards[:, None, :]])
        # rows that have their factor compute it again: testing them would wait for the device
        if not device.launched(hessian) and not bool(info.any()):
            break
        share = torch.where(info[:, None] > 0, (share * 10).clamp(min=1e-4), share)
    lower = torch.where(info[:, None, None] > 0, torch.eye(diagonal.shape[1], device=lower.device), lower)
    upper = lower.flip(1, 2)
    return upper / upper.diagonal(dim1=1, dim2=2)[:, None, :]
