"""Learned rounding with autograd through a plain quantizer: rounding and storing passed straight through."""

import torch

from quantkit.formats import QuantTensor, load_format


def slopes(
    weight: torch.Tensor, start: QuantTensor, offset: torch.Tensor, factor: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [N, K] and the gradients by offset [N, K] and factor [N, G], for a loss with `gradient` by the values.

    One group after the other, from the definition: `c = clip(round(w / s + t + v), low - z, high - z)`.
    """
    form = load_format(start.scheme.format)
    rows, columns = weight.shape
    groups = start.scale.shape[1]
    length = columns // groups
    v = offset.clone().requires_grad_()
    rho = factor.clone().requires_grad_()
    values = torch.zeros(rows, columns)
    for n in range(rows):
        for g in range(groups):
            at = slice(g * length, (g + 1) * length)
            place = (n if start.scale.shape[0] > 1 else 0, g)
            zero = 0.0 if start.zero is None else float(start.zero[place])
            given = start.codes[n, at].float() - zero
            first = start.scale[place].float()
            exact = weight[n, at] / first
            nearest = exact.round().clamp(form.low - zero, form.high - zero) == given
            shift = torch.where(nearest, 0.0, exact.clamp(given - 0.499, given + 0.499) - exact)
            wanted = first * rho[place]
            scale = wanted + (form.stored(wanted.detach(), start.scheme).float() - wanted).detach()
            x = weight[n, at] / scale + shift + v[n, at]
            code = (x + (x.round() - x).detach()).clamp(form.low - zero, form.high - zero)
            values[n, at] = code * scale
    (values * gradient).sum().backward()
    assert v.grad is not None
    assert rho.grad is not None
    return values.detach(), v.grad, rho.grad
