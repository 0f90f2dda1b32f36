"""Labelled accuracy as one would write it on paper: one item at a time, sorting instead of counting."""

import math


def softmax(row):
    top = max(row)
    powers = [math.exp(float(x) - float(top)) for x in row]
    return [x / sum(powers) for x in powers]


def kl(original, candidate):
    return sum(p * math.log(p / q) for p, q in zip(softmax(original), softmax(candidate), strict=True))


def among_first(row, label, k):
    """Whether the label is one of the first k classes; equal logits in the order of the classes."""
    order = sorted(range(len(row)), key=lambda c: (-float(row[c]), c))
    return label in order[:k]


def found(left, right, k):
    """For each pair, whether fewer than k others are as near as its partner."""
    unit = lambda v: [float(x) / math.sqrt(sum(float(y) ** 2 for y in v)) for x in v]  # noqa: E731
    left, right = [unit(v) for v in left], [unit(v) for v in right]
    near = [[sum(a * b for a, b in zip(u, v, strict=True)) for v in right] for u in left]
    return [sum(row[j] >= row[i] - 1e-6 for j in range(len(row)) if j != i) < k for i, row in enumerate(near)]
