"""HQQ: fit grids to the weights alone, with a norm that lets a few of them lie far off.

    minimise over s, z, e     sum |e|^p  +  β/2 · sum (e - (w - ŵ))²        ŵ = (c - z) · s,  c = clip(round(w / s + z))

by turns (half-quadratic splitting), β growing by a factor κ each time:

    e = sign(r) · max(0, |r| - |r|^(p-1) / β)        r = w - ŵ: errors that the norm tolerates, mostly outliers
    s, z: the line through (c, w - e) with the least squared distance; z to the nearest integer, then s for that z

The grid with the least `sum |r|^p` of all iterations is kept, min-max included. (Badri and Shaji, 2023,
https://mobiusml.github.io/hqq_blog. There the zero point is a float and the scale stays that of min-max; here zero
points are codes, so the scale is fitted instead.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.base.integers import IntegerFormat
from quantkit.model.device import one_thread
from quantkit.passes.solvers import device, ranges
from quantkit.scheme import WeightScheme

# weights in one piece of work, so that the temporaries fit into the last-level cache
_CHUNK = 1 << 17
# the same on a device, where a dozen temporaries may take 3 GB
_PIECE = 1 << 26


def half_quadratic(
    weight: Tensor,
    scheme: WeightScheme,
    *,
    norm: float = 0.7,
    beta: float = 10.0,
    growth: float = 1.01,
    iterations: int = 10,
) -> tuple[Tensor, Tensor | None]:
    """Return scale [N, G] as stored ([1, 1] per tensor) and zero of that shape, int8, None if symmetric.

    Args:
        weight: [N, K] of any float dtype.
        norm, beta, growth: p, β of the first iteration for weights in units of the min-max scale, and κ.

    Raises:
        InputError: `format-not-integer`, `group-indivisible`.
    """
    form = ranges.integer_format(scheme)
    scale, zero = ranges.minmax(weight, scheme)
    rows = weight.float().reshape(scale.numel(), -1)
    flat, shift = scale.reshape(-1), None if zero is None else zero.reshape(-1)
    if device.launched(rows) and rows.shape[1] <= ranges.LONGEST:
        from quantkit.kernels.solving.search import fitted_by_turns

        _, bounds, dropped = device.kept_by_bits(scheme)
        ends = [float(form.low), float(form.high)]
        flat, shifts = fitted_by_turns(rows, flat, shift, ends, bounds, dropped, norm, beta, growth, iterations)
        return flat.reshape(scale.shape), None if zero is None else shifts.reshape(zero.shape)
    step = max(1, (_PIECE if device.launched(rows) else _CHUNK) // rows.shape[1])
    with one_thread(rows):
        for start in range(0, len(rows), step):
            at = slice(start, start + step)
            zeros = None if shift is None else shift[at]
            flat[at], zeros = _fit(rows[at], flat[at], zeros, form, scheme, (norm, beta, growth, iterations))
            if shift is not None and zeros is not None:
                shift[at] = zeros
    return scale, zero


def _fit(
    part: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    form: IntegerFormat,
    scheme: WeightScheme,
    settings: tuple[float, float, float, int],
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero [n] for groups [n, L]."""
    norm, beta, growth, iterations = settings
    unit = scale.float().unsqueeze(1)  # β is defined for weights in this unit
    least = part.new_full((len(part),), torch.inf)
    now, shift = scale, zero
    for turn in range(iterations + 1):
        step, offset = now.float().unsqueeze(1), part.new_zeros(()) if shift is None else shift.float().unsqueeze(1)
        codes = (part / step).round_().clamp_(form.low - offset, form.high - offset)
        rest = torch.addcmul(part, codes, step, value=-1)
        size = rest.abs()
        bent = size.clamp(min=1e-12).pow(norm)
        cost = bent.sum(dim=1)
        wins = cost < least
        least = torch.where(wins, cost, least)
        scale = torch.where(wins, now, scale)
        zero = None if shift is None or zero is None else torch.where(wins, shift, zero)
        if turn == iterations:
            break
        # |r|^(p-1) / β in units of the scale: (|r| / u)^(p-1) u / β
        kept = size.sub_(bent.div_(size.clamp(min=1e-12)).mul_(unit.pow(2 - norm) / beta)).clamp_(min=0)
        aim = part - kept.mul_(rest.sign_())
        beta *= growth
        if shift is not None:
            raw = codes + offset
            across = raw - raw.mean(dim=1, keepdim=True)
            slope = (across * aim).sum(dim=1, keepdim=True) / across.square().sum(dim=1, keepdim=True)
            offset = (raw - aim / slope).mean(dim=1, keepdim=True).nan_to_num().round_().clamp_(form.low, form.high)
            shift, codes = offset.squeeze(1).to(torch.int8), raw - offset
        wanted = (codes * aim).sum(dim=1) / codes.square().sum(dim=1)
        now = form.stored(torch.where(torch.isfinite(wanted) & (wanted > 0), wanted, now.float()), scheme)
    return scale, zero
