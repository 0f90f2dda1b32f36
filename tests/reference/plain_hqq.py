"""HQQ as its paper writes it, one group at a time in float64, with a zero point that is a whole number."""

import math

import torch

from quantkit.formats import load_format
from quantkit.scheme import WeightScheme


def cost(weights: list[float], scale: float, zero: float, norm: float, low: int, high: int) -> float:
    """`sum |w - (c - z) s|^p` of the nearest codes."""
    total = 0.0
    for w in weights:
        code = min(max(round(w / scale) + zero, low), high)
        total += abs(w - (code - zero) * scale) ** norm
    return total


def best(weights: list[float], scheme: WeightScheme, norm: float, beta: float, growth: float, turns: int) -> float:
    """The least cost that the alternation comes by, from min-max on."""
    form = load_format(scheme.format)
    scale_, zero_ = form.parameters(torch.tensor(min(weights)), torch.tensor(max(weights)), scheme)
    scale, zero = float(scale_), 0.0 if zero_ is None else float(zero_)
    unit, least = scale, math.inf
    for _ in range(turns + 1):
        least = min(least, cost(weights, scale, zero, norm, form.low, form.high))
        codes = [min(max(round(w / scale) + zero, form.low), form.high) for w in weights]
        aims = []
        for w, c in zip(weights, codes, strict=True):
            rest = w - (c - zero) * scale
            size = abs(rest) / unit
            kept = max(0.0, size - max(size, 1e-12) ** (norm - 1) / beta) * unit
            aims.append(w - math.copysign(kept, rest))
        beta *= growth
        if zero_ is not None:
            mean = sum(codes) / len(codes)
            slope = sum((c - mean) * a for c, a in zip(codes, aims, strict=True)) / sum((c - mean) ** 2 for c in codes)
            wanted = sum(c - a / slope for c, a in zip(codes, aims, strict=True)) / len(codes)
            zero = min(max(round(wanted), form.low), form.high)
        steps = [c - zero for c in codes]
        fitted = sum(c * a for c, a in zip(steps, aims, strict=True)) / sum(c * c for c in steps)
        if fitted > 0:
            scale = float(form.stored(torch.tensor(fitted), scheme))
    return least
