"""SmoothQuant: move outliers of an input into the weight after it, by a scale for every channel.

    Y = (X diag(s)⁻¹) (diag(s) Wᵀ),        s_k = max|X_k|^α / max|W_k|^(1-α)

An input channel with outliers widens the grid of every token; divided by `s` it does not, and the weight's column is
multiplied by `s`. α = 0 balances only the weights, α = 1 only the inputs.
(Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2023,
arXiv 2211.10438, equation 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.model.device import one_thread
from quantkit.passes.solvers import Scaling

# a scale further from 1 belongs to a dead channel
_EXTREME = 1e5


def scales(
    reach: Tensor, weights: Sequence[Tensor], alpha: float, producers: Tensor | None = None, channels: int | None = None
) -> Tensor:
    """Return the scales of one shared input, [K] float32: divisors of its channels, factors of columns of weights.

    Args:
        reach: [K], `max |x_k|`.
        weights: weights [N_i, K] of all linears with this input.
        producers: [K] integers: channel of the module that absorbs the scale, for every input. Inputs from one channel
            share a scale. None: every input has its own.
        channels: number of channels of that module; None reads it, which waits for a GPU.
    """
    columns = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    seen = _shared(reach.float(), producers, channels)
    wide = _shared(columns, producers, channels)
    raw = seen.pow(alpha) / wide.pow(1 - alpha)
    # a channel without input, or without a weight, keeps a scale of 1
    usable = (seen > 0) & (wide > 0) & torch.isfinite(raw)
    return torch.where(usable, raw.clamp(1 / _EXTREME, _EXTREME), torch.ones_like(raw))


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
        rounded: for every weight, function that quantizes it.
        seen: for every weight, function that quantizes an input as its kernel does.
        grid: number of steps; α = 0, 1/grid, ..., 1 are tried.
    """
    with one_thread():
        targets = [sample @ weight.T for weight in weights]

        def cost(scale: Tensor | None) -> Tensor:
            total = reach.new_zeros((), dtype=torch.float64)
            for weight, target, round_weight, look in zip(weights, targets, rounded, seen, strict=True):
                scaled = weight if scale is None else weight * scale
                inputs = sample if scale is None else sample / scale
                total += (look(inputs) @ round_weight(scaled).T - target).double().square().sum()
            return total

        plain = cost(None)
        best = Scaling(torch.ones_like(reach), torch.full_like(plain, torch.nan), plain, plain)
        for number in range(grid + 1):
            candidate = scales(reach, weights, number / grid, producers, channels)
            error = cost(candidate)
            better = error < best.cost
            best = Scaling(
                torch.where(better, candidate, best.scales),
                torch.where(better, number / grid, best.alpha),
                torch.where(better, error, best.cost),
                plain,
            )
        return best


def _shared(values: Tensor, producers: Tensor | None, channels: int | None) -> Tensor:
    """Return the largest value of all inputs from one channel."""
    if producers is None:
        return values
    largest = values.new_zeros(channels or int(producers.max()) + 1).scatter_reduce_(0, producers, values, "amax")
    return largest[producers]
