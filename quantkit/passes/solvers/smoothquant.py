"""SmoothQuant: move what is hard about an input into the weight behind it, by a scale for each channel.

    Y = (X diag(s)⁻¹) (diag(s) Wᵀ),        s_k = max|X_k|^α / max|W_k|^(1-α)

An input channel with outliers widens the grid of every token it is in; divided by `s` it does not, and the weight's
column, times `s`, is as wide as the channel has become. α = 0 evens out the weights alone, α = 1 the inputs alone.
(Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2023,
arXiv 2211.10438, equation 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.passes.solvers import Scaling, one_thread

# a scale further from 1 than this is a dead channel's
_EXTREME = 1e5


def scales(
    reach: Tensor, weights: Sequence[Tensor], alpha: float, producers: Tensor | None = None, channels: int | None = None
) -> Tensor:
    """The scales of one shared input, [K] float32: its channels are divided by them, columns of weights multiplied.

    Args:
        reach: [K], `max |x_k|`.
        weights: each [N_i, K], of all linears that receive the input.
        producers: [K] integers: which channel of the module that absorbs the scale each input comes from. Inputs from
            one channel share a scale. None: each its own.
        channels: how many that module has; None looks, which waits for a GPU.
    """
    columns = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    seen = _shared(reach.float(), producers, channels)
    wide = _shared(columns, producers, channels)
    found = seen.pow(alpha) / wide.pow(1 - alpha)
    # a channel that was never seen, or that no weight reads, stays as it is
    usable = (seen > 0) & (wide > 0) & torch.isfinite(found)
    return torch.where(usable, found.clamp(1 / _EXTREME, _EXTREME), torch.ones_like(found))


def search(
    sample: Tensor,
    reach: Tensor,
    weights: Sequence[Tensor],
    rounded: Sequence[Callable[[Tensor], Tensor]],
    seen: Sequence[Callable[[Tensor], Tensor]],
    grid: int = 10,
    producers: Tensor | None = None,
    channels: int | None = None,
) -> Scaling:
    """Return the α of a grid on [0, 1] with the least error at the output, weights and inputs both quantized.

        cost(s) = sum over the weights of ||Q(X / s) Q(W s)ᵀ - X Wᵀ||²

    Args:
        sample: [T, K], some inputs.
        rounded: for each weight, what its codes will stand for.
        seen: for each weight, what its kernel sees of an input.
        grid: how many steps; α = 0, 1/grid, ..., 1 are tried.
    """
    with one_thread():
        targets = [sample @ weight.T for weight in weights]

        def cost(found: Tensor | None) -> Tensor:
            total = reach.new_zeros((), dtype=torch.float64)
            for weight, target, round_weight, look in zip(weights, targets, rounded, seen, strict=True):
                scaled = weight if found is None else weight * found
                inputs = sample if found is None else sample / found
                total += (look(inputs) @ round_weight(scaled).T - target).double().square().sum()
            return total

        plain = cost(None)
        best = Scaling(torch.ones_like(reach), torch.full_like(plain, torch.nan), plain, plain)
        for number in range(grid + 1):
            found = scales(reach, weights, number / grid, producers, channels)
            error = cost(found)
            better = error < best.cost
            best = Scaling(
                torch.where(better, found, best.scales),
                torch.where(better, number / grid, best.alpha),
                torch.where(better, error, best.cost),
                plain,
            )
        return best


def _shared(values: Tensor, producers: Tensor | None, channels: int | None) -> Tensor:
    """Return the largest value of all inputs that come from one channel."""
    if producers is None:
        return values
    largest = values.new_zeros(channels or int(producers.max()) + 1).scatter_reduce_(0, producers, values, "amax")
    return largest[producers]
